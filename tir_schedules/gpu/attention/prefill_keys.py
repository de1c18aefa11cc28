"""The keys of a tile of prefill's rows in pages, as both kinds of kernel load them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention import prefill_mma, prefill_plain
from tir_schedules.gpu.attention.pages import Pages
from tir_schedules.gpu.attention.prefill_plain import Operands
from tir_schedules.gpu.attention.prefill_tile import Tile
from tir_schedules.gpu.kernel import keep, pin
from tir_schedules.paged import PAGE


@dataclass(frozen=True)
class PagedKeys:
    """Tokens begin ... end - 1 of a tile's sequence in pages; `table(i)` is the page of tokens 16 i ... 16 i + 15.

    `seen(query, token)` is as in `prefill_plain.Keys`. Tokens before `first` are loaded as `first` is: their pages may
    be gone.
    """

    tile: Tile
    pages: Pages
    table: Callable[[Expr], Expr]
    begin: Expr
    end: Expr
    seen: Callable[[Expr, Expr], Expr]
    first: Expr | None = None

    def inside(self, token: Expr) -> Expr:
        return token if self.first is None else I.max(I.min(token, self.end - 1), self.first)

    def at(self, index: Callable[..., Expr], token: Expr) -> Callable[[Expr], Expr]:
        """The index of an element of a token's K or V, by dimension."""
        token = self.inside(token)
        page = keep(self.table(token // PAGE))
        slot = keep(token % PAGE)
        return lambda d: index(page, self.tile.h, slot, d)

    def page_of(self, token: Expr) -> Expr:
        return keep(self.table(self.inside(I.min(token, self.end - 1)) // PAGE))


def attend_pages(keys: PagedKeys, q: Buffer, out: Buffer, lse: Buffer | None, scale: Expr) -> None:
    """Attention of a tile's rows to keys in pages, without matrix units."""
    tile, pages = keys.tile, keys.pages
    k, v = (lambda token, index=index: keys.at(index, token) for index in (pages.k, pages.v))
    plain = prefill_plain.Keys(keys.begin, keys.end, k, v, keys.seen)
    prefill_plain.attend(tile, plain, Operands(q, pages.data, pages.data, out, lse, scale))


def in_products(keys: PagedKeys) -> prefill_mma.Keys:
    """Keys in pages for matrix units; they start at a page boundary."""
    pages, head = keys.pages, keys.tile.h
    words = I.decl_buffer((pages.data.shape[0] // 2,), "uint32", data=pages.data.data)

    def k(token0: Expr, step: Expr, g: Expr, t: Expr) -> list[Expr]:
        first = keep((pages.k(keys.page_of(token0), head, 0, step * PAGE + t * 2)) // 2 + g)
        a, b, c, d = (pin(words[first + row * (PAGE // 2)]) for row in (0, 1, 8, 9))
        low, high = device_calls.low_halves, device_calls.high_halves
        return [low(a, b), low(c, d), high(a, b), high(c, d)]

    def v(token: Expr) -> Expr:
        return keep(pages.v(keys.page_of(token), head, keys.inside(token) % PAGE, 0) // 2)

    return prefill_mma.Keys(keep(keys.begin // PAGE * PAGE), keys.end, k, v, words, keys.seen)
