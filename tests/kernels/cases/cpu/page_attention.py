"""Cases of attention over pages that the runtime owns: batches of sequences with tokens in pages and rows of a step.

Pages lie in random order. Slots that hold no token are NaN or what a sequence before may have left there; the page
ids of the other kind of layer, and of pages that a window has left, are -1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from tvm import tirx

from tests.kernels.cases.cpu.attention import Stored, reference, stored, values_of, write_token
from tests.kernels.cases.steps import sinks_of, step_integers
from tests.kernels.harness import KINDS, Array, Call, Case, adversarial, unwritten
from tir_schedules import step_layout as s
from tir_schedules.cpu.attention import PAGE, AttentionShape, copy_pages, page_functions

# Heads in groups of 1, 2, 3, 4, 5, 7, 8 and 17; head_dim 6 to 256; softcap; windows within, of, and across pages.
SHAPES = (
    AttentionShape(8, 4, 64, "float16"),
    AttentionShape(4, 4, 80, "float32", softcap=5.0),
    AttentionShape(14, 2, 64, "q8"),
    AttentionShape(8, 1, 128, "float32"),
    AttentionShape(6, 2, 128, "q8", softcap=30.0),
    AttentionShape(4, 1, 256, "float16", softcap=50.0),
    AttentionShape(5, 1, 6, "float32"),
    AttentionShape(3, 1, 6, "q8"),
    AttentionShape(17, 1, 16, "float16"),
    AttentionShape(4, 4, 80, "q8", softcap=5.0),
    AttentionShape(4, 1, 256, "q8"),
    AttentionShape(4, 4, 24, "float32", softcap=5.0),
    AttentionShape(4, 1, 96, "float16", softcap=2.0),
    AttentionShape(14, 2, 64, "q4"),
    AttentionShape(5, 1, 16, "q4", softcap=5.0),
    AttentionShape(8, 1, 64, "float16", sinks=True),
    AttentionShape(10, 2, 64, "q8", sinks=True),
    AttentionShape(4, 2, 48, "float16", value_dim=32),
    AttentionShape(4, 2, 96, "q8", value_dim=64),
    AttentionShape(20, 1, 72, "float16", value_dim=64, latent=True),
    AttentionShape(16, 1, 40, "float32", value_dim=24, latent=True),
    AttentionShape(40, 1, 96, "q8", value_dim=64, latent=True),
    AttentionShape(16, 1, 80, "q4", value_dim=64, latent=True),
)
WINDOWS = (0, 1, 5, 16, 40, 100)


@dataclass(frozen=True)
class PageKernel:
    """One function over pages, by its role in `page_functions`."""

    shape: AttentionShape
    role: str
    window: int = 0
    bidirectional: bool = False

    @property
    def symbol(self) -> str:
        both = "_both_ways" if self.bidirectional else ""
        return f"{self.role}_{library_of(self.shape)}_window{self.window}{both}"

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.shape.head_dim**-0.5)

    def definition(self) -> None:
        return None

    def build(self) -> tirx.PrimFunc:
        if self.role == "copy_pages":
            return copy_pages(self.shape.page_bytes)
        return _functions(self.shape, self.scale, self.window, self.bidirectional)[self.role]


def library_of(s: AttentionShape) -> str:
    """A name for the functions of one shape."""
    return f"pages_h{s.num_heads}_kv{s.num_kv_heads}_d{s.head_dim}_{s.dtype}_c{s.softcap:g}{'_sinks' * s.sinks}{_values(s)}"


def _values(s: AttentionShape) -> str:
    return f"_v{s.value_dim}{'_latent' * s.latent}" if s.value_dim else ""


@lru_cache(8)
def _functions(shape: AttentionShape, scale: float, window: int, bidirectional: bool) -> dict[str, tirx.PrimFunc]:
    return page_functions(replace(shape, page_group=int(window > 0)), scale, window, bidirectional)


@dataclass(frozen=True)
class Sequence_:
    """What a sequence is made of: q f32 [length, heads, D], and K and V f32 [length, kv_heads, D] as pages keep them.

    Where V has fewer dimensions, the others are NaN; a `latent` one is not in `v`, which has no heads.
    """

    q: Array
    k: Array
    v: Array
    kept_k: Stored
    kept_v: Stored


def sequence(shape: AttentionShape, length: int, seed: int, kind: str = "normal") -> Sequence_:
    """Random numbers, of a kind of `harness.KINDS`; a longer sequence of the same seed begins with the same ones."""
    q, k, v = (
        adversarial(kind, (length, heads, shape.head_dim), np.random.default_rng([seed, part]))
        for part, heads in enumerate((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    )
    kept_k, kept_v = (stored(shape, x) for x in (k, v[..., : shape.v_dim]))
    if shape.latent:
        groups = shape.v_scale_groups
        scales = None if kept_k.scales is None else kept_k.scales[..., :groups]
        return Sequence_(q, k, v[:, :0], kept_k, Stored(values_of(shape, kept_k.elements, v), scales))
    v[..., shape.v_dim :] = np.nan
    return Sequence_(q, k, v, kept_k, kept_v)


@dataclass(frozen=True)
class Part:
    """Rows begin ... end - 1 of a sequence, which a step has."""

    of: Sequence_
    begin: int
    end: int


@dataclass(frozen=True)
class Batch:
    """A step: its integers, pages int8[P, page_bytes] with the tokens before it and of it, and its qkv."""

    integers: Array
    pages: Array
    qkv: Array
    slots: Array


def batch(kernel: PageKernel, parts: Sequence[Part], seed: int = 0, with_rows: bool = True) -> Batch:
    """The step that has these rows; `with_rows`: their K and V are in pages already."""
    shape, draw = kernel.shape, np.random.default_rng(seed)
    counts = [-(-part.end // PAGE) for part in parts]
    order = draw.permutation(sum(counts) + 3).astype(np.int32)
    pages = _old_pages(shape, len(order), draw)
    table_begin = np.cumsum([0, *counts]).astype(np.int32)
    ids = order[: table_begin[-1]].copy()
    slots, rows = [], []
    for first, part in zip(table_begin, parts):
        for t in range(part.end if with_rows else part.begin):
            write_token(shape, pages, int(ids[first + t // PAGE]), t % PAGE, part.of.kept_k, part.of.kept_v, t)
        where = np.arange(part.begin, part.end)
        slots.append(ids[first + where // PAGE] * PAGE + where % PAGE)
        rows.append(np.concatenate([part.of.q[where], part.of.k[where], part.of.v[where]], axis=1))
        if kernel.window:
            ids[first : first + max(0, part.begin - kernel.window + 1) // PAGE] = -1
    numbers = step_integers(kernel.window, parts, np.concatenate(slots), table_begin, ids, draw)
    return Batch(numbers, pages, np.concatenate(rows), np.concatenate(slots))


def _old_pages(shape: AttentionShape, count: int, draw: np.random.Generator) -> Array:
    """Pages of NaN (all bits set; codes of -1 where they are quantized), every other one with tokens of a sequence before."""
    pages = np.full((count, shape.page_bytes), -1, np.int8)
    old = [
        stored(shape, 4 * draw.standard_normal((PAGE, shape.num_kv_heads, d))) for d in (shape.head_dim, shape.v_dim)
    ]
    for page in range(1, count, 2):
        for slot in range(PAGE):
            write_token(shape, pages, page, slot, *old, slot)
    return pages


def attend_call(kernel: PageKernel, spans: Sequence[tuple[int, int]], every: int = 1) -> Call:
    """Attention of rows begin ... end - 1 of each sequence to what is before them, to themselves, or both ways.

    Compares only one row of `every` so many, of one sequence: numpy takes its time.
    """
    assert every == 1 or len(spans) == 1
    shape = kernel.shape
    parts = [Part(sequence(shape, end, seed), begin, end) for seed, (begin, end) in enumerate(spans)]
    rows = []
    for part in parts:
        k, v = part.of.kept_k.values(), part.of.kept_v.values()
        for i in range(part.begin, part.end):
            if (i - part.begin) % every == 0:
                seen = slice(0, i + 1)
                if kernel.bidirectional:
                    seen = slice(max(0, i + 1 - kernel.window), i + kernel.window) if kernel.window else slice(None)
                window = 0 if kernel.bidirectional else kernel.window
                rows.append(reference(shape, part.of.q[i], k[seen], v[seen], kernel.scale, window))
    out, bound = (np.stack(column) for column in zip(*rows))
    given = batch(kernel, parts, seed=shape.head_dim)
    args = attend_args(shape, given)
    at = len(args) - 1
    return Call(args, {at: (out, bound)}, {at: lambda found: found[::every]})


def attend_args(shape: AttentionShape, given: Batch) -> tuple[Array, ...]:
    """Arguments of a function that attends; it finds no K and V but in pages."""
    qkv = given.qkv.copy()
    qkv[:, shape.num_heads :] = np.nan
    sinks = [sinks_of(shape).astype(np.float32)] if shape.sinks else []
    out = unwritten((len(qkv), shape.num_heads, shape.v_dim))
    return (qkv, given.integers, given.pages, *sinks, out)


def store_call(kernel: PageKernel, spans: Sequence[tuple[int, int]], kind: str = "normal") -> Call:
    """K and V of the rows to their slots, and no other byte of the pages changed; the last row's go nowhere."""
    shape = kernel.shape
    parts = [Part(sequence(shape, end, seed, kind), begin, end) for seed, (begin, end) in enumerate(spans)]
    given = batch(kernel, parts, with_rows=False)
    pages, integers, row = given.pages.copy(), given.integers.copy(), 0
    for part in parts:
        for t in range(part.begin, part.end):
            if row < len(given.qkv) - 1:
                page, slot = divmod(int(given.slots[row]), PAGE)
                write_token(shape, pages, page, slot, part.of.kept_k, part.of.kept_v, t)
            row += 1
    integers[integers[s.PLACE] + row - 1] = -1
    return Call((given.qkv, integers, given.pages), {2: (pages.astype(np.float64), 0.0)})


