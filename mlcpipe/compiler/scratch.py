"""The memory that compiled kernels of a CPU take for the time of a call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

FEW_ROWS = 16  # of a forward of answers; of a prompt's chunk there are more
_ALLOCATE = "tirx.TVMBackendAllocWorkspace"
_ALLOCATED = 2  # which argument has the bytes
_BINARY: dict[type, Callable[[int, int], int]] = {
    tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul, tirx.Div: operator.floordiv,
    tirx.FloorDiv: operator.floordiv, tirx.FloorMod: operator.mod, tirx.Mod: operator.mod, tirx.Min: min, tirx.Max: max,
    tirx.LShift: operator.lshift, tirx.RShift: operator.rshift, tirx.BitwiseAnd: operator.and_,
}  # fmt: skip


@dataclass(frozen=True)
class Scratch:
    """Blocks in bytes, the largest first: of the thread that calls a kernel, and of each other one that helps it."""

    caller: tuple[int, ...] = ()
    helper: tuple[int, ...] = ()

    @classmethod
    def most(cls, several: Iterable[Scratch]) -> Scratch:
        """What threads keep that run these one after the other, each with the blocks of those before."""
        all_ = list(several)
        return cls(_most(one.caller for one in all_), _most(one.helper for one in all_))


class Allocations:
    """The allocations of a lowered kernel, whose sizes depend on the number of rows alone."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._bound: dict[tirx.Var, Any] = {}
        self._caller: list[Any] = []
        self._loops: list[list[Any]] = []  # of each parallel loop
        self._inside: list[Any] | None = None
        visits = [(tirx.For, self._loop), (tirx.Bind, self._bind), (tirx.DeclBuffer, self._declare)]
        tvm_ffi.structural_visit(func.body, visits)

    def at(self, rows: int) -> Scratch:
        """What they are for so many rows."""
        caller, *loops = (
            tuple(sorted((self._value(size, rows) for size in sizes), reverse=True))
            for sizes in (self._caller, *self._loops)
        )
        helper = _most(loops)
        return Scratch(tuple(sorted((*caller, *helper), reverse=True)), helper)

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
            (self._caller if self._inside is None else self._inside).append(data.args[_ALLOCATED])

    def _value(self, expr: Any, rows: int) -> int:
        """An integer; what comes from an argument is the number of rows."""
        if isinstance(expr, tirx.IntImm):
            return int(expr.value)
        if isinstance(expr, tirx.Cast):
            return self._value(expr.value, rows)
        if isinstance(expr, tirx.Var) and expr in self._bound:
            return self._value(self._bound[expr], rows)
        if (apply := _BINARY.get(type(expr))) is not None:
            return apply(self._value(expr.a, rows), self._value(expr.b, rows))
        return rows


def allocations(mod: tvm.IRModule) -> dict[str, Allocations]:
    """Symbol -> allocations of each lowered kernel."""
    return {gv.name_hint: Allocations(func) for gv, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}


def _most(several: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The largest first blocks of all, then second ones, and so on."""
    return tuple(max(blocks) for blocks in zip_longest(*several, fillvalue=0))
