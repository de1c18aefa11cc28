"""Where the keys and values of a block of pages are, and the walk over the blocks of a sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr, put
from tir_schedules.cpu.attention.pages import AttentionShape, Pages
from tir_schedules.cpu.vectors import load, load_packed, prefetch, scratch, splat, store, value
from tir_schedules.paged import PAGE

BLOCK_PAGES = 4
BLOCK = BLOCK_PAGES * PAGE


@dataclass(frozen=True)
class Keys:
    """Where keys and values are: page i of a block has K[d, slot] at k[i] + d // packed * 16 + slot in `k_elements`, V
    likewise.

    `scales` at `scale(i, g, of_v)` has the 16 of group g of page i; None for elements without scales.
    `fetch(i, j, of_v)` asks for the cache line, of `line` elements, with element j of page i one block further. Only
    the first `valid` slots of a page hold values; None: all.
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

    def k_rows(self, i: int, row: Expr) -> list[Expr]:
        """K of 16 slots in the `packed` dimensions from row * packed on."""
        return load_packed(self.k_elements, self.k[i] + row * PAGE, 16, self.packed)

    def v_at(self, shape: AttentionShape, d: int) -> tuple[int, int]:
        """Which element of a slot's V has dimension d, and which of its numbers that is."""
        size = shape.scale_dims // self.packed
        part, rest = divmod(d % shape.scale_dims, size)
        return d // shape.scale_dims * size + rest, part


def page_keys(
    pages: Pages, where: list[Expr], head: Expr, valid: Expr | None, ahead: tuple[list[Expr], Expr] | None = None
) -> Keys:
    """Keys and values of a head in some pages, as they are stored; `ahead`: pages and head to ask for meanwhile."""
    k, v = [value(pages.k(page, head)) for page in where], [value(pages.v(page, head)) for page in where]

    scale = None
    if pages.scales is not None:
        first = [[value(pages.scale(page, head, of_v)) for page in where] for of_v in (0, 1)]

        def scale(i: int, g: Expr, of_v: int) -> Expr:
            return first[of_v][i] + g * PAGE

    fetch = None
    if ahead is not None:
        begin = [[value(at(page, ahead[1])) for page in ahead[0]] for at in (pages.k, pages.v)]

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


def widen(shape: AttentionShape, source: Keys, panel_k: Buffer, panel_v: Buffer, to: Expr) -> None:
    """The K and V of some pages as float32 in panels, page after page from page `to` of them on."""
    dim, lanes, groups = shape.head_dim, shape.lanes, max(1, shape.scale_groups)
    packed, depth = source.packed, dim // groups
    stored = depth // packed
    for i, v in enumerate(source.v):
        with I.serial(0, groups) as g:
            scale = None if source.scale is None else value(load(source.scales, source.scale(i, g, 0), 16))
            with I.serial(0, stored) as d:
                for part, item in enumerate(source.k_rows(i, g * stored + d)):
                    item = item if scale is None else item * scale
                    store(panel_k, ((to + i) * dim + g * depth + d * packed + part) * PAGE, item, 16)
        with I.serial(0, PAGE) as slot, I.serial(0, groups) as g:
            scale = None if source.scale is None else value(load(source.scales, source.scale(i, g, 1) + slot, 1))
            with I.serial(0, stored // lanes) as j:
                at = slot * (dim // packed) + g * stored + j * lanes
                for part, item in enumerate(load_packed(source.v_elements, v + at, lanes, packed)):
                    to_d = slot * dim + g * depth + part * stored + j * lanes
                    item = item if scale is None else item * splat(scale, lanes)
                    store(panel_v, (to + i) * PAGE * dim + to_d, item, lanes)
