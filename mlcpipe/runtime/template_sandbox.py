"""A Jinja environment that bounds the time and memory of any template, in this process.

Why in this process. A worker process with a time limit is the other way. It costs about 100 ms to start, needs
RLIMIT_AS, which macOS ignores and Windows lacks, and fails in a frozen application. Threads cannot be killed, signals
reach only the main thread, and `sys.settrace` does not see inside one C call such as `'a' * 10**10`. So nothing here
waits and kills: each operation is counted before or as it happens.

How. A template reaches Python only through what its compiled form calls. All of these pass through this module:

* statements: the syntax tree may hold only the node types of `_ALLOWED` (no include, import, extends, block);
* loops: each round, and each evaluation of an `if` in a loop's head, is a step (`_Guard.visit_For`);
* operators: all seven and unary minus are intercepted (`call_binop`), sizes are computed before `*`, `**`, `%`;
* literals, slices, `~` and comparisons: the tree is rewritten so that their values are counted (`_Guard`);
* attributes and calls: only listed methods of str, list, dict, tuple (`is_safe_attribute`, `call`), so no dunder
  attribute can be named, and nesting of macros is counted;
* filters and tests: only the listed ones, each counted, those that amplify bounded (`template_methods`,
  `template_filters`);
* output, also inside macros and set blocks: every piece is counted as text (`mlcpipe.out`).

Containers are weighed with shared parts counted each time, so printing, comparing or hashing one later is bounded
too; namespaces, the only mutable values, cannot be put in containers or written out. A last net is a look at the
thread's processor time every 64 steps: no single step takes longer than some milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from jinja2 import Undefined, nodes, pass_context
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from mlcpipe.runtime.template_budget import MAX_RANGE, Budget, LimitError, budget_of
from mlcpipe.runtime.template_filters import filters, tests
from mlcpipe.runtime.template_methods import CONSTANT_METHODS, binary, method_of

MAX_NODES = 20_000  # of the syntax tree; templates with tools and reasoning have 200 to 400
_MAX_COMPARISONS = 8
_MAX_ARGUMENTS = 1000

_NODE_TYPES = (
    "Template Output TemplateData For If Macro CallBlock FilterBlock With Assign AssignBlock ExprStmt Continue Break "
    "Const Name NSRef Tuple List Dict Pair Keyword CondExpr Filter Test Call Getattr Getitem Slice Concat Compare "
    "Operand Mul Div FloorDiv Add Sub Mod Pow And Or Not Neg Pos"
)
_ALLOWED = frozenset(_NODE_TYPES.split())
_LOOP_NAMES = "index index0 revindex revindex0 first last length previtem nextitem depth depth0 cycle changed"
_LOOP_ATTRIBUTES = frozenset(_LOOP_NAMES.split())
_LONG_NUMBER = re.compile(r"\d{5,}")


class _Guard(NodeTransformer):
    """Rewrites a syntax tree so that every value and every round of a loop is counted."""

    def __init__(self, environment: SandboxEnvironment) -> None:
        self._environment = environment

    def _through(self, node: nodes.Node, name: str) -> nodes.Filter:
        wrapped = nodes.Filter(
            cast(nodes.Expr, node), f"mlcpipe.{name}", [], [], None, None, lineno=node.lineno
        )
        wrapped.set_environment(self._environment)
        return wrapped

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._through(child, "out") for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through(node.iter, "iterable")
        if node.test is not None:
            node.test = self._through(node.test, "step")
        nothing = nodes.Const(None, lineno=node.lineno)
        nothing.set_environment(self._environment)
        step = nodes.ExprStmt(self._through(nothing, "step"), lineno=node.lineno)
        step.set_environment(self._environment)
        node.body.insert(0, step)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        node.nodes = [self._through(child, "out") for child in node.nodes]
        return self._through(node, "value")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        if len(node.ops) == 1 and node.ops[0].op in ("in", "notin"):
            # `a in b` may search a long text: as the test of that name it is counted by the length of b.
            return self._contains(node.expr, node.ops[0])
        chained_search = any(operand.op in ("in", "notin") for operand in node.ops)
        if len(node.ops) > _MAX_COMPARISONS or chained_search:
            raise LimitError("a long chain of comparisons")
        self.generic_visit(node)
        return self._through(node, "step")

    def _contains(self, value: nodes.Expr, operand: nodes.Operand) -> nodes.Expr:
        left, right = self.visit(value), self.visit(operand.expr)
        test: nodes.Expr = nodes.Test(left, "in", [right], [], None, None, lineno=operand.lineno)
        if operand.op == "notin":
            test = nodes.Not(test, lineno=operand.lineno)
        test.set_environment(self._environment)
        return test

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, "value") if isinstance(node.arg, nodes.Slice) else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, "value") if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, "value")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return self._through(node, "value")

    def _visit_arguments(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self._through(node.dyn_args, "arguments")
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = self._through(node.dyn_kwargs, "arguments")
        return node

    visit_Call = visit_Filter = visit_Test = _visit_arguments


def _counter(function: Callable[[Budget, Any], Any]) -> Callable[..., Any]:
    @pass_context
    def call(context: Context, value: Any) -> Any:
        budget = budget_of(context)
        budget.tick()
        return function(budget, value)

    return call


def _out(budget: Budget, value: Any) -> str:
    budget.plain(value)
    text: str = budget.take(str(value))
    return text


def _iterable(budget: Budget, value: Any) -> Any:
    budget.plain(value)
    return value


def _arguments(budget: Budget, value: Any) -> Any:
    if not isinstance(value, (list, tuple, dict)) or len(value) > _MAX_ARGUMENTS:
        raise LimitError("unpacked arguments that are not a short list or mapping")
    return value


class _Formatter(SandboxedFormatter):
    """str.format with bounded widths; attribute access goes through the environment's checks."""

    def __init__(self, environment: SandboxEnvironment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget
        self._length = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        self._budget.tick()
        self._budget.plain(value)
        if len(format_spec) > 64 or _LONG_NUMBER.search(format_spec):
            raise LimitError("a format wider than 9999")
        text: str = self._budget.take(super().format_field(value, format_spec))
        self._length += len(text)
        self._budget.fits_text(self._length)
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.plain(value)
        return super().convert_field(value, conversion)


class _Format:
    """The bound method `text.format`, waiting for its call."""

    def __init__(self, text: str) -> None:
        self.text = text

    def run(self, environment: SandboxEnvironment, budget: Budget, args: Any, kwargs: Any) -> str:
        return _Formatter(environment, budget).vformat(self.text, args, kwargs)


def _range(*bounds: int) -> range:
    values = range(*bounds)
    if len(values) > MAX_RANGE:
        raise LimitError(f"range over {MAX_RANGE}")
    return values


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _namespace(*args: Any, **kwargs: Any) -> Namespace:
    if any(str(name).startswith("_") for name in dict(*args, **kwargs)):
        raise LimitError("a namespace with a name that starts with an underscore")
    return Namespace(*args, **kwargs)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates in bounded form; each rendering needs a Budget under the context key `BUDGET`.

    `functions` are more globals that templates may call, each with its own bound on what it returns.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])
    intercepted_unops = frozenset(["-", "+"])

    def __init__(self, functions: dict[str, Callable[..., Any]], extensions: list[Any]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, cache_size=0
        )
        callables = {"range": _range, "dict": _dict, "namespace": _namespace, **functions}
        self._callables = tuple(callables.values())
        self.globals = dict(callables)
        self.filters.clear()
        self.filters.update(cast(Any, filters()))
        counters = {
            "mlcpipe.out": _counter(_out),
            "mlcpipe.value": _counter(lambda budget, value: budget.take(value, fresh=False)),
            "mlcpipe.step": _counter(lambda budget, value: value),
            "mlcpipe.iterable": _counter(_iterable),
            "mlcpipe.arguments": _counter(_arguments),
        }
        self.filters.update(cast(Any, counters))
        self.tests.clear()
        self.tests.update(cast(Any, tests()))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for count, node in enumerate(tree.find_all(nodes.Node)):
            kind = type(node).__name__
            if kind not in _ALLOWED:
                raise LimitError(f"the statement {kind.lower()} in line {node.lineno}")
            if count > MAX_NODES:
                raise LimitError(f"more than {MAX_NODES} syntax nodes")
        guarded: nodes.Template = _Guard(self).visit(tree)
        return guarded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return binary(budget_of(context), operator, left, right)

    def call_unop(self, context: Context, operator: str, arg: Any) -> Any:
        budget_of(context).tick()
        return super().call_unop(context, operator, arg)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, LoopContext):
            return attr in _LOOP_ATTRIBUTES
        return isinstance(obj, Namespace) or method_of(obj, attr) is not None

    def wrap_str_format(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        if type(owner) is str and getattr(value, "__name__", "") == "format":
            return _Format(owner)
        return None  # format_map and Markup.format are no safe attributes

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.tick()
        if isinstance(obj, (Macro, LoopContext)):
            if isinstance(obj, LoopContext):
                budget.plain(*args)
            budget.enter()
            try:
                return budget.take(context.call(obj, *args, **kwargs))
            finally:
                budget.leave()
        # What the compiler adds for functions that take the context.
        kwargs.pop("_block_vars", None)
        kwargs.pop("_loop_vars", None)
        if isinstance(obj, _Format):
            return budget.take(obj.run(self, budget, args, kwargs))
        if any(obj is function for function in self._callables):
            return budget.take(obj(*args, **kwargs))
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, LoopContext) and name in ("cycle", "changed"):
            return obj(*args, **kwargs)
        if isinstance(obj, Undefined):
            return obj()  # raises UndefinedError with the name
        method = method_of(owner, name)
        if method is None:
            raise LimitError(f"a call of {name or type(obj).__name__}")
        budget.plain(*args, *kwargs.values())
        if name not in CONSTANT_METHODS:
            budget.scan(owner)
        return budget.take(method(budget, obj, *args, **kwargs))
