"""Statements of TensorIR: structured control flow, bindings, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm.tirx import ForKind
from tvm_ffi import structural_equal

from mlcpipe.compiler.backends.spirv.arithmetic import binary, joined
from mlcpipe.compiler.backends.spirv.casts import cast
from mlcpipe.compiler.backends.spirv.emitter import Value
from mlcpipe.compiler.backends.spirv.expressions import Expressions
from mlcpipe.compiler.backends.spirv.matrices import MATRIX
from mlcpipe.compiler.backends.spirv.opcodes import LoopControl, Op
from mlcpipe.compiler.backends.spirv.types import BOOL, INT32, Unsupported, dtype_of, integer, parse

# Attributes that do not change what a program computes. Those of loops, `pragma_...`, are ignored as well.
_HINTS = {"reduce_scope", "compute_scope", "extern_scope", "storage_alignment", "hand_threaded", "buffer_bind_scope"}

_BARRIER = "tirx.tvm_storage_sync"


@dataclass
class Facts:
    """Facts about a kernel that code generation needs in advance. Keys are handles of Vars and Buffers."""

    written: set[int] = field(default_factory=set)
    extents: dict[str, Any] = field(default_factory=dict)  # launch parameter -> extent
    names: dict[int, str] = field(default_factory=dict)  # argument -> its buffer's name
    has_barriers: bool = False
    has_matrices: bool = False
    _aliases: dict[int, int] = field(default_factory=dict)

    def root(self, key: int) -> int:
        """The memory that an alias refers to."""
        while key in self._aliases:
            key = self._aliases[key]
        return key

    def scan(self, statement: Any) -> None:
        """Collect facts from a statement and its children."""
        name = type(statement).__name__
        if name == "SeqStmt":
            for child in statement.seq:
                self.scan(child)
        elif name == "Evaluate":
            if type(statement.value).__name__ == "Call":
                self._call(statement.value)
        elif name == "BufferStore":
            self.written.add(self.root(statement.buffer.__chandle__()))
        elif name == "DeclBuffer":
            data = data_of(statement.data)
            self._aliases[statement.buffer.__chandle__()] = data
            self.names.setdefault(data, str(statement.buffer.name))
        elif name == "IfThenElse":
            self.scan(statement.then_case)
            if statement.else_case is not None:
                self.scan(statement.else_case)
        elif name in ("For", "While", "AttrStmt"):
            if name == "AttrStmt" and statement.attr_key == "thread_extent":
                self._launch(str(statement.node.thread_tag), statement.value)
            self.scan(statement.body)

    def _call(self, call: Any) -> None:
        name = str(getattr(call.op, "name", ""))
        self.has_barriers |= name == _BARRIER
        if name != "tirx.call_extern":
            return
        function = str(call.args[0].value)
        self.has_matrices |= function.startswith(MATRIX)
        if function == f"{MATRIX}store":
            self.written.add(self.root(call.args[5].args[0].source.__chandle__()))

    def _launch(self, tag: str, extent: Any) -> None:
        known = self.extents.setdefault(tag, extent)
        if not structural_equal(known, extent):
            raise Unsupported(f"{tag} of two sizes, {known} and {extent}")


def data_of(expr: Any) -> int:
    """The handle of the memory in `data=` of a buffer's declaration, which may be `buffer_data(buffer)`."""
    while type(expr).__name__ == "Call":
        if str(expr.op.name) != "tirx.buffer_data":
            raise Unsupported(f"memory at {expr.op.name}: pointers have no arithmetic")
        expr = expr.args[0]
    return int(expr.__chandle__())


