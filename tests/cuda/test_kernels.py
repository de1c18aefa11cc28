"""Attention and experts for CUDA, each function by itself, on the emulated device against numpy in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from tvm import tirx

from mlcpipe.compiler.cuda.nvrtc import Nvrtc
from mlcpipe.nn import definitions
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.vulkan.schedule_cases import LAYOUT, PAGE, Array, Pages, attention, packed_weight
from tir_schedules.gpu.attention import OF_SUBGROUPS, kv_cache_functions, of_matrices, of_subgroups
from tir_schedules.gpu.key_split import KeySplit
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.subgroup_matmul import subgroup_expert_matmul
from tir_schedules.op import Declined, op_of

from . import emulation, functions

pytestmark = pytest.mark.skipif(bool(emulation.missing()), reason=emulation.missing() or "runs")

KNOBS = load_target("cuda").schedule
SCALE = 0.2
NUMBERS = (0, 1.0, 1.0, SCALE)  # what TVM's cache passes at the end
NOTHING_SEEN = -1e30
# Of the largest output: float16 in, sums in float32, float16 out.
TOLERANCE = 2e-3


def scheduled(shape: AttentionShape, role: str) -> tirx.PrimFunc:
    """A function of the cache as the target's rules make it."""
    func = kv_cache_functions(shape, 1)[role]
    op = op_of(func)
    assert op is not None
    found = (of_subgroups if op.kind in OF_SUBGROUPS else of_matrices)(op, KNOBS)
    assert not isinstance(found, Declined), found.reason
    return found


def check(found: tuple[Array, Array], row: int, q: Array, case: AttentionShape, k: Array, v: Array, oldest: int) -> None:
    """Output and sum of one query over keys from `oldest` on."""
    out, lse = found[0][row].astype(np.float64), found[1][row]
    if oldest >= len(k):
        assert np.all(lse < NOTHING_SEEN) and not out.any()
        return
    expected, sums = attention(case, q[row], k, v, oldest, SCALE)
    np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    np.testing.assert_allclose(lse, sums, rtol=0, atol=2e-3)


def suffix(shape: AttentionShape) -> str:
    """Layers with a window have functions of their own, unless all have it."""
    return "_sliding" if shape.sliding_window and not shape.all_slide else ""


def length_info(shape: AttentionShape, last: Array) -> Array:
    """TVM's: tokens in the last page; with window offset and sink size (none) for layers with a window."""
    return np.stack([last, 0 * last, 0 * last]) if suffix(shape) else last


@dataclass(frozen=True)
class Decode:
    """A query of each of some sequences, against their pages."""

    shape: AttentionShape
    lengths: tuple[int, ...]

    @property
    def call(self) -> functions.Call:
        s, (_, _, pages, indptr, indices, last) = self.shape, Pages(self.shape, self.lengths).arrays()
        q = self.queries
        tvm_pages = pages.reshape(len(pages), 2, s.num_kv_heads, PAGE, s.head_dim)
        length = length_info(s, last)
        places = (tvm_pages, indptr, indices, length, np.zeros_like(last), np.array(self.lengths, np.int32))
        return scheduled(s, f"decode{suffix(s)}"), (q, *places, *outputs(q), *NUMBERS)

    @property
    def queries(self) -> Array:
        shape = (len(self.lengths), self.shape.num_heads, self.shape.head_dim)
        return np.random.default_rng(7).standard_normal(shape).astype(self.shape.dtype)

    def check(self, found: list[Array]) -> None:
        keys, values, *_ = Pages(self.shape, self.lengths).arrays()
        window = self.shape.sliding_window
        for b, length in enumerate(self.lengths):
            oldest = max(length - window + 1, 0) if window else 0
            check((found[-2], found[-1]), b, self.queries, self.shape, keys[b], values[b], oldest)


