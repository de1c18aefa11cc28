"""Tiles of rows of x whose products share one read of a weight.

A row of x has the same arithmetic in every tile: the same terms, added in the same order. So its result does not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Expr
from tir_schedules.gpu.kernel import ceildiv, keep, launch
from tir_schedules.op import Op
from tir_schedules.rule import Knobs


@dataclass(frozen=True)
class RowTiles:
    """Tiles of `rows` of m rows. The last tile computes the last row in place of those that it lacks."""

    m: Expr
    rows: int

    @contextmanager
    def launch(self, threads: int, groups: Expr) -> Iterator[tuple[Expr, Expr, Expr]]:
        """A kernel of `groups` workgroups for each tile; yields the group, the tile and the invocation.

        Tiles of one group are neighbours in the grid, so that what they read of the weight is still in a cache.
        """
        if self.rows == 1:
            with launch(threads, groups, self.m) as indices:
                yield indices
            return
        with launch(threads, ceildiv(self.m, self.rows), groups) as (tile, group, tx):
            yield group, tile, tx

    def of(self, tile: Expr) -> list[Expr]:
        """The rows of a tile."""
        if self.rows == 1:
            return [tile]
        last = keep(I.cast(self.m, "int32") - 1)
        return [keep(I.min(tile * self.rows + i, last)) for i in range(self.rows)]

    @contextmanager
    def stored(self, tile: Expr, i: int) -> Iterator[None]:
        """Statements for row i of a tile, if there is one."""
        if self.rows == 1 or i == 0:
            yield
            return
        with I.If(tile * self.rows + i < I.cast(self.m, "int32")), I.Then():
            yield


def by_tiles(op: Op, m: Expr, knobs: Knobs, sums: int, kernel: Callable[[RowTiles], None]) -> None:
    """kernel(tiles) for m few rows: in the largest tiles, of half as many rows if one has all, or of one for one row.

    The largest have `gemv_rows`, or as many as give an invocation `gemv_sums`, of which a row needs `sums`. Tiles are
    of one row where the operation does not say that its rows are few.
    """
    few = op.facts.get("rows") == "few"
    most = max(1, min(int(knobs["gemv_rows"]), int(knobs["gemv_sums"]) // sums)) if few else 1
    _emit(m, sorted({1, max(1, most // 2), most}), kernel)


def _emit(m: Expr, sizes: list[int], kernel: Callable[[RowTiles], None]) -> None:
    if len(sizes) == 1:
        kernel(RowTiles(m, sizes[0]))
        return
    with I.If(m <= sizes[0]):
        with I.Then():
            kernel(RowTiles(m, sizes[0]))
        with I.Else():
            _emit(m, sizes[1:], kernel)
