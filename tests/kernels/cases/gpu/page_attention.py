"""Attention over pages that the runtime owns, against numpy in float64, and bit by bit against other steps.

A case has steps with rows of the same sequences. Whatever step has a row, it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import tirx

from tests.kernels.cases.gpu.attention import SCALE, TOLERANCES, attention
from tests.kernels.cases.gpu.case import Array, Call, Knobs, assert_near, by_rules
from tests.kernels.cases.steps import sinks_of, step_integers
from tir_schedules import step_layout
from tir_schedules.gpu.attention.functions import page_functions
from tir_schedules.gpu.attention.move_pages import copy_pages
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.paged import PAGE, QUANTIZED


@dataclass(frozen=True)
class Span:
    """Rows begin ... end - 1 of a sequence, by the number of the sequence."""

    of: int
    begin: int
    end: int


@dataclass(frozen=True)
class Step:
    """A step: its integers i32[k], pages int8[P, page_bytes] and where the tokens of its rows lie in them."""

    integers: Array
    pages: Array
    slots: Array


def tokens(shape: AttentionShape, number: int, length: int) -> tuple[Array, Array, Array]:
    """q, k, v [length, heads, D] of a sequence; a longer one begins with the same numbers.

    Where V has fewer dimensions, the others are NaN, and a `latent` one has no heads: K has it.
    """
    q, k, v = (
        np.random.default_rng([number, part]).standard_normal((length, heads, shape.head_dim)).astype(shape.row_dtype)
        for part, heads in enumerate((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    )
    v[..., shape.v_dim :] = np.nan
    return q, k, v[:, :0] if shape.latent else v


def qkv_of(shape: AttentionShape, spans: Sequence[Span]) -> Array:
    """The rows of a step [n, row_heads, D]."""
    rows = [np.concatenate(tokens(shape, span.of, span.end), axis=1)[span.begin :] for span in spans]
    return np.concatenate(rows)


def step_of(shape: AttentionShape, window: int, spans: Sequence[Span], *, stored: bool) -> Step:
    """The step with these rows, whose K and V are in pages already if `stored`.

    All other slots are NaN, or have tokens of sequences before. Pages that no row sees have the number of one of NaN,
    or -1.
    """
    draw = np.random.default_rng(sum(span.end for span in spans))
    counts = [-(-span.end // PAGE) for span in spans]
    table_begin = np.cumsum([0, *counts]).astype(np.int32)
    order = draw.permutation(int(table_begin[-1]) + 3).astype(np.int32)
    ids, slots = order[: table_begin[-1]].copy(), []
    gone = next((page for page in order[table_begin[-1] :] if page % 2 == 0), -1)  # all NaN
    pages = _pages(shape, len(order), draw)
    for first, span in zip(table_begin, spans):
        _, k, v = tokens(shape, span.of, span.end)
        for t in range(span.end if stored else span.begin):
            put_token(shape, pages, int(ids[first + t // PAGE]), t % PAGE, k[t], v[t])
        where = np.arange(span.begin, span.end)
        slots.append(ids[first + where // PAGE] * PAGE + where % PAGE)
        if window:
            ids[first : first + max(0, span.begin - window + 1) // PAGE] = gone
    numbers = step_integers(window, spans, np.concatenate(slots), table_begin, ids, draw)
    return Step(numbers, pages.reshape(len(pages), -1), np.concatenate(slots))


def _pages(shape: AttentionShape, count: int, draw: np.random.Generator) -> Array:
    """int8[count, kv heads, bytes]: even pages are NaN, others have numbers."""
    if shape.dtype in QUANTIZED:
        pages = draw.integers(-128, 128, (count, shape.num_kv_heads, shape.head_bytes)).astype(np.int8)
        scales = pages[..., PAGE * _numbers(shape) // shape.packed :].view(np.float16)
        scales[::2], scales[1::2] = np.nan, 0.1
        return pages
    numbers = np.full((count, shape.num_kv_heads, PAGE * _numbers(shape)), np.nan, shape.dtype)
    numbers[1::2] = 4 * draw.standard_normal(numbers[1::2].shape)
    return numbers.view(np.int8)


def _numbers(shape: AttentionShape) -> int:
    """Those of K and V of a token in a head."""
    return shape.head_dim + (0 if shape.latent else shape.v_dim)


def put_token(shape: AttentionShape, pages: Array, page: int, slot: int, k: Array, v: Array) -> None:
    """K of a token as a column [D] of its page, V as a row, for each KV head."""
    heads, v = len(k), v[:, : shape.v_dim]
    if shape.dtype in QUANTIZED:
        scales = pages[page, :, PAGE * _numbers(shape) // shape.packed :].view(np.float16).reshape(heads, -1, PAGE)
        k, scales[:, : shape.scale_groups, slot] = quantized(shape, k)
        if not shape.latent:
            v, scales[:, shape.scale_groups :, slot] = quantized(shape, v)
    if shape.dtype == "q4":
        k = k[:, 0::2] & 15 | k[:, 1::2] << 4
        low, high = np.split(v.astype(np.int8).reshape(len(v), shape.v_scale_groups, shape.scale_dims), 2, axis=2)
        v = (low & 15 | high << 4).reshape(len(v), shape.v_dim // 2)
    numbers = pages[page, :, : PAGE * _numbers(shape) // shape.packed * k.itemsize].view(k.dtype)
    end = PAGE * k.shape[1]
    numbers[:, :end].reshape(heads, -1, PAGE)[:, :, slot] = k
    if not shape.latent:
        numbers[:, end:].reshape(heads, PAGE, -1)[:, slot] = v


def quantized(shape: AttentionShape, x: Array) -> tuple[Array, Array]:
    """Codes int8[..., D] and scales float16[..., groups] of K or V."""
    parts = x.astype(np.float32).reshape(*x.shape[:-1], -1, shape.scale_dims)
    lowest, highest, largest = -127, 127, np.abs(parts).max(axis=-1)
    if shape.dtype == "q4":
        lowest, highest, largest = -8, 7, np.where(parts.min(axis=-1) == -largest, largest, -largest)
    scales = (largest * np.float32(-1 / lowest)).astype(np.float16)
    codes = np.rint(parts * (1 / scales.astype(np.float32))[..., None]).clip(lowest, highest)
    return codes.astype(np.int8).reshape(x.shape), scales


def kept(shape: AttentionShape, x: Array) -> Array:
    """K or V as pages keep them."""
    if shape.dtype not in QUANTIZED:
        return x
    codes, scales = quantized(shape, x)
    return (codes.reshape(*scales.shape, -1) * scales[..., None].astype(np.float64)).reshape(x.shape)


def _scheduled(
    shape: AttentionShape, role: str, window: int, knobs: Knobs, own: Mapping[str, int], bidirectional: bool = False
) -> Mapping[str, tirx.PrimFunc]:
    shape = replace(shape, page_group=int(window > 0))
    return {"main": by_rules(page_functions(shape, SCALE, window, bidirectional)[role], {**knobs, **own})}


@dataclass(frozen=True)
class Attend:
    """Rows of each step against all keys up to their own, or `bidirectional`. `knobs` go over those of the target."""

    shape: AttentionShape
    role: str
    steps: Sequence[Sequence[Span]]
    window: int = 0
    knobs: Mapping[str, int] = field(default_factory=dict)
    bidirectional: bool = False

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, self.role, self.window, knobs, self.knobs, self.bidirectional)

    def calls(self) -> Sequence[Call]:
        known: dict[tuple[int, int], Array] = {}
        return [self._call(spans, known) for spans in self.steps]

    def _call(self, spans: Sequence[Span], known: dict[tuple[int, int], Array]) -> Call:
        given, qkv = step_of(self.shape, self.window, spans, stored=True), qkv_of(self.shape, spans)
        qkv[:, self.shape.num_heads :] = np.nan  # keys and values are in pages

        def check(found: list[Array]) -> None:
            rows = iter(found[3 + self.shape.sinks])
            for span in spans:
                q, k, v = tokens(self.shape, span.of, span.end)
                k = kept(self.shape, k)
                v = (k if self.shape.latent else kept(self.shape, v[..., : self.shape.v_dim]))[..., : self.shape.v_dim]
                for i in range(span.begin, span.end):
                    row = next(rows)
                    if (span.of, i) in known:
                        np.testing.assert_array_equal(row, known[span.of, i], f"row {i} of {span} in {spans}")
                        continue
                    known[span.of, i] = row
                    oldest = max(i - self.window + 1, 0) if self.window else 0
                    end = i + 1
                    if self.bidirectional:
                        end = min(i + self.window, len(k)) if self.window else len(k)
                    expected, _ = attention(self.shape, q[i], k[:end], v[:end], oldest, SCALE)
                    assert_near(row, expected, TOLERANCES[self.shape.row_dtype][0])

        out = np.full((len(qkv), self.shape.num_heads, self.shape.v_dim), np.nan, self.shape.row_dtype)
        sizes = self.shape.workspace if self.role == "attend_few" else ()
        workspace = [np.full(size, np.nan, np.float32) for size in sizes]
        sinks = [sinks_of(self.shape).astype(np.float32)] if self.shape.sinks else []
        return Call((qkv, given.integers, given.pages, *sinks, out, *workspace), check)


@dataclass(frozen=True)
class Store:
    """K and V of rows to their slots, and no other byte of the pages changed. The last row's go nowhere."""

    shape: AttentionShape
    spans: Sequence[Span]
    window: int = 0

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, "store_pages", self.window, knobs, {})

    def calls(self) -> Sequence[Call]:
        shape, qkv = self.shape, qkv_of(self.shape, self.spans)
        given = step_of(shape, self.window, self.spans, stored=False)
        after, numbers = given.pages.copy(), given.integers.copy()
        numbers[numbers[step_layout.PLACE] + len(qkv) - 1] = -1
        pages = after.reshape(len(after), shape.num_kv_heads, -1)
        for row, slot in zip(qkv[:-1], given.slots):
            k, v = np.split(row[shape.num_heads :], [shape.num_kv_heads])
            put_token(shape, pages, *divmod(int(slot), PAGE), k, v)
        return [Call((qkv, numbers, given.pages), lambda found: np.testing.assert_array_equal(found[2], after))]


