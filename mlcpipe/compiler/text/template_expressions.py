"""Expressions of a chat template as nodes of its program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.tests import TESTS

from mlcpipe.compiler.text.template_nodes import Scope, Writer, not_covered
from mlcpipe.runtime.text.template_sandbox import Sandbox

# Filters, tests and methods that mlcpipe/native/runtime/text knows.
_FILTERS = """abs batch capitalize center default dictsort escape first float forceescape groupby indent int items join
    last length list lower max min replace reverse round safe slice sort string sum title tojson trim truncate unique
    upper"""
_TESTS = """boolean callable defined divisibleby eq escaped even false float ge gt in integer iterable le lt mapping ne
    none number odd sameas sequence string true undefined"""
FILTER_NAMES, TEST_NAMES = frozenset(_FILTERS.split()), frozenset(_TESTS.split())
# Methods of Python's types that the sandbox allows and the native runtime lacks.
_NOT_COVERED_METHODS = {"casefold", "isidentifier", "islower", "isprintable", "istitle", "isupper", "swapcase"}
_ALIASES = {
    "count": "length",
    "d": "default",
    "e": "escape",
    "equalto": "eq",
    "greaterthan": "gt",
    "lessthan": "lt",
    **dict(zip(("==", "!=", ">", "<", ">=", "<="), ("eq", "ne", "gt", "lt", "ge", "le"), strict=True)),
}
_BINARY = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
_COMPARE = ("eq", "ne", "gt", "gteq", "lt", "lteq", "in", "notin")
_UNARY: dict[type[nodes.Node], str] = {
    nodes.Not: "Not",
    nodes.Neg: "Negative",
    nodes.Pos: "Positive",
    nodes.And: "And",
    nodes.Or: "Or",
}
_STRFTIME = re.compile(r"(?:[^%]|%-?[aAbBdHIjmMpSyY]|%[eFTZz%])*")
_TOJSON = [("ensure_ascii", False), ("indent", None), ("separators", None), ("sort_keys", False)]
_SELECTS = {"select": (1, False), "reject": (0, False), "selectattr": (1, True), "rejectattr": (0, True)}

Given = tuple[list[nodes.Expr], dict[str, nodes.Expr]]


class Expressions:
    """Adds expressions to `writer`. `captured` is the node of a filter block's text."""

    def __init__(self, writer: Writer, sandbox: Sandbox) -> None:
        self._writer = writer
        self._sandbox = sandbox
        self.names: set[str] = set()  # of filters and attributes

    def add(self, node: nodes.Node, scope: Scope) -> int:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is not None:
            return int(method(node, scope))
        if isinstance(node, _BINARY):
            left, right = self.add(node.left, scope), self.add(node.right, scope)
            return self._writer.add("Binary", _BINARY.index(type(node)), left, right)
        if type(node) in _UNARY:
            parts = (node.left, node.right) if isinstance(node, nodes.BinExpr) else (node.node,)  # type: ignore[attr-defined]
            return self._writer.add(_UNARY[type(node)], *(self.add(part, scope) for part in parts))
        raise not_covered(f"the expression {type(node).__name__}", node.lineno)

    def optional(self, node: nodes.Expr | None, scope: Scope) -> int:
        return 0 if node is None else self.add(node, scope) + 1

    def _each(self, parts: Sequence[nodes.Expr], scope: Scope) -> list[int]:
        return [self.add(part, scope) for part in parts]

    def _const(self, node: nodes.Const, scope: Scope) -> int:
        return self._writer.constant(node.value, node.lineno)

    def _templatedata(self, node: nodes.TemplateData, scope: Scope) -> int:
        return self._writer.constant(node.data)

    def _name(self, node: nodes.Name, scope: Scope) -> int:
        if node.name == "self" and scope.symbols.find_load(scope.symbols.ref("self")) == ("resolve", "self"):
            raise not_covered("the variable self", node.lineno)
        return self._writer.add("Load", *scope.find(node.name), self._writer.string(node.name))

    def _tuple(self, node: nodes.Tuple, scope: Scope) -> int:
        return self._writer.add("Tuple", *self._each(node.items, scope))

    def _list(self, node: nodes.List, scope: Scope) -> int:
        return self._writer.add("List", *self._each(node.items, scope))

    def _dict(self, node: nodes.Dict, scope: Scope) -> int:
        return self._writer.add(
            "Dict", *self._each([part for pair in node.items for part in (pair.key, pair.value)], scope)
        )

    def _condexpr(self, node: nodes.CondExpr, scope: Scope) -> int:
        why = f"the inline if-expression on line {node.lineno} evaluated to false and no else section was defined."
        test, then = self.add(node.test, scope), self.add(node.expr1, scope)
        return self._writer.add("Cond", test, then, self.optional(node.expr2, scope), self._writer.string(why))

    def _concat(self, node: nodes.Concat, scope: Scope) -> int:
        return self._writer.add("Concat", *self._each(node.nodes, scope))

    def _compare(self, node: nodes.Compare, scope: Scope) -> int:
        operands = [self.add(node.expr, scope)]
        for part in node.ops:
            operands += [_COMPARE.index(part.op), self.add(part.expr, scope)]
        return self._writer.add("Compare", *operands)

    def _getattr(self, node: nodes.Getattr, scope: Scope) -> int:
        self.names.add(node.attr)
        return self._writer.add("GetAttr", self.add(node.node, scope), self._writer.string(node.attr))

    def _getitem(self, node: nodes.Getitem, scope: Scope) -> int:
        owner = self.add(node.node, scope)
        if isinstance(node.arg, nodes.Slice):
            parts = (node.arg.start, node.arg.stop, node.arg.step)
            return self._writer.add("Slice", owner, *(self.optional(part, scope) for part in parts))
        if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
            self.names.add(node.arg.value)
        return self._writer.add("GetItem", owner, self.add(node.arg, scope))

    def _call(self, node: nodes.Call, scope: Scope, caller: int | None = None) -> int:
        name = node.node.attr if isinstance(node.node, nodes.Getattr) else None
        if name in _NOT_COVERED_METHODS:
            raise not_covered(f"the method {name}", node.lineno)
        if isinstance(node.node, nodes.Name) and node.node.name == "strftime_now":
            form = node.args[0] if node.args else None
            if not isinstance(form, nodes.Const) or not _STRFTIME.fullmatch(str(form.value)):
                raise not_covered("strftime_now with a format that is computed, or has other directives", node.lineno)
        return self._writer.add("Call", self.add(node.node, scope), self.arguments(node, scope, caller))

    call = _call

    def arguments(self, node: nodes.Call, scope: Scope, caller: int | None) -> int:
        operands = [self.optional(node.dyn_args, scope), self.optional(node.dyn_kwargs, scope)]
        for part in node.args:
            operands += [0, self.add(part, scope)]
        for keyword in node.kwargs:
            operands += [self._writer.string(keyword.key), self.add(keyword.value, scope)]
        if caller is not None:
            operands += [self._writer.string("caller"), caller]
        return self._writer.add("Arguments", *operands)

    def _filter(self, node: nodes.Filter, scope: Scope, captured: int | None = None) -> int:
        if node.name.startswith("mlcpipe.") and node.node is not None:
            return self.add(node.node, scope)
        if node.node is None:
            value = captured
        elif isinstance(node.node, nodes.Filter):
            value = self._filter(node.node, scope, captured)
        else:
            value = self.add(node.node, scope)
        if value is None:
            raise AssertionError("a filter without a value")
        if node.name not in self._sandbox.filters:  # jinja2 only lets it stand in a branch
            return self._fail("TemplateRuntimeError", f"No filter named {node.name!r} found.")
        given = self._given(node)
        if node.name == "format":
            return self._format(value, given, scope)
        if node.name == "map":
            return self._map(value, given, node.lineno, scope)
        if node.name in _SELECTS:
            return self._select(node.name, value, given, node.lineno, scope)
        name, arguments = self._bound("filter", node.name, given, node.lineno, scope)
        return self._writer.add("Filter", self._writer.string(name), value, arguments)

    filtered = _filter

    def _test(self, node: nodes.Test, scope: Scope) -> int:
        value = self.add(node.node, scope)
        if node.name not in self._sandbox.tests:
            return self._fail("TemplateRuntimeError", f"No test named {node.name!r} found.")
        name, arguments = self._bound("test", node.name, self._given(node), node.lineno, scope)
        return self._writer.add("Test", self._writer.string(name), value, arguments)

    def _fail(self, kind: str, text: str) -> int:
        return self._writer.add("Fail", self._writer.string(kind), self._writer.string(text))

    def _given(self, node: nodes.Filter | nodes.Test) -> Given:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise not_covered(f"{node.name} with * or **", node.lineno)
        return list(node.args), {str(keyword.key): keyword.value for keyword in node.kwargs}

    def _bound(self, what: str, name: str, given: Given, line: int, scope: Scope) -> tuple[str, int]:
        """The name of a filter or test and its Arguments, one for each parameter after the value."""
        self.names.add(name)
        canonical = _ALIASES.get(name, name)
        if canonical not in (FILTER_NAMES if what == "filter" else TEST_NAMES):
            raise not_covered(f"the {what} {name}", line)
        values: list[Any] = []
        rest, named = list(given[0]), dict(given[1])
        for parameter, default in _parameters(what, name):
            value = rest.pop(0) if rest else named.pop(parameter, default)
            if value is inspect.Parameter.empty:
                raise not_covered(f"the {what} {name} without {parameter}", line)
            values.append(value)
        if rest or named:
            raise not_covered(f"the {what} {name} with more arguments than it takes", line)
        operands = [0, 0]
        for value in values:
            is_node = isinstance(value, nodes.Expr)
            operands += [0, self.add(value, scope) if is_node else self._writer.constant(value)]
        return canonical, self._writer.add("Arguments", *operands)

    def _format(self, value: int, given: Given, scope: Scope) -> int:
        """`value | format(...)` is `value % (...)`."""
        args, kwargs = given
        if args and kwargs:
            return self._fail("FilterArgumentError", "can't handle positional and keyword arguments at the same time")
        if kwargs:
            parts = [part for key, one in kwargs.items() for part in (self._writer.constant(key), self.add(one, scope))]
            right = self._writer.add("Dict", *parts)
        else:
            right = self._writer.add("Tuple", *self._each(args, scope))
        text = self._writer.add("Filter", self._writer.string("string"), value, self._writer.add("Arguments", 0, 0))
        return self._writer.add("Binary", _BINARY.index(nodes.Mod), text, right)

    def _map(self, items: int, given: Given, line: int, scope: Scope) -> int:
        args, kwargs = given
        if not args and "attribute" in kwargs and not set(kwargs) - {"attribute", "default"}:
            attribute, default = kwargs["attribute"], kwargs.get("default", nodes.Const(None))
            return self._writer.add("MapAttr", items, self.add(attribute, scope), self.add(default, scope))
        name = self._constant_name("map", args, line)
        bound, arguments = self._bound("filter", name, (args[1:], kwargs), line, scope)
        return self._writer.add("Map", self._writer.string(bound), items, arguments)

    def _select(self, which: str, items: int, given: Given, line: int, scope: Scope) -> int:
        args, kwargs = given
        keep, by_attribute = _SELECTS[which]
        attribute: nodes.Expr = nodes.Const(None)
        if by_attribute:
            if not args:
                raise not_covered(f"{which} without an attribute", line)
            attribute, *args = args
        bound, arguments = "", self._writer.add("Arguments", 0, 0)
        looked_up = self.add(attribute, scope)
        if args:
            bound, arguments = self._bound(
                "test", self._constant_name(which, args, line), (args[1:], kwargs), line, scope
            )
        return self._writer.add("Select", keep, items, looked_up, self._writer.string(bound), arguments)

    @staticmethod
    def _constant_name(which: str, args: list[nodes.Expr], line: int) -> str:
        if not args or not isinstance(args[0], nodes.Const) or not isinstance(args[0].value, str):
            raise not_covered(f"{which} with a name that is computed", line)
        return args[0].value


def _parameters(what: str, name: str) -> list[tuple[str, Any]]:
    """Parameters after the value, with their defaults."""
    if name == "tojson":
        return [*_TOJSON]
    known = cast(dict[str, Callable[..., Any]], FILTERS if what == "filter" else TESTS)
    parameters = list(inspect.signature(known[name]).parameters.values())
    first = 2 if parameters[0].name in ("context", "env", "environment", "eval_ctx") else 1
    return [(parameter.name, parameter.default) for parameter in parameters[first:]]