class Statements:
    """Generates code of statements. `threads`: launch parameter -> its index, uint32."""

    def __init__(
        self, expressions: Expressions, threads: Mapping[str, Callable[[], Value]], *, has_barriers: bool = False
    ) -> None:
        self._values = expressions
        # Software devices run kernels with barriers as coroutines, which compile for seconds if loops are unrolled
        # (half a minute for sampling on Mesa 25). In such kernels, only loops that ask for it are unrolled.
        self._plain = LoopControl.DontUnroll if has_barriers else LoopControl.Nothing
        self._emitter = expressions.emitter
        self._memory = expressions.memory
        self._threads = threads
        self._loops: list[tuple[int, int]] = []  # labels (exit, continue) of the enclosing loops
        self._visitors: dict[str, Callable[[Any], None]] = {
            "SeqStmt": self._sequence,
            "Bind": lambda s: self._values.define(s.var, s.value),
            "Evaluate": self._evaluate,
            "BufferStore": self._store,
            "AllocBuffer": self._allocate,
            "DeclBuffer": self._declare,
            "AttrStmt": self._attribute,
            "IfThenElse": self._if,
            "For": self._for,
            "While": self._while,
            "Break": lambda s: self._leave(0),
            "Continue": lambda s: self._leave(1),
            "AssertStmt": lambda s: None,  # a kernel cannot report a failure
        }

    def __call__(self, statement: Any) -> None:
        """Generate code of a statement. Raises Unsupported."""
        visit = self._visitors.get(type(statement).__name__)
        if visit is None:
            raise Unsupported(f"statement {type(statement).__name__}")
        visit(statement)

    def _sequence(self, statement: Any) -> None:
        for child in statement.seq:
            self(child)

    def _evaluate(self, statement: Any) -> None:
        if type(statement.value).__name__ != "Call":
            return
        name = str(statement.value.op.name)
        if name == "tirx.break_loop":
            self._leave(0)
        elif name == "tirx.continue_loop":
            self._leave(1)
        elif name == "tirx.thread_return":
            self._emitter.emit(Op.Return)
            self._emitter.start(self._emitter.module.new_id())
        else:
            self._values.maybe(statement.value)

    def _store(self, statement: Any) -> None:
        if getattr(statement, "predicate", None) is not None:
            raise Unsupported("store with a predicate")
        with self._values.wide(dtype_of(statement.value)):
            value = self._values(statement.value)
        self._memory.store(statement.buffer.__chandle__(), self._values.index(statement.indices), value)

    def _allocate(self, statement: Any) -> None:
        buffer = statement.buffer
        count = 1
        for extent in buffer.ty.shape:
            size = integer(extent)
            if size is None:
                raise Unsupported(f"memory {buffer.name} whose size is only known at run time")
            count *= size
        element = parse(str(buffer.dtype))
        scope = str(buffer.ty.storage_scope)
        self._memory.allocate(buffer.__chandle__(), str(buffer.name), scope, element, count)

    def _declare(self, statement: Any) -> None:
        element = parse(str(statement.buffer.dtype))
        self._memory.view(statement.buffer.__chandle__(), data_of(statement.data), element)

    def _attribute(self, statement: Any) -> None:
        key = str(statement.attr_key)
        if key == "thread_extent":
            self._bind_thread(statement.node, statement.value)
        elif key not in _HINTS and not key.startswith("pragma_"):
            raise Unsupported(f"attribute {key}")
        self(statement.body)

    def _bind_thread(self, axis: Any, extent: Any) -> None:
        tag = str(axis.thread_tag)
        if tag not in self._threads:
            raise Unsupported(f"launch parameter {tag}")
        key = axis.var.__chandle__()
        if key not in self._values.env:
            self._values.env[key] = cast(self._emitter, self._threads[tag](), INT32)
            self._values.bounds.analyzer.bind(axis.var, tvm.ir.Range(0, extent))

    # Control flow

    def _if(self, statement: Any) -> None:
        then, otherwise = statement.then_case, statement.else_case
        condition = self._values(statement.condition)
        self._emitter.branch(condition, lambda: self(then), None if otherwise is None else lambda: self(otherwise))

    def _leave(self, to: int) -> None:
        """Break (0) or continue (1) the innermost loop; the rest of the block is unreachable."""
        if not self._loops:
            raise Unsupported("a break or continue outside of loops")
        self._emitter.emit(Op.Branch, self._loops[-1][to])
        self._emitter.start(self._emitter.module.new_id())

    def _for(self, loop: Any) -> None:
        """Header (phi, test), body, continue block: structured control flow (specification 2.11)."""
        kind = ForKind(loop.kind)
        if kind not in (ForKind.SERIAL, ForKind.UNROLLED):
            raise Unsupported(f"loop of kind {kind.name.lower()}")
        emitter, values = self._emitter, self._values
        first, count = joined(emitter, values(loop.min), values(loop.extent))
        key = loop.loop_var.__chandle__()
        if integer(loop.extent) == 1:
            values.env[key] = first
            self(loop.body)
            return
        step = emitter.constant(first.dtype, 1) if loop.step is None else cast(emitter, values(loop.step), first.dtype)
        end = count if integer(loop.min) == 0 else binary(emitter, "Add", first, count)
        # TVM may have unrolled an enclosing loop: then the variable has a new range in each iteration.
        values.bounds.analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent), True)
        header, body, again, after = (emitter.module.new_id() for _ in range(4))
        following, before = emitter.module.new_id(), emitter.block
        type_id = emitter.types.id(first.dtype)
        with emitter.loop():
            emitter.emit(Op.Branch, header)
            emitter.start(header)
            at = Value(first.dtype, (emitter.result(Op.Phi, type_id, first.id, before, following, again),))
            values.env[key] = at
            test = emitter.result(
                Op.SLessThan if at.dtype.kind == "int" else Op.ULessThan, emitter.boolean(), at.id, end.id
            )
            unroll = kind == ForKind.UNROLLED or any(str(name).startswith("pragma_unroll") for name in loop.annotations)
            emitter.emit(Op.LoopMerge, after, again, LoopControl.Unroll if unroll else self._plain)
            emitter.emit(Op.BranchConditional, test, body, after)
            emitter.start(body)
            self._body(loop.body, after, again)
            emitter.start(again)
            emitter.emit(Op.IAdd, type_id, following, at.id, step.id)
            emitter.emit(Op.Branch, header)
        emitter.start(after)

    def _while(self, loop: Any) -> None:
        emitter = self._emitter
        header, test, body, again, after = (emitter.module.new_id() for _ in range(5))
        with emitter.loop():
            emitter.emit(Op.Branch, header)
            emitter.start(header)
            emitter.emit(Op.LoopMerge, after, again, self._plain)
            emitter.emit(Op.Branch, test)
            emitter.start(test)
            condition = cast(emitter, self._values(loop.condition), BOOL)
            emitter.emit(Op.BranchConditional, condition.id, body, after)
            emitter.start(body)
            self._body(loop.body, after, again)
            emitter.start(again)
            emitter.emit(Op.Branch, header)
        emitter.start(after)

    def _body(self, body: Any, after: int, again: int) -> None:
        self._loops.append((after, again))
        with self._emitter.scope():
            self(body)
        self._loops.pop()
        self._emitter.emit(Op.Branch, again)