@dataclass(frozen=True)
class Rotate:
    """Heads of rows times Hadamard matrices in place."""

    shape: AttentionShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return _scheduled(self.shape, "rotate_qkv", 0, knobs, {})

    def calls(self) -> Sequence[Call]:
        qkv = qkv_of(self.shape, [Span(0, 0, 3)])
        size = self.shape.rotated_dims
        signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        parts = qkv.reshape(-1, size).astype(np.float64) @ np.array(signs) / np.sqrt(size)
        tolerance = TOLERANCES[self.shape.row_dtype][0]
        return [Call((qkv,), lambda found: assert_near(found[0], parts.reshape(qkv.shape), tolerance))]


@dataclass(frozen=True)
class Copy:
    """A page to two others, and one of these on."""

    shape: AttentionShape

    def functions(self, knobs: Knobs) -> Mapping[str, tirx.PrimFunc]:
        return {"main": by_rules(copy_pages(self.shape.page_bytes), knobs)}

    def calls(self) -> Sequence[Call]:
        pages = np.random.default_rng(0).integers(-128, 128, (6, self.shape.page_bytes)).astype(np.int8)
        pairs = np.array([[1, 4], [1, 0], [0, 2]], np.int32)
        after = pages.copy()
        after[[4, 0, 2]] = pages[1]
        return [Call((pairs, pages), lambda found: np.testing.assert_array_equal(found[1], after))]


