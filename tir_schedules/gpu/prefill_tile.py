"""Rows of prefill attention: how queries, and the heads that share a KV head, are dealt to workgroups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.gpu.kernel import Buffer, Expr, ceildiv, keep, launch, local, put
from tir_schedules.gpu.kv_pages import AttentionShape


@dataclass(frozen=True)
class PrefillTile:
    """A workgroup of `threads` has `rows` (queries times heads of a group), and walks over blocks of `keys`.

    An invocation has `tall` rows; the invocations that share them, `lanes`, divide the keys and the head dimension.
    """

    threads: int = 64
    rows: int = 16
    keys: int = 16
    tall: int = 4

    @property
    def lanes(self) -> int:
        """Invocations that share rows."""
        return self.threads * self.tall // self.rows

    @property
    def problem(self) -> str:
        """Why there is no kernel with this tile, or nothing."""
        if self.rows % self.tall or self.threads * self.tall % self.rows or self.keys % max(1, self.lanes):
            return f"{self.threads} invocations do not divide {self.rows} rows, {self.tall} each, by {self.keys} keys"
        if self.rows % self.threads and self.threads % self.rows:
            return f"{self.rows} rows are no multiple of {self.threads} invocations"
        return ""

    def sums(self, dim: int) -> int:
        """Sums of values that an invocation has, from one block of keys to the next."""
        return self.tall * -(-dim // self.lanes)

    @property
    def dots(self) -> int:
        """Dots that an invocation adds up."""
        return self.tall * self.keys // self.lanes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a workgroup."""
        return 4 * self.rows * (self.keys + 3)


def prefill_tile(knobs: Mapping[str, int | str]) -> PrefillTile:
    """The tile that knobs say."""
    names = ("threads", "rows", "keys", "tall")
    return PrefillTile(**{name: int(knobs[f"prefill_{name}"]) for name in names if f"prefill_{name}" in knobs})


@dataclass(frozen=True)
class Tile:
    """Rows of prefill: `row0` is the first of (query, head of the group) in sequence `b`, for KV head `h`.

    Where `exists` is false the workgroup is one too many, and has no row; it cannot return, because of the barriers.
    """

    shape: AttentionShape
    size: PrefillTile
    b: Expr
    h: Expr
    row0: Expr
    first: Expr
    queries: Expr
    exists: Expr
    tx: Expr

    @property
    def rows(self) -> int:
        return self.size.rows

    @property
    def lanes(self) -> int:
        return self.size.lanes

    def each_row(self, body: Callable[[Expr], None]) -> None:
        """body(r) for every row, an invocation each."""
        rows, threads = self.size.rows, self.size.threads
        if rows > threads:
            with I.serial(0, rows // threads) as turn:
                body(keep(turn * threads + self.tx))
        else:
            with I.If(self.tx < rows), I.Then():
                body(self.tx)

    def query(self, r: Expr) -> Expr:
        """The query of row r, counted in the sequence's chunk."""
        return (self.row0 + r) // self.shape.group

    @property
    def last_query(self) -> Expr:
        """The last query of the tile."""
        return I.min(self.query(self.rows - 1), self.queries - 1)

    def head(self, r: Expr) -> Expr:
        return self.h * self.shape.group + (self.row0 + r) % self.shape.group

    def inside(self, r: Expr) -> Expr:
        return I.And(self.exists, self.row0 + r < self.queries * self.shape.group)


def for_tile(
    shape: AttentionShape, size: PrefillTile, batch: Expr, q_indptr: Buffer, n: Expr, body: Callable[[Tile], None]
) -> None:
    """body(tile) in a workgroup for every tile of every sequence and KV head.

    Lengths are known to the device only, so there are as many workgroups as there can be tiles.
    """
    rows = size.rows
    with launch(size.threads, ceildiv(n * shape.group, rows) + batch, shape.num_kv_heads) as (bx, h, tx):
        left, found = local(1, "int32"), local(1, "int32")
        put(left, 0, bx)
        put(found, 0, -1)
        with I.serial(0, batch) as b, I.If(found[0] < 0), I.Then():
            tiles = keep(ceildiv((q_indptr[b + 1] - q_indptr[b]) * shape.group, rows))
            with I.If(left[0] < tiles):
                with I.Then():
                    put(found, 0, b)
                with I.Else():
                    put(left, 0, left[0] - tiles)
        exists = keep(found[0] >= 0)
        b = keep(I.max(found[0], 0))
        first = keep(q_indptr[b])
        body(Tile(shape, size, b, h, keep(left[0] * rows), first, keep(q_indptr[b + 1] - first), exists, tx))