@dataclass(frozen=True)
class Cached:
    """New tokens of sequences against the pages of those before them."""

    shape: AttentionShape
    lengths: tuple[int, ...]
    fresh: tuple[int, ...]

    @property
    def queries(self) -> Array:
        shape = (sum(self.fresh), self.shape.num_heads, self.shape.head_dim)
        return np.random.default_rng(9).standard_normal(shape).astype(self.shape.dtype)

    @property
    def begins(self) -> Array:
        return np.cumsum([0, *self.fresh]).astype(np.int32)

    @property
    def positions(self) -> Array:
        return np.concatenate([np.arange(n) + before for n, before in zip(self.fresh, self.lengths)]).astype(np.int32)

    @property
    def call(self) -> functions.Call:
        s, (_, _, pages, indptr, indices, last) = self.shape, Pages(self.shape, self.lengths).arrays()
        q = self.queries
        tvm_pages = pages.reshape(len(pages), 2, s.num_kv_heads, PAGE, s.head_dim)
        places = (tvm_pages, indptr, indices, length_info(s, last), np.zeros_like(last), self.positions)
        return scheduled(s, f"prefill_cached{suffix(s)}"), (q, self.begins, *places, *outputs(q), 0, *NUMBERS)

    def check(self, found: list[Array]) -> None:
        keys, values, *_ = Pages(self.shape, self.lengths).arrays()
        window = self.shape.sliding_window
        for b, begin in enumerate(self.begins[:-1]):
            for row in range(begin, self.begins[b + 1]):
                oldest = max(int(self.positions[row]) - window + 1, 0) if window else 0
                check((found[-2], found[-1]), row, self.queries, self.shape, keys[b], values[b], oldest)


@dataclass(frozen=True)
class Chunk:
    """Tokens of sequences among themselves: each sees those up to itself."""

    shape: AttentionShape
    fresh: tuple[int, ...]

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        s, rng, n = self.shape, np.random.default_rng(11), sum(self.fresh)
        q, k, v = (
            rng.standard_normal((n, heads, s.head_dim)).astype(s.dtype)
            for heads in (s.num_heads, s.num_kv_heads, s.num_kv_heads)
        )
        return q, k, v, np.cumsum([0, *self.fresh]).astype(np.int32)

    @property
    def call(self) -> functions.Call:
        q, k, v, begins = self.arrays
        positions = np.concatenate([np.arange(n) for n in self.fresh]).astype(np.int32)
        places = (begins, positions, np.zeros(len(self.fresh), np.int32))
        return scheduled(self.shape, "prefill_chunk"), (q, begins, k, v, *places, *outputs(q), 1, *NUMBERS)

    def check(self, found: list[Array]) -> None:
        q, k, v, begins = self.arrays
        for first, end in zip(begins[:-1], begins[1:]):
            for row in range(first, end):
                check((found[-2], found[-1]), row, q, self.shape, k[first : row + 1], v[first : row + 1], 0)


@dataclass(frozen=True)
class Experts:
    """Rows of x by the weights of `top` of 40 experts each; `common`: x has a row a token, not one an expert of it."""

    scheme: str
    common: bool
    tokens: int = 30
    top: int = 4
    experts: int = 40
    n: int = 96  # three blocks, of which a workgroup would have four
    k: int = 160

    @property
    def arrays(self) -> tuple[list[Array], Array, Array, Array]:
        packed, weight = packed_weight(self.scheme, self.n, self.k, self.experts)
        rng = np.random.default_rng(13)
        ids = rng.integers(0, self.experts, (self.tokens, self.top)).astype(np.int32)
        ids[3:20, 1] = 7  # more rows than a tile has
        ids[0, 0] = self.experts + 5  # is the last expert
        rows = self.tokens if self.common else self.tokens * self.top
        return packed, weight, rng.standard_normal((rows, self.k)).astype(np.float16), ids

    @property
    def call(self) -> functions.Call:
        packed, _, x, ids = self.arrays
        definition = definitions.expert_matmul(
            load_scheme(self.scheme), LAYOUT, self.experts, self.n, self.k, self.top, self.common, "float16"
        )
        op = op_of(definition)
        assert op is not None
        kernel = subgroup_expert_matmul(op, "float16", KNOBS)
        assert not isinstance(kernel, Declined), kernel.reason
        return kernel, (x, *packed, ids, np.full((ids.size, self.n), np.nan, np.float16))

    def check(self, found: list[Array]) -> None:
        _, weight, x, ids = self.arrays
        rows = np.repeat(x, self.top, axis=0) if self.common else x
        chosen = weight[np.minimum(ids.ravel(), self.experts - 1)]
        expected = np.einsum("rk,rnk->rn", rows.astype(np.float64), chosen)
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def outputs(q: Array) -> tuple[Array, Array]:
    """Output and sums before a call: all that is not written shows."""
    return np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)


