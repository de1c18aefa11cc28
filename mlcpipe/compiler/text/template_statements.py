"""Statements of a chat template as nodes of its program: scopes as in jinja2's own compiler."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import nodes
from jinja2.compiler import find_undeclared
from jinja2.idtracking import Symbols

from mlcpipe.compiler.text.template_expressions import Expressions
from mlcpipe.compiler.text.template_nodes import Function, Scope, Writer, not_covered
from mlcpipe.runtime.text.template_sandbox import Sandbox


class Statements:
    """Adds statements to `writer`."""

    def __init__(self, writer: Writer, sandbox: Sandbox) -> None:
        self._writer = writer
        self.expressions = Expressions(writer, sandbox)

    def template(self, tree: nodes.Template) -> tuple[int, int]:
        """The first node and the number of slots of a whole template."""
        symbols = Symbols()
        scope = Scope(symbols, Function(None, 0)).analyzed(lambda symbols: symbols.analyze_node(tree))
        made = [*scope.enter(self._writer), *self._each(tree.body, scope)]
        return self._writer.add("Block", *made), len(scope.function.slots)

    def _each(self, body: Sequence[nodes.Node], scope: Scope) -> list[int]:
        return [self._add(node, scope) for node in body]

    def _add(self, node: nodes.Node, scope: Scope) -> int:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            raise not_covered(f"the statement {type(node).__name__}", node.lineno)
        return int(method(node, scope))

    def _body(self, body: Sequence[nodes.Node], scope: Scope, *, leave: bool = True) -> int:
        """A scope's statements, between those that set and clear its names."""
        made = [*scope.enter(self._writer), *self._each(body, scope)]
        return self._writer.block([*made, *(scope.leave(self._writer) if leave else [])])

    def _output(self, node: nodes.Output, scope: Scope) -> int:
        made = []
        for part in node.nodes:
            inner = part.node if isinstance(part, nodes.Filter) and part.name == "mlcpipe.out" else part
            if isinstance(inner, nodes.TemplateData):
                made.append(self._writer.add("Data", self._writer.string(inner.data)))
            elif inner is not None:
                made.append(self._writer.add("Output", self.expressions.add(inner, scope)))
        return self._writer.block(made)

    def _if(self, node: nodes.If, scope: Scope) -> int:
        otherwise = self._writer.block(self._each(node.else_, scope)) + 1 if node.else_ else 0
        for part in reversed([node, *node.elif_]):
            test = self.expressions.add(part.test, scope)
            otherwise = self._writer.add("If", test, self._writer.block(self._each(part.body, scope)), otherwise) + 1
        return otherwise - 1

    def _target(self, node: nodes.Node, scope: Scope) -> int:
        if isinstance(node, nodes.Name):
            return self._writer.add("Store", scope.own(node.name))
        if isinstance(node, nodes.NSRef):
            return self._writer.add("StoreAttr", *scope.find(node.name), self._writer.string(node.attr))
        if isinstance(node, nodes.Tuple):
            return self._writer.add("StoreTuple", *(self._target(part, scope) for part in node.items))
        raise not_covered(f"an assignment to {type(node).__name__}", node.lineno)

    def _assign(self, node: nodes.Assign, scope: Scope) -> int:
        value = self.expressions.add(node.node, scope)
        return self._writer.add("Set", self._target(node.target, scope), value)

    def _assignblock(self, node: nodes.AssignBlock, scope: Scope) -> int:
        inner = scope.inner().analyzed(lambda symbols: symbols.analyze_node(node))
        captured = self._writer.add("Capture", self._body(node.body, inner, leave=False))
        value = self.expressions.filtered(node.filter, inner, captured) if node.filter is not None else captured
        return self._writer.block(
            [self._writer.add("Set", self._target(node.target, scope), value), *inner.leave(self._writer)]
        )

    def _filterblock(self, node: nodes.FilterBlock, scope: Scope) -> int:
        inner = scope.inner().analyzed(lambda symbols: symbols.analyze_node(node))
        captured = self._writer.add("Capture", self._body(node.body, inner, leave=False))
        output = self._writer.add("Output", self.expressions.filtered(node.filter, inner, captured))
        return self._writer.block([output, *inner.leave(self._writer)])

    def _with(self, node: nodes.With, scope: Scope) -> int:
        inner = scope.inner().analyzed(lambda symbols: symbols.analyze_node(node))
        made = inner.enter(self._writer)
        for target, value in zip(node.targets, node.values, strict=True):
            made.append(self._writer.add("Set", self._target(target, inner), self.expressions.add(value, scope)))
        return self._writer.block([*made, *self._each(node.body, inner), *inner.leave(self._writer)])

    def _break(self, node: nodes.Break, scope: Scope) -> int:
        return self._writer.add("Break")

    def _continue(self, node: nodes.Continue, scope: Scope) -> int:
        return self._writer.add("Continue")

    def _for(self, node: nodes.For, scope: Scope) -> int:
        inner = scope.inner(function=bool(node.recursive))
        around = Scope(scope.symbols, inner.function)  # the same names, from inside of the loop's function
        names_loop = "loop" in find_undeclared(node.iter_child_nodes(only=("body",)), ("loop",))
        slot = inner.function.slot(inner.symbols.declare_parameter("loop")) + 1 if node.recursive or names_loop else 0
        inner.symbols.analyze_node(node, for_branch="body")
        target = self._target(node.target, inner)
        test = self._loop_test(node, around) if node.test is not None else 0
        body = self._body(node.body, inner, leave=False)
        otherwise = 0
        if node.else_:
            branch = around.inner().analyzed(lambda symbols: symbols.analyze_node(node, for_branch="else"))
            otherwise = self._body(node.else_, branch) + 1
        items = self.expressions.add(node.iter, scope)
        made = self._writer.add("For", target, 0 if node.recursive else items + 1, slot, test, body, otherwise)
        if node.recursive:
            return self._writer.add("Recursive", len(inner.function.slots), made, items)
        return self._writer.block([made, *inner.leave(self._writer)])

    def _loop_test(self, node: nodes.For, around: Scope) -> int:
        scope = around.inner(function=True).analyzed(lambda symbols: symbols.analyze_node(node, for_branch="test"))
        enter, target = scope.enter(self._writer), self._target(node.target, scope)
        loads = self._writer.block(enter) + 1 if enter else 0
        test = self.expressions.add(node.test, scope) if node.test is not None else 0
        return self._writer.add("LoopTest", len(scope.function.slots), loads, target, test) + 1

    def _macro(self, node: nodes.Macro, scope: Scope) -> int:
        made = self._function(node, node.name, scope)
        return self._writer.add("Set", self._writer.add("Store", scope.own(node.name)), made)

    def _callblock(self, node: nodes.CallBlock, scope: Scope) -> int:
        made = self._function(node, "caller", scope)
        return self._writer.add("Output", self.expressions.call(node.call, scope, made))

    def _function(self, node: nodes.Macro | nodes.CallBlock, name: str, scope: Scope) -> int:
        inner = scope.inner(function=True)
        inner.symbols.analyze_node(node)
        given = [argument.name for argument in node.args]
        used = find_undeclared(node.body, ("caller", "kwargs", "varargs"))
        special = [
            inner.function.slot(inner.symbols.declare_parameter(one)) + 1 if one in used and one not in given else 0
            for one in ("caller", "kwargs", "varargs")
        ]
        inner.symbols.analyze_node(node)
        parameters: list[int] = []
        for index, argument in enumerate(given):
            first = len(given) - len(node.defaults)
            default = self.expressions.add(node.defaults[index - first], inner) + 1 if index >= first else 0
            parameters += [inner.own(argument), self._writer.string(argument), default]
        enter = inner.enter(self._writer)
        loads = self._writer.block(enter) + 1 if enter else 0
        body = self._writer.block(self._each(node.body, inner))
        slots = len(inner.function.slots)
        return self._writer.add("Macro", self._writer.string(name), slots, *special, loads, body, *parameters)
