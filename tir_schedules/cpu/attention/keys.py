"""Where the keys and values of a block of pages are, and the walk over the blocks of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.attention.pages import AttentionShape, Pages
from tir_schedules.cpu.vectors import load, load_packed, prefetch, read, scratch, splat, store, turned, value
from tir_schedules.paged import PAGE

BLOCK_PAGES = 4
BLOCK = BLOCK_PAGES * PAGE


@dataclass(frozen=True)
class Keys:
    """Where keys and values are: page i of a block has K[d, slot] at k[i] + d // packed * 16 + slot in `k_elements`, V
    likewise.

    `scales` at `scale(i, g, of_v)` has the 16 of group g of page i; None for elements without scales.
    `fetch(i, j, of_v)` asks for the cache line, of `line` elements, with element j of page i one block further. Only
    the first `valid` slots of a page hold values; None: all. `biases(r, i)` is added to the scores of row r and page i.
    `v_strips`: V of a page is [v_dim / 16, slot, 16], so that a tile of 16 dimensions reads what lies together.
    """

    k_elements: Buffer
    v_elements: Buffer
    k: Sequence[Expr]
    v: Sequence[Expr]
    scales: Buffer | None = None
    scale: Callable[[int, Expr, int], Expr] | None = None
    fetch: Callable[[int, Expr, int], None] | None = None
    line: int = 16
    valid: Expr | None = None
    packed: int = 1
    biases: Callable[[Expr, int], Expr] | None = None
    v_strips: bool = False

    def k_rows(self, i: int, row: Expr) -> list[Expr]:
        """K of 16 slots in the `packed` dimensions from row * packed on."""
        return load_packed(self.k_elements, self.k[i] + row * PAGE, 16, self.packed)

    def v_at(self, shape: AttentionShape, slot: Expr, d: int) -> tuple[Expr, int]:
        """Which element of a page's V has dimension d of a slot, and which of its numbers that is."""
        if self.v_strips:
            return d * PAGE + slot * PAGE, 0
        size = shape.scale_dims // self.packed
        part, rest = divmod(d % shape.scale_dims, size)
        return slot * (shape.v_dim // self.packed) + d // shape.scale_dims * size + rest, part


def page_keys(
    pages: Pages, where: list[Expr], head: Expr, valid: Expr | None, ahead: tuple[list[Expr], Expr] | None = None
) -> Keys:
    """Keys and values of a head in some pages, as they are stored; `ahead`: pages and head to ask for meanwhile."""
    k = [value(pages.k(page, head)) for page in where]
    v = [] if pages.shape.latent else [value(pages.v(page, head)) for page in where]

    scale = None
    if pages.scales is not None:
        first = [[value(pages.scale(page, head, of_v)) for page in where] for of_v in (0, 1)]

        def scale(i: int, g: Expr, of_v: int) -> Expr:
            return first[of_v][i] + g * PAGE

    fetch = None
    if ahead is not None:
        parts = (pages.k,) if pages.shape.latent else (pages.k, pages.v)
        begin = [[value(at(page, ahead[1])) for page in ahead[0]] for at in parts]

        def fetch(i: int, j: Expr, of_v: int) -> None:
            prefetch(pages.elements, begin[of_v][i] + j)

    return Keys(pages.elements, pages.elements, k, v, pages.scales, scale, fetch, pages.line, valid, pages.shape.packed)


def walk(
    begin: Expr, end: Expr, whole: Callable[[Expr], Expr], block: Callable[[Expr], None], page: Callable[[Expr], None]
) -> None:
    """block(p) for 4 pages from p where whole(p), else page(p), until `end`."""
    at = scratch(1, "int32")
    put(at, 0, begin)
    with I.While(at[0] < end):
        p = value(at[0])
        with I.If(value(I.And(p + BLOCK_PAGES <= end, whole(p)))):
            with I.Then():
                block(p)
                put(at, 0, p + BLOCK_PAGES)
            with I.Else():
                page(p)
                put(at, 0, p + 1)


class Panels:
    """Room for the K and V of a block of pages as float32: `keys` are where `widen` puts them, page after page."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self.k, self.v = scratch(BLOCK * shape.head_dim), scratch(BLOCK * shape.v_dim)
        self.strips = shape.latent and shape.lanes == PAGE

    def keys(self, pages: int = BLOCK_PAGES, valid: Expr | None = None) -> Keys:
        """The keys of the first `pages`."""
        k, v = ([i * PAGE * dim for i in range(pages)] for dim in (self.shape.head_dim, self.shape.v_dim))
        return Keys(self.k, self.v, k, v, valid=valid, v_strips=self.strips)

    def widen(self, source: Keys, to: Expr = 0) -> None:
        """The K and V of some pages become those from page `to` on."""
        for i in range(len(source.k)):
            self._widen_k(source, i, to + i)
            if self.shape.latent:
                self._turn(to + i)
            else:
                self._widen_v(source, i, to + i)

    def _widen_k(self, source: Keys, i: int, to: Expr) -> None:
        groups, packed = max(1, self.shape.scale_groups), source.packed
        depth = self.shape.head_dim // groups
        with I.serial(0, groups) as g:
            scale = None if source.scale is None else value(load(source.scales, source.scale(i, g, 0), 16))
            with I.serial(0, depth // packed) as d:
                for part, item in enumerate(source.k_rows(i, g * (depth // packed) + d)):
                    item = item if scale is None else item * scale
                    store(self.k, (to * self.shape.head_dim + g * depth + d * packed + part) * PAGE, item, 16)
                if source.fetch is not None:
                    source.fetch(i, (g * (depth // packed) + d) * PAGE, 0)

    def _widen_v(self, source: Keys, i: int, to: Expr) -> None:
        dim, lanes, groups, packed = (
            self.shape.v_dim,
            self.shape.lanes,
            max(1, self.shape.v_scale_groups),
            source.packed,
        )
        depth = dim // groups
        stored = depth // packed
        with I.serial(0, PAGE) as slot, I.serial(0, groups) as g:
            scale = None if source.scale is None else value(load(source.scales, source.scale(i, g, 1) + slot, 1))
            with I.serial(0, stored // lanes) as j:
                at = slot * (dim // packed) + g * stored + j * lanes
                for part, item in enumerate(load_packed(source.v_elements, source.v[i] + at, lanes, packed)):
                    to_d = slot * dim + g * depth + part * stored + j * lanes
                    item = item if scale is None else item * splat(scale, lanes)
                    store(self.v, to * PAGE * dim + to_d, item, lanes)

    def _turn(self, to: Expr) -> None:
        """The first dimensions of K of a page, which are its V, with one token's after the other's."""
        dim, k, v = self.shape.v_dim, to * PAGE * self.shape.head_dim, to * PAGE * self.shape.v_dim
        with I.serial(0, dim // PAGE) as j:
            rows = turned([value(read(self.k, k + (j * PAGE + d) * PAGE, PAGE)) for d in range(PAGE)])
            for slot, row in enumerate(rows):
                store(self.v, v + (j * PAGE * PAGE + slot * PAGE if self.strips else slot * dim + j * PAGE), row, PAGE)
        with I.serial(dim // PAGE * PAGE, dim) as d, I.serial(0, PAGE) as slot:
            put(self.v, v + slot * dim + d, self.k[k + d * PAGE + slot])