def _alone(*spans: Span) -> list[list[Span]]:
    """A step with all of these, then each of their rows in a step of its own."""
    return [[*spans], *([Span(span.of, i, i + 1)] for span in spans for i in range(span.begin, span.end))]


def _chunks(of: int, *borders: int) -> list[list[Span]]:
    """A prompt at once, then in chunks."""
    return [[Span(of, begin, end)] for begin, end in zip((0, *borders[:-1]), (borders[-1], *borders[1:]))] + [
        [Span(of, 0, borders[0])]
    ]


_ONE_KV_HEAD = AttentionShape(4, 1, 64, "float16")
_TWO_KV_HEADS = AttentionShape(4, 2, 64, "float16")
_Q8_HALF = AttentionShape(4, 2, 64, "q8", activation_dtype="float16")
_MANY_SEQUENCES = [Span(i, 37 * i % 301, 37 * i % 301 + 1) for i in range(16)]
_ROWS_OF_TURNS = [Span(i, 11 * i % 301, 11 * i % 301 + 1) for i in range(70)]
_TEXTS = [[Span(0, 0, 70), Span(1, 0, 3), Span(2, 0, 16), Span(3, 0, 33)], [Span(0, 0, 70)], [Span(3, 0, 33)]]
_SINKS = AttentionShape(10, 2, 64, "float16", sinks=True)
_PAGE_BORDERS = (Span(0, 14, 18), Span(1, 0, 1))
FEW = {
    "few, batches of 16 and 2": Attend(
        _TWO_KV_HEADS, "attend_few", [*_alone(*_MANY_SEQUENCES), [_MANY_SEQUENCES[5], _MANY_SEQUENCES[15]]]
    ),
    "few, page borders": Attend(AttentionShape(8, 2, 64, "float32"), "attend_few", _alone(*_PAGE_BORDERS)),
    "few, rows of a sequence": Attend(_ONE_KV_HEAD, "attend_few", _alone(Span(0, 253, 260), Span(1, 700, 701))),
    "few, in turns": Attend(_TWO_KV_HEADS, "attend_few", [_ROWS_OF_TURNS, *([span] for span in _ROWS_OF_TURNS[::23])]),
    "few, window": Attend(_ONE_KV_HEAD, "attend_few", _alone(Span(0, 298, 303), Span(1, 20, 22)), window=50),
    "few, softcap": Attend(
        AttentionShape(4, 4, 80, "float32", softcap=5.0), "attend_few", _alone(Span(0, 33, 35), Span(1, 129, 130))
    ),
    "few, softcap in float16, groups of 16": Attend(
        AttentionShape(16, 1, 80, "float16", softcap=5.0), "attend_few", _alone(Span(0, 33, 35), Span(1, 129, 130))
    ),
    "few, 128 dimensions, window": Attend(
        AttentionShape(3, 1, 128, "float16"), "attend_few", _alone(Span(0, 298, 300), Span(1, 20, 21)), window=50
    ),
    "few, heads of odd size": Attend(AttentionShape(3, 1, 20, "float32"), "attend_few", _alone(Span(0, 40, 42))),
    "few, 256 dimensions": Attend(AttentionShape(4, 2, 256, "float16"), "attend_few", _alone(Span(0, 499, 501))),
    "few, parts of several blocks": Attend(
        AttentionShape(2, 1, 16, "float32"),
        "attend_few",
        _alone(Span(0, 2100, 2102), Span(1, 1024, 1025), Span(2, 7, 8)),
        knobs={"decode_part": 32},
    ),
}
MANY = {
    "many, chunks": Attend(
        _TWO_KV_HEADS,
        "attend_many",
        [*_chunks(0, 15, 31, 48, 49, 113, 150), [Span(1, 3, 8), Span(0, 16, 33), Span(2, 0, 1), Span(3, 60, 77)]],
    ),
    "many, window": Attend(
        _ONE_KV_HEAD, "attend_many", [*_chunks(0, 17, 80, 145), [Span(1, 30, 33), Span(0, 70, 135)]], window=40
    ),
    "many, sequences of one row": Attend(
        _ONE_KV_HEAD, "attend_many", _alone(*(Span(i, 2 * i, 2 * i + 1) for i in range(60)))
    ),
    "many, softcap": Attend(
        AttentionShape(2, 1, 128, "float16", softcap=5.0), "attend_many", _chunks(0, 16, 63, 64, 65, 70)
    ),
    "many, texts": Attend(_TWO_KV_HEADS, "attend_many", _TEXTS, bidirectional=True),
    "many, texts with a window": Attend(_ONE_KV_HEAD, "attend_many", _TEXTS, window=20, bidirectional=True),
    "many, texts, float32": Attend(AttentionShape(4, 4, 80, "float32"), "attend_many", _TEXTS, bidirectional=True),
    "many, 80 dimensions": Attend(AttentionShape(3, 1, 80, "float16"), "attend_many", _chunks(0, 15, 20)),
    "many, 256 dimensions": Attend(AttentionShape(2, 1, 256, "float16"), "attend_many", _chunks(0, 33, 40)),
}
MANY_PLAIN = {
    "many, float32": Attend(AttentionShape(4, 4, 80, "float32"), "attend_many", _chunks(0, 15, 16, 17, 40)),
    "many, float32, window": Attend(
        AttentionShape(6, 2, 24, "float32"),
        "attend_many",
        [*_chunks(0, 16, 60, 100), [Span(0, 90, 100), Span(1, 70, 80)]],
        window=33,
        knobs={"prefill_keys": 64},
    ),
}
Q8 = {
    "few, q8": Attend(_Q8_HALF, "attend_few", _alone(Span(0, 253, 260), Span(1, 700, 701), Span(2, 0, 1))),
    "few, q8, window": Attend(
        AttentionShape(4, 2, 96, "q8"), "attend_few", _alone(Span(0, 298, 303), Span(1, 20, 22)), window=50
    ),
    "few, q8, heads of odd size": Attend(
        AttentionShape(3, 1, 20, "q8", softcap=5.0), "attend_few", _alone(Span(0, 40, 42))
    ),
    "many, q8": Attend(
        _Q8_HALF, "attend_many", [*_chunks(0, 15, 31, 48, 49, 113), [Span(1, 3, 8), Span(0, 16, 33), Span(2, 0, 1)]]
    ),
    "many, q8, window": Attend(
        AttentionShape(4, 2, 96, "q8", activation_dtype="float16"), "attend_many", _chunks(0, 17, 80, 145), window=40
    ),
    "many, q8, float32": Attend(AttentionShape(4, 2, 80, "q8"), "attend_many", _chunks(0, 15, 16, 17, 40)),
    "store, q8": Store(_Q8_HALF, (Span(0, 5, 40), Span(1, 0, 17), Span(2, 62, 66), Span(3, 7, 8), Span(4, 2, 4))),
    "store, q8, window": Store(AttentionShape(4, 2, 24, "q8"), (Span(0, 45, 60), Span(1, 0, 2)), window=20),
    "copy, q8": Copy(AttentionShape(4, 2, 24, "q8")),
}
_Q4_HALF = AttentionShape(4, 2, 64, "q4", activation_dtype="float16")
Q4 = {
    "few, q4": Attend(_Q4_HALF, "attend_few", _alone(Span(0, 253, 255), Span(1, 0, 1))),
    "few, q4, window": Attend(AttentionShape(4, 2, 80, "q4"), "attend_few", _alone(Span(0, 298, 300)), window=50),
    "many, q4": Attend(_Q4_HALF, "attend_many", [*_chunks(0, 15, 31, 48), [Span(1, 3, 8), Span(0, 16, 33)]]),
    "many, q4, window": Attend(AttentionShape(4, 2, 80, "q4"), "attend_many", _chunks(0, 15, 40), window=20),
    "store, q4": Store(_Q4_HALF, (Span(0, 5, 40), Span(1, 0, 17), Span(2, 62, 66), Span(3, 7, 8))),
    "store, q4, window": Store(AttentionShape(4, 2, 80, "q4"), (Span(0, 45, 60), Span(1, 0, 2)), window=20),
    "rotate, q4": Rotate(_Q4_HALF),
    "rotate, q4, float32": Rotate(AttentionShape(4, 2, 80, "q4")),
}
MOVES = {
    "store": Store(_TWO_KV_HEADS, (Span(0, 5, 40), Span(1, 0, 17), Span(2, 62, 66))),
    "store, window": Store(AttentionShape(4, 2, 24, "float32"), (Span(0, 45, 60), Span(1, 0, 2)), window=20),
    "copy": Copy(AttentionShape(4, 2, 24, "float16")),
}
SINKS = {
    "few, sinks": Attend(_SINKS, "attend_few", _alone(Span(0, 253, 256), Span(1, 0, 1))),
    "few, sinks, window": Attend(
        AttentionShape(5, 1, 20, "float32", sinks=True), "attend_few", _alone(Span(0, 140, 142)), window=50
    ),
    "many, sinks": Attend(_SINKS, "attend_many", _chunks(0, 15, 48), window=20),
    "many, sinks, float32": Attend(AttentionShape(5, 1, 80, "float32", sinks=True), "attend_many", _chunks(0, 17, 40)),
}
_LATENT = AttentionShape(20, 1, 72, "float16", value_dim=64, latent=True)
_LATENT_Q8 = AttentionShape(16, 1, 96, "q8", activation_dtype="float16", value_dim=64, latent=True)
_LATENT_Q4 = AttentionShape(10, 1, 80, "q4", value_dim=64, latent=True)
_WIDE = AttentionShape(4, 2, 96, "q8", value_dim=64)
LATENT = {
    "few, latent": Attend(_LATENT, "attend_few", _alone(Span(0, 253, 256), Span(1, 0, 1))),
    "many, latent": Attend(_LATENT, "attend_many", [*_chunks(0, 15, 48), [Span(1, 3, 8), Span(0, 16, 33)]]),
    "store, latent": Store(_LATENT, (Span(0, 5, 40), Span(2, 62, 66))),
    "few, latent, q8": Attend(_LATENT_Q8, "attend_few", _alone(Span(0, 253, 255), Span(1, 0, 1))),
    "many, latent, q8": Attend(_LATENT_Q8, "attend_many", _chunks(0, 15, 40)),
    "store, latent, q8": Store(_LATENT_Q8, (Span(0, 5, 40), Span(2, 62, 66))),
    "few, latent, q4, groups of 10": Attend(_LATENT_Q4, "attend_few", _alone(Span(0, 40, 42))),
    "few, latent, groups of 40": Attend(
        AttentionShape(40, 1, 24, "float32", value_dim=16, latent=True), "attend_few", _alone(Span(0, 140, 141))
    ),
    "few, narrow values, q8": Attend(_WIDE, "attend_few", _alone(Span(0, 33, 35))),
    "many, narrow values": Attend(AttentionShape(4, 2, 48, "float16", value_dim=32), "attend_many", _chunks(0, 15, 40)),
    "store, narrow values, q8": Store(_WIDE, (Span(0, 5, 40), Span(2, 62, 66))),
}
CASES: Mapping[str, Attend | Store | Copy | Rotate] = {
    **FEW, **MANY, **MANY_PLAIN, **MOVES, **Q8, **Q4, **SINKS, **LATENT,
}  # fmt: skip
