"""Keys in pages, as kernels of prefill and those on matrix units load them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as I

from tir_schedules.builder import Buffer, Expr
from tir_schedules.gpu import device_calls
from tir_schedules.gpu.attention import prefill_mma, prefill_plain
from tir_schedules.gpu.attention.pages import Pages, Row
from tir_schedules.gpu.attention.prefill_plain import Operands
from tir_schedules.gpu.attention.prefill_tile import Tile
from tir_schedules.gpu.kernel import keep, pin
from tir_schedules.gpu.matmul.packed_loads import neighbours
from tir_schedules.paged import PAGE

Seen = Callable[[Expr, Expr], Expr]


@dataclass(frozen=True)
class PagedKeys:
    """Tokens begin ... end - 1 of a KV head of a sequence; `table(i)` is the page of tokens 16 i ... 16 i + 15.

    Tokens before `first` are loaded as `first` is: their pages may be gone.
    """

    head: Expr
    pages: Pages
    table: Callable[[Expr], Expr]
    begin: Expr
    end: Expr
    first: Expr | None = None

    def inside(self, token: Expr) -> Expr:
        return token if self.first is None else I.max(I.min(token, self.end - 1), self.first)

    def at(self, row: Callable[..., Row], token: Expr) -> Row:
        """K or V of a token."""
        token = self.inside(token)
        return row(keep(self.table(token // PAGE)), self.head, keep(token % PAGE))

    def page_of(self, token: Expr) -> Expr:
        return keep(self.table(self.inside(I.min(token, self.end - 1)) // PAGE))


def attend_pages(
    tile: Tile,
    keys: PagedKeys,
    seen: Seen,
    q: Buffer,
    out: Buffer,
    lse: Buffer | None,
    scale: Expr,
    sinks: Sequence[Buffer] = (),
) -> None:
    """Attention of a tile's rows to keys in pages, without matrix units.

    `seen(query, token)` is as in `prefill_plain.Keys`; `sinks`: none, or logits f32[heads].
    """
    pages = keys.pages
    k, v = (lambda token, row=row: keys.at(row, token) for row in (pages.key, pages.value))
    plain = prefill_plain.Keys(keys.begin, keys.end, k, v, seen)
    prefill_plain.attend(tile, plain, Operands(q, out, lse, scale, sinks))


def in_products(keys: PagedKeys, seen: Seen) -> prefill_mma.Keys:
    """Keys in pages for matrix units; they start at a page boundary."""
    return prefill_mma.Keys(keep(keys.begin // PAGE * PAGE), keys.end, *loads_in_products(keys), seen)


def loads_in_products(keys: PagedKeys) -> tuple[prefill_mma.LoadK, prefill_mma.LoadV]:
    """What loads K and V as factors of products on matrix units."""
    return _codes_in_products(keys) if keys.pages.items > 1 else _halves_in_products(keys)


def _halves_in_products(keys: PagedKeys) -> tuple[prefill_mma.LoadK, prefill_mma.LoadV]:
    """K and V of float16 as words of two."""
    pages, head = keys.pages, keys.head
    words = I.decl_buffer((pages.data.shape[0] // 2,), "uint32", data=pages.data.data)

    def two_keys(token0: Expr, d: Expr, g: Expr) -> Callable[[int], Expr]:
        first = keep(pages.k(keys.page_of(token0), head, 0, d) // 2 + g)
        return lambda row: words[first + row * (PAGE // 2)]

    def v(token: Expr) -> Callable[[Expr, int], list[Expr]]:
        first = keep(pages.v(keys.page_of(token), head, keys.inside(token) % PAGE, 0) // 2)
        return lambda d, count: neighbours(words, first + d // 2, count) if count > 1 else [words[first + d // 2]]

    return _in_order(two_keys), v


def _in_order(two_keys: Callable[[Expr, Expr, Expr], Callable[[int], Expr]]) -> prefill_mma.LoadK:
    """`two_keys(token0, d, g)(row)` has the words of the keys 2g and 2g + 1, in dimension d + row."""

    def k(token0: Expr, step: Expr, g: Expr, t: Expr) -> list[Expr]:
        word = two_keys(token0, step * PAGE + t * 2, g)
        a, b, c, d = (pin(word(row)) for row in (0, 1, 8, 9))
        low, high = device_calls.low_halves, device_calls.high_halves
        return [low(a, b), low(c, d), high(a, b), high(c, d)]

    return k


def _codes_in_products(keys: PagedKeys) -> tuple[prefill_mma.LoadK, prefill_mma.LoadV]:
    """K and V of q8 or q4 as words of two float16."""
    pages, head = keys.pages, keys.head

    def two_keys(token0: Expr, d: Expr, g: Expr) -> Callable[[int], Expr]:
        page = keys.page_of(token0)
        rows = [pages.key(page, head, keep(2 * g + i)) for i in range(2)]
        scales = [pin(row.scale(d)) for row in rows]  # 16 dimensions share them
        return lambda i: device_calls.half_pair(*(pin(row.number(d + i, scale)) for row, scale in zip(rows, scales)))

    def v(token: Expr) -> Callable[[Expr, int], list[Expr]]:
        row = pages.value(keys.page_of(token), head, keep(keys.inside(token) % PAGE))

        def pairs(d: Expr, count: int) -> list[Expr]:
            scale = pin(row.scale(d))
            numbers = [pin(row.number(d + i, scale)) for i in range(2 * count)]
            return [device_calls.half_pair(*numbers[i : i + 2]) for i in range(0, 2 * count, 2)]

        return pairs

    return _in_order(two_keys), v