SMALL = AttentionShape(4, 1, 64, "float16")
DECODE = {
    "one part": Decode(AttentionShape(4, 2, 64, "float16"), (1, 40)),
    "two sequences in parts": Decode(AttentionShape(4, 2, 64, "float16"), (1, 300)),
    "1k": Decode(SMALL, (1000,)),
    "8k": Decode(SMALL, (8192,)),
    "a layer with a window": Decode(replace(SMALL, sliding_window=50), (300, 30)),
    "window": Decode(replace(SMALL, sliding_window=100, all_slide=True), (700,)),
    "four heads of odd size, softcap": Decode(AttentionShape(4, 4, 72, "float16", softcap=5.0), (16, 333)),
    "256 dimensions": Decode(AttentionShape(4, 2, 256, "float16"), (500,)),
}
PREFILL = {
    "cached": Cached(AttentionShape(4, 2, 64, "float16"), (40, 17), (5, 30)),
    "cached, window": Cached(AttentionShape(4, 1, 64, "float16", sliding_window=12, all_slide=True), (70,), (20,)),
    "cached, a layer with a window": Cached(replace(SMALL, sliding_window=20), (50,), (18,)),
    "cached, softcap": Cached(AttentionShape(2, 1, 128, "float16", softcap=5.0), (33,), (18,)),
    "chunk": Chunk(AttentionShape(4, 2, 64, "float16"), (5, 37)),
    "chunk of odd heads": Chunk(AttentionShape(3, 1, 80, "float16", softcap=5.0), (20,)),
    "chunk of 256 dimensions": Chunk(AttentionShape(2, 1, 256, "float16"), (40,)),
}
EXPERTS = {
    "experts of common rows": Experts("q4f16_1", True),
    "experts of their own rows": Experts("q0f16", False),
}
CASES: dict[str, Decode | Cached | Chunk | Experts] = {**DECODE, **PREFILL, **EXPERTS}


@pytest.fixture(scope="module")
def found(nvrtc: Nvrtc, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Array]]:
    """All arguments of each case after its call, all in one process."""
    folder = tmp_path_factory.mktemp("attention")
    names = {name: f"case{i}" for i, name in enumerate(CASES)}
    job = functions.job({names[name]: case.call for name, case in CASES.items()}, folder / "functions")
    (made,) = emulation.run_engines(emulation.build_driver(folder, nvrtc), [job], folder)
    of = lambda symbol: [a for key, a in made.items() if key.split(".")[0] == symbol]  # noqa: E731
    return {name: of(symbol) for name, symbol in names.items()}


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name: str, found: dict[str, list[Array]]) -> None:
    CASES[name].check(found[name])


@pytest.mark.parametrize("name", [*PREFILL, *EXPERTS])
def test_prefill_is_on_matrix_units(name: str) -> None:
    assert "mlcpipe.mma" in str(CASES[name].call[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 16, 32])
def test_blocks_fill_a_gpu(kv_heads: int) -> None:
    """From 8k tokens on at least as many parts as the largest GPU has multiprocessors, of a sequence of any length."""
    shape = AttentionShape(4 * kv_heads, kv_heads, 128, "float16", subgroup=32)
    split = KeySplit.of(shape, 0, int(KNOBS["decode_blocks"]), 4)
    assert split is not None
    for length in (8192, 32768, 131072):
        assert split.used(length) * kv_heads >= 128, length
