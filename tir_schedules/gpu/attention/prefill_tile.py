"""Rows of prefill attention: how queries, and the heads that share a KV head, are distributed over workgroups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.kernel import barrier, bounded, ceildiv, ceildiv_by, keep, launch, local
from tir_schedules.rule import Knobs
from tir_schedules.step import Step

_SEQUENCES = 32  # of a step for which there are workgroups, beyond those that rows fill


@dataclass(frozen=True)
class PrefillTile:
    """A workgroup of `threads` has `rows` (queries times heads of a group), and iterates over blocks of `keys`.

    An invocation has `rows_per_lane` rows. The `lanes` with the same rows divide the keys and the head dimension.
    """

    threads: int = 64
    rows: int = 16
    keys: int = 16
    rows_per_lane: int = 4

    @property
    def lanes(self) -> int:
        """Invocations with the same rows."""
        return self.threads * self.rows_per_lane // self.rows

    @property
    def problem(self) -> str:
        """Why there is no kernel with this tile, or ""."""
        each = self.rows_per_lane
        if self.rows % each or self.threads * each % self.rows or self.keys % max(1, self.lanes):
            return f"{self.threads} invocations do not divide {self.rows} rows, {each} each, by {self.keys} keys"
        if self.rows % self.threads and self.threads % self.rows:
            return f"{self.rows} rows are no multiple of {self.threads} invocations"
        return ""

    def sums(self, dim: int) -> int:
        """Sums of values that an invocation keeps from one block of keys to the next."""
        return self.rows_per_lane * -(-dim // self.lanes)

    @property
    def dots(self) -> int:
        """Dot products that an invocation computes at once."""
        return self.rows_per_lane * self.keys // self.lanes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a workgroup."""
        return 4 * self.rows * (self.keys + 3)


PREFILL_KNOBS: Mapping[str, str] = {
    "prefill_threads": "threads",
    "prefill_rows": "rows",
    "prefill_keys": "keys",
    "prefill_tall": "rows_per_lane",
}


def prefill_tile(knobs: Knobs) -> PrefillTile:
    """The tile that knobs say."""
    return PrefillTile(**{field: int(knobs[knob]) for knob, field in PREFILL_KNOBS.items() if knob in knobs})


@dataclass(frozen=True)
class Tile:
    """A workgroup's rows (query, head of the group) from `row0` on, of sequence `b` and KV head `h`.

    `first` is the sequence's first row of q, `queries` their number. Where `exists` is false the workgroup has no rows;
    it cannot return early, because of barriers.
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
        """body(r) for every row, one invocation for each."""
        rows, threads = self.size.rows, self.size.threads
        if rows > threads:
            with I.serial(0, rows // threads) as i:
                body(keep(i * threads + self.tx))
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

    Only the device knows the lengths, so the grid has as many workgroups as there can be tiles.
    """
    with launch(size.threads, ceildiv(n * shape.group, size.rows) + batch, shape.num_kv_heads) as (bx, h, tx):
        body(_tile(shape, size, bx, batch, lambda b: q_indptr[b], h, tx))


def for_step_tile(shape: AttentionShape, size: PrefillTile, step: Step, n: Expr, body: Callable[[Tile], None]) -> None:
    """body(tile) for every tile of every sequence of a step and KV head.

    Only the device knows how many sequences the n rows are of. The grid is for `_SEQUENCES` of them; with more, a
    workgroup may have several tiles, one after another.
    """

    def most(n: Expr) -> Expr:
        return ceildiv(n * shape.group, size.rows) + I.min(n, _SEQUENCES)

    with launch(size.threads, most(n), shape.num_kv_heads) as (bx, h, tx):
        rows = keep(I.cast(n, "int32"))  # not every GPU has 64-bit integers
        workgroups, sequences = keep(most(rows)), keep(step.sequences)
        tiles = keep(rows * shape.group // size.rows + sequences)
        with I.serial(0, ceildiv_by(tiles, workgroups)) as turn:
            barrier()  # shared memory is of the tile before
            tile = _tile(shape, size, turn * workgroups + bx, sequences, lambda s: bounded(step.row_begin(s)), h, tx)
            body(replace(tile, row0=bounded(tile.row0)))


def _tile(
    shape: AttentionShape,
    size: PrefillTile,
    index: Expr,
    sequences: Expr,
    row_begin: Callable[[Expr], Expr],
    h: Expr,
    tx: Expr,
) -> Tile:
    """The tile of an index, counted over the tiles of all sequences."""
    rows = size.rows
    remaining, sequence = local(1, "int32"), local(1, "int32")
    put(remaining, 0, index)
    put(sequence, 0, -1)
    with I.serial(0, sequences) as b, I.If(sequence[0] < 0), I.Then():
        tiles = keep(ceildiv((row_begin(b + 1) - row_begin(b)) * shape.group, rows))
        with I.If(remaining[0] < tiles):
            with I.Then():
                put(sequence, 0, b)
            with I.Else():
                put(remaining, 0, remaining[0] - tiles)
    exists = keep(sequence[0] >= 0)
    b = keep(I.max(sequence[0], 0))
    first = keep(row_begin(b))
    return Tile(shape, size, b, h, keep(remaining[0] * rows), first, keep(row_begin(b + 1) - first), exists, tx)
