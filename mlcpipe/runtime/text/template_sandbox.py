"""A Jinja environment that bounds the time and memory of an untrusted chat template, in this process.

Protections:

* `jinja2.sandbox.ImmutableSandboxedEnvironment`: no private attributes, no changes of lists and mappings. On top of it
  methods are an allowlist, and there is no include, import, extends or block.
* Processor time: each round of a loop, operator, call, filter, test and output looks at the clock of this thread. No
  single operation takes long, because values are small: at most `MAX_TEXT` characters and `MAX_ITEMS` items, more
  where the messages are larger. A container's parts count as often as they are shared, so it is quick to print;
  integers that can share a hash count by the square of their number.
* Memory: what operations make is counted, up to `MAX_BYTES`. Operations whose result can be much larger than
  their arguments (`*`, `**`, `%`, format, replace, join, indent, …) compute its size first.

Other ways were worse: a worker process takes 100 ms to start and needs RLIMIT_AS, which macOS ignores and Windows
lacks; threads cannot be killed, and tracing does not see inside one C call such as `'a' * 10**10`.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.filters import FILTERS
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, escape

MAX_SECONDS = 2.0  # processor time of the thread
MAX_TEXT = 1 << 20  # characters of one value, plus 4 times the input
MAX_ITEMS = 200_000  # of one container, plus the input's
MAX_BYTES = 128 << 20  # of all values made, plus 32 times the input
MAX_INPUT_TEXT = 64 << 20  # characters of all messages and extras
MAX_INPUT_ITEMS = 2_000_000
MAX_DEPTH = 100  # of nested containers
MAX_BITS = 4096  # of an integer
MAX_HASHED_BITS = 60  # larger integers can share a hash: then sets and dicts compare each with all others
MAX_WIDTH = 10_000  # of padding, an indent, a batch
MAX_NODES = 20_000  # of the syntax tree; templates with tools and reasoning have 200 to 2000

# Characters that can stand for a message's own while a template renders (`contents.py`): signs without case that
# Python's repr writes as they are, of a script that hardly anybody types (Sutton SignWriting).
STAND_INS = range(0x1D800, 0x1DA00)
_NOT_ASCII = re.compile(f"[^\x00-\x7f{chr(STAND_INS[0])}-{chr(STAND_INS[-1])}]")

_BUDGET = "mlcpipe budget"  # a variable that no template can name
_CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, type({}.keys()), type({}.values()), type({}.items()))
_REFUSED_NODES = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.EvalContextModifier)
# Slow for their input, or different at each call.
_REFUSED_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
_REFUSED_STR_METHODS = ("encode", "expandtabs", "format_map", "maketrans", "translate")
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(name for name in dir(str) if name[0] != "_" and name not in _REFUSED_STR_METHODS),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
}
_PADDING = ("batch", "center", "indent", "ljust", "rjust", "round", "slice", "zfill")
# Their time is the product of the lengths of the text and the argument.
_QUADRATIC = ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
_MAX_QUADRATIC_CHARS = 1000
_WIDE_FORMAT = re.compile(r"\d{5}|\*|:[^{}]*\{")  # a width over 9999, or one that is an argument


class LimitError(TemplateRuntimeError):
    """A template exceeds its budget, or uses something that no chat template needs."""


class Budget:
    """The limits of one rendering; `inputs`, the caller's data, widens them. `stand_ins` maps them to characters."""

    def __init__(self, inputs: object, stand_ins: Mapping[int, str]) -> None:
        escapes = {code: str(escape(char)) for code, char in stand_ins.items()}
        self._escapes = {code: text for code, text in escapes.items() if len(text) > 1}
        self._deadline = time.thread_time() + MAX_SECONDS
        self._max_text, self._max_items = MAX_INPUT_TEXT, MAX_INPUT_ITEMS
        items, text, _ = self.weigh(inputs)
        self._max_text, self._max_items = MAX_TEXT + 4 * text, MAX_ITEMS + items
        self._bytes = MAX_BYTES + 32 * text

    def escaped(self, value: Any) -> Any:
        """A text as HTML, with what a stand-in's character would become."""
        return escape(value).translate(self._escapes) if isinstance(value, str) else value

    def tick(self) -> None:
        if time.thread_time() > self._deadline:
            raise LimitError(f"more than {MAX_SECONDS:g} seconds of processor time")

    def fits(self, text: int = 0, items: int = 0) -> None:
        """Refuses a value of `text` characters or `items` items before it is made."""
        if text > self._max_text:
            raise LimitError(f"a text of {text} characters, more than {self._max_text}")
        if items > self._max_items:
            raise LimitError(f"a list of {items} items, more than {self._max_items}")

    def take(self, value: Any, *, item_bytes: int = 0) -> Any:
        """Counts a value that an operation made, with `item_bytes` for each new part; an iterator becomes a list."""
        self.tick()
        if isinstance(value, Iterator):
            value = list(islice(value, self._max_items + 1))
        if isinstance(value, (str, int, *_CONTAINERS)):
            self.weigh(value)
            self._bytes -= sys.getsizeof(value) + (item_bytes * len(value) if isinstance(value, _CONTAINERS) else 0)
        if self._bytes < 0:
            raise LimitError(f"more than {MAX_BYTES >> 20} MiB of values")
        return value

    def weigh(self, value: Any) -> tuple[int, int, int]:
        """Items, characters and nesting of `value` written out; parts that are shared count each time."""
        items = text = deepest = large = 0
        stack = [(value, 0)]
        while stack:
            part, depth = stack.pop()
            items += 1
            if isinstance(part, str):
                text += len(part)
            elif isinstance(part, _CONTAINERS):
                if depth > MAX_DEPTH:
                    raise LimitError(f"lists nested deeper than {MAX_DEPTH}")
                deepest = max(deepest, depth + 1)
                self.fits(items=items + len(stack) + len(part))
                children = [*part, *part.values()] if isinstance(part, dict) else part
                stack.extend((child, depth + 1) for child in children)
            elif isinstance(part, int):
                if part.bit_length() > MAX_BITS:
                    raise LimitError(f"an integer of more than {MAX_BITS} bits")
                text += part.bit_length() // 3
                large += part.bit_length() > MAX_HASHED_BITS
            self.fits(text=text, items=items + large * large // 100)
        return items, text, deepest

    def check_call(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses a filter or method `name` of `owner` whose result would be large, or that would take long."""
        given = (*args, *kwargs.values())
        if name in _PADDING and any(isinstance(value, int) and abs(value) > MAX_WIDTH for value in given):
            raise LimitError(f"{name} by more than {MAX_WIDTH}")
        if name in _QUADRATIC and any(isinstance(value, str) and len(value) > _MAX_QUADRATIC_CHARS for value in given):
            raise LimitError(f"{name} of more than {_MAX_QUADRATIC_CHARS} characters")
        if name == "indent":
            width = max((len(value) if isinstance(value, str) else int(value) for value in given), default=4)
            self.fits(text=len(str(owner)) + str(owner).count("\n") * width)
        elif name == "replace":
            old, new, *_ = [str(value) for value in given] + ["", ""]
            self.fits(text=len(str(owner)) + str(owner).count(old) * max(len(new) - len(old), 0))
        elif name == "join":
            method = isinstance(owner, str) and args  # text.join(parts), not parts | join(text)
            parts, separators = (args[0], (owner,)) if method and not kwargs else (owner, given)
            items, text, _ = self.weigh(parts)
            items = max(items, len(parts) if hasattr(parts, "__len__") else 1)
            self.fits(text=text + items * max((len(str(separator)) for separator in separators), default=0))
        elif name in ("format", "%"):
            if _WIDE_FORMAT.search(owner):
                raise LimitError("a format wider than 9999")
            _, text, _ = self.weigh(given)  # each field may be the whole of it
            widths = sum(map(int, re.findall(r"\d+", owner)))
            self.fits(text=len(owner) + widths + (owner.count("%") + owner.count("{")) * text)
        elif name == "sum" and not all(isinstance(value, (str, int, float, type(None))) for value in given):
            raise LimitError("sum of anything but numbers")

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Refuses `left operator right` where the result would be large."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, (str, list, tuple)) and isinstance(times, int):
                    size = len(value) * times
                    self.fits(size, 0) if isinstance(value, str) else self.fits(0, size)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if right > MAX_BITS or left.bit_length() * right > MAX_BITS:
                raise LimitError(f"an integer of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self.check_call("%", left, (right,), {})


def _range(*bounds: int) -> range:
    if any(isinstance(bound, int) and bound.bit_length() > MAX_HASHED_BITS for bound in bounds):
        raise LimitError(f"a range of integers of more than {MAX_HASHED_BITS} bits")
    return safe_range(*bounds)


class _Namespace(Namespace):
    """The only mutable value: written out in short, since it may hold itself."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Guard(NodeTransformer):
    """Routes operations without a function in compiled code through a filter that counts them."""

    def __init__(self, environment: Sandbox) -> None:
        self._environment = environment

    def _through(self, node: nodes.Node, name: str) -> nodes.Filter:
        wrapped = nodes.Filter(cast(nodes.Expr, node), f"mlcpipe.{name}", [], [], None, None, lineno=node.lineno)
        wrapped.set_environment(self._environment)
        return wrapped

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [self._through(child, "out") for child in node.nodes]
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._through(node.iter, "each")
        return node

    def _value(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return node
        if isinstance(node, nodes.Compare) and len(node.ops) > 8:
            raise LimitError("a long chain of comparisons")
        return self._through(node, "value")

    visit_Concat = visit_Compare = visit_Getitem = visit_Tuple = visit_List = visit_Dict = _value


class _AsParts(NodeTransformer):
    """Makes a text `….content` a list of one part: some templates of models of pictures know nothing else."""

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _parts(node) if isinstance(node.arg, nodes.Const) and node.arg.value == "content" else node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Expr:
        self.generic_visit(node)
        return _parts(node) if node.attr == "content" else node


def _parts(content: nodes.Expr) -> nodes.Expr:
    """`[{"type": "text", "text": content}] if content is string else content`."""
    asked, text, other = (copy.deepcopy(content) for _ in range(3))
    pairs = [nodes.Pair(nodes.Const("type"), nodes.Const("text")), nodes.Pair(nodes.Const("text"), text)]
    part, is_string = nodes.Dict(pairs), nodes.Test(asked, "string", [], [], None, None)
    return nodes.CondExpr(is_string, nodes.List([part]), other, lineno=content.lineno)


def _each(budget: Budget, values: Any) -> Iterator[Any]:
    for value in values:
        budget.tick()
        yield value


def _counted(name: str, function: Any) -> Callable[..., Any]:
    """A filter or test of jinja2 with its checks. It takes the context, so that none runs while compiling."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.check_call(name, str(value) if name == "format" else value, args, kwargs)
        first = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}
        result = function(*first.get(wants, ()), value, *args, **kwargs)
        if name in ("e", "escape", "forceescape"):
            result = budget.escaped(result)
        return budget.take(result, item_bytes=80)

    return call


def _own(function: Callable[[Budget, Any], Any]) -> Callable[..., Any]:
    return pass_context(lambda context, value: function(_budget_of(context), value))


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, with the arguments of transformers' filter of this name."""
    step = indent if isinstance(indent, int) else len(indent or "")
    if step > 16 or any(len(part) > 16 for part in separators or ()):
        raise LimitError("tojson with an indent or separator over 16 characters")
    budget = _budget_of(context)
    items, text, depth = budget.weigh(value)
    budget.fits(text=text + items * depth * max(step, 0))
    made = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        made = _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], made)
    return str(budget.take(made))


def _budget_of(context: Context) -> Budget:
    return cast(Budget, context.resolve_or_missing(_BUDGET))


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates in bounded form; render them with `render`.

    `functions` are more globals that templates may call, each with its own bound on what it returns. `parts`: a
    message's text is a list of one part.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self, functions: dict[str, Callable[..., Any]], extensions: list[Any], parts: bool = False) -> None:
        self._parts = parts
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, cache_size=0)
        self.globals = {"range": _range, "dict": dict, "namespace": _Namespace, **functions}
        self.filters = {name: _counted(name, FILTERS[name]) for name in FILTERS if name not in _REFUSED_FILTERS}
        self.filters |= {
            "tojson": _tojson,
            "mlcpipe.out": _own(lambda budget, value: budget.take(str(value))),
            "mlcpipe.value": _own(lambda budget, value: budget.take(value)),
            "mlcpipe.each": _own(_each),
        }
        self.tests = {name: _counted(name, function) for name, function in TESTS.items()}

    def render(self, template: Any, variables: dict[str, Any], stand_ins: Mapping[int, str]) -> str:
        """The text of `template`. Raises LimitError, and exceptions of the template's code."""
        text: str = template.render({**variables, _BUDGET: Budget(variables, stand_ins)})
        return text

    def words(self, source: str) -> set[str]:
        """The texts that a template calculates with, apart from what it only writes."""
        return {node.value for node in self.parse(source).find_all(nodes.Const) if isinstance(node.value, str)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if self._parts:
            tree = cast(nodes.Template, _AsParts().visit(tree))
            tree.set_environment(self)
        for count, node in enumerate(tree.find_all(nodes.Node)):
            if isinstance(node, _REFUSED_NODES):
                raise LimitError(f"the statement {type(node).__name__.lower()} in line {node.lineno}")
            if count > MAX_NODES:
                raise LimitError(f"more than {MAX_NODES} syntax nodes")
        return cast(nodes.Template, _Guard(self).visit(tree))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        budget.check_operator(operator, left, right)
        if operator == "+" and isinstance(left, Markup) is not isinstance(right, Markup):  # it escapes the other one
            left, right = (one if isinstance(one, Markup) else budget.escaped(one) for one in (left, right))
        return budget.take(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        allowed = (names for kind, names in _METHODS.items() if isinstance(obj, kind))
        return isinstance(obj, (LoopContext, Namespace)) or attr in next(allowed, ())

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            budget.check_call(method.__name__, owner, args, kwargs)
        # The parts that a text is cut into are new: their header, and up to 4 bytes for a character.
        item_bytes = 80 if isinstance(owner, str) else 0
        return budget.take(super().call(context, obj, *args, **kwargs), item_bytes=item_bytes)
