"""The scratch memory of a call of compiled CPU kernels."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

FEW_ROWS = 16  # rows of a decode forward that scratch is planned for; a prompt's chunk has more
_ALLOCATE = "tirx.TVMBackendAllocWorkspace"
_ALLOCATED = 2  # the argument with the bytes
_BINARY: dict[str, Callable[[int, int], int]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": operator.floordiv,
    "FloorDiv": operator.floordiv, "FloorMod": operator.mod, "Mod": operator.mod, "Min": min, "Max": max,
    "LShift": operator.lshift, "RShift": operator.rshift, "BitwiseAnd": operator.and_,
}  # fmt: skip
_ROWS = "rows"
# An integer, `_ROWS`, or an operator of `_BINARY` with two such.
Size = int | str | tuple[str, "Size", "Size"]


@dataclass(frozen=True)
class Scratch:
    """Blocks in bytes, the largest first: of the calling thread, and of each helper thread."""

    caller: tuple[int, ...] = ()
    helper: tuple[int, ...] = ()

    @classmethod
    def most(cls, several: Iterable[Scratch]) -> Scratch:
        """Peak scratch of threads that run these kernels in turn and keep their blocks."""
        all_ = list(several)
        return cls(_most(one.caller for one in all_), _most(one.helper for one in all_))


@dataclass(frozen=True)
class Allocations:
    """The allocations of a lowered kernel, whose sizes in bytes depend on the number of rows alone.

    `caller` are those of the calling thread, `loops` those inside each parallel loop.
    """

    caller: tuple[Size, ...]
    loops: tuple[tuple[Size, ...], ...]

    def at(self, rows: int) -> Scratch:
        """The blocks for a number of rows."""
        caller, *loops = (
            tuple(sorted((_value(size, rows) for size in sizes), reverse=True)) for sizes in (self.caller, *self.loops)
        )
        helper = _most(loops)
        return Scratch(tuple(sorted((*caller, *helper), reverse=True)), helper)

    def to_json(self) -> list[Any]:
        """Lists that `from_json` reads."""
        return [self.caller, self.loops]

    @classmethod
    def from_json(cls, value: Any) -> Allocations:
        """Raises ValueError for other values."""
        caller, loops = value
        return cls(tuple(map(_checked, caller)), tuple(tuple(map(_checked, sizes)) for sizes in loops))


class _Collector:
    """Walks a lowered kernel."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._bound: dict[tirx.Var, Any] = {}
        self._caller: list[Size] = []
        self._loops: list[list[Size]] = []
        self._inside: list[Size] | None = None
        visits = [(tirx.For, self._loop), (tirx.Bind, self._bind), (tirx.DeclBuffer, self._declare)]
        tvm_ffi.structural_visit(func.body, visits)

    def found(self) -> Allocations:
        return Allocations(tuple(self._caller), tuple(map(tuple, self._loops)))

    def _loop(self, loop: tirx.For, visitor: Any) -> None:
        if loop.kind != tirx.ForKind.PARALLEL:
            visitor.default_visit(loop)
            return
        self._inside = []
        visitor.default_visit(loop)
        self._loops.append(self._inside)
        self._inside = None

    def _bind(self, bind: tirx.Bind, _: Any) -> None:
        self._bound[bind.var] = bind.value

    def _declare(self, declared: tirx.DeclBuffer, _: Any) -> None:
        data = declared.data
        if isinstance(data, tvm.ir.Call) and getattr(data.op, "name", "") == _ALLOCATE:
            sizes = self._caller if self._inside is None else self._inside
            sizes.append(self._size(data.args[_ALLOCATED]))

    def _size(self, expr: Any) -> Size:
        """A value from an argument is the number of rows."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value)
        if isinstance(expr, tirx.Cast):
            return self._size(expr.value)
        if isinstance(expr, tirx.Var) and expr in self._bound:
            return self._size(self._bound[expr])
        if (name := type(expr).__name__) in _BINARY:
            return name, self._size(expr.a), self._size(expr.b)
        return _ROWS


def _value(size: Size, rows: int) -> int:
    if isinstance(size, tuple):
        return _BINARY[size[0]](_value(size[1], rows), _value(size[2], rows))
    return rows if isinstance(size, str) else size


def _checked(value: Any) -> Size:
    """A size of JSON. Raises ValueError."""
    if isinstance(value, list) and len(value) == 3 and value[0] in _BINARY:
        return value[0], _checked(value[1]), _checked(value[2])
    if value == _ROWS:
        return _ROWS
    if type(value) is int:
        return int(value)
    raise ValueError("no size")


def allocations(mod: tvm.IRModule) -> dict[str, Allocations]:
    """Symbol -> allocations of each lowered kernel."""
    functions = {gv.name_hint: func for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}
    return {name: _Collector(func).found() for name, func in functions.items()}


def _most(several: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The largest first block of all, then the largest second one, and so on."""
    return tuple(max(blocks) for blocks in zip_longest(*several, fillvalue=0))