def copy_call(kernel: PageKernel) -> Call:
    """A page to two others, and one of these on."""
    pages = _old_pages(kernel.shape, 6, np.random.default_rng(0))
    pairs = np.array([[1, 4], [1, 0], [0, 2]], np.int32)
    after = pages.copy()
    after[[4, 0, 2]] = pages[1]
    return Call((pairs, pages), {1: (after.astype(np.float64), 0.0)})


FEW_SPANS = (
    [(0, 1)],
    [(36, 37), (0, 1), (15, 16), (129, 130), (16, 17)],
    [(99, 104), (60, 66), (700, 701), (0, 3)],
)
MANY_SPANS = (
    [(0, 1)],
    [(0, 90), (37, 42), (16, 56), (100, 101), (60, 70)],
    [(130, 210), (0, 64), (48, 49)],
)
TEXT_SPANS = ([(0, 1)], [(0, 90), (0, 5), (0, 64), (0, 17)], [(0, 210), (0, 128), (0, 65)])
STORE_SPANS = ([(0, 1)], [(17, 18), (31, 32), (0, 1)], [(5, 40), (0, 17), (62, 66)])


def cases() -> Iterator[Case]:
    """Every shape through every function, with and without window; then timed ones."""
    for i, shape in enumerate(SHAPES):
        library = library_of(shape)
        for window in (0, WINDOWS[1 + i % 5]):
            few, store = PageKernel(shape, "attend_few", window), PageKernel(shape, "store_pages", window)
            many = PageKernel(shape, "attend_many", window)
            for spans in MANY_SPANS:
                yield Case(f"{many.symbol}-{spans}", library, many, partial(attend_call, many, spans))
            both = PageKernel(shape, "attend_many", window, bidirectional=True)
            for spans in TEXT_SPANS:
                yield Case(f"{both.symbol}-{spans}", library, both, partial(attend_call, both, spans))
            for spans in FEW_SPANS:
                yield Case(f"{few.symbol}-{spans}", library, few, partial(attend_call, few, spans))
            for spans, kind in zip((*STORE_SPANS, STORE_SPANS[1]), KINDS):
                yield Case(f"{store.symbol}-{spans}-{kind}", library, store, partial(store_call, store, spans, kind))
        copy = PageKernel(shape, "copy_pages")
        yield Case(copy.symbol, library, copy, partial(copy_call, copy))
    yield from timed_cases()


def timed_cases() -> Iterator[Case]:
    """Llama 3.2 1B, Qwen2 0.5B and a model with head_dim 128: one row at 4096 tokens, prompts of 512 with 1536 before."""
    for heads, kv_heads, dim in ((32, 8, 64), (14, 2, 64), (32, 8, 128)):
        for dtype in ("float16", "q8"):
            shape = AttentionShape(heads, kv_heads, dim, dtype)
            for role, begin, end in (("attend_few", 4095, 4096), ("attend_many", 0, 512), ("attend_many", 1536, 2048)):
                kernel = PageKernel(shape, role)
                pairs = (begin + 1 + end) * (end - begin) // 2
                yield Case(
                    f"{kernel.symbol}-timed-{begin}",
                    f"timed-{library_of(shape)}",
                    kernel,
                    partial(attend_call, kernel, [(begin, end)], every=37),
                    nbytes=shape.page_bytes * end // PAGE,
                    flops=4 * heads * dim * pairs,  # a score and its share of the output, for all heads
                    timed=True,
                )
