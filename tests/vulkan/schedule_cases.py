"""Kernels of `tir_schedules/gpu` for subgroups of a known size, on a device, against numpy.

`python -m tests.vulkan.schedule_cases LANES` checks those without shuffles of x in a process of its own: how many lanes a subgroup of
Mesa's software device has follows from LP_NATIVE_VECTOR_WIDTH.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import tirx
from tvm.target import Target

from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.spirv import build
from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.runtime import vulkan
from mlcpipe.targets import load_target
from tir_schedules.gpu.decode_attention import decode
from tir_schedules.gpu.kv_pages import AttentionShape
from tir_schedules.gpu.norm import norm
from tir_schedules.gpu.subgroup_matmul import subgroup_expert_matmul, subgroup_matmul
from tir_schedules.op import Declined, op_of
from tir_schedules.paged import PAGE

Array = NDArray[Any]
TARGET = Target({"kind": "vulkan", "max_num_threads": 256, "max_shared_memory_per_block": 32768}, host="llvm")
LAYOUT = load_layout("rows32_pairs")


@dataclass(frozen=True)
class Subgroups:
    """What a schedule is told: lanes, and whether octets share x; where they do not, subgroups share columns."""

    lanes: int
    shuffled: bool

    @property
    def knobs(self) -> dict[str, int | str]:
        own: dict[str, int | str] = {"subgroup": self.lanes, "shuffle_x": int(self.shuffled), "gemv_blocks": 2, "gemm_blocks": 2}
        busy = 1 if self.shuffled else 4096
        threads = self.lanes if self.shuffled else 4 * self.lanes
        own |= {"gemm_rows": 4, "gemv_invocations": busy, "norm_threads": threads}
        return {**load_target("vulkan").schedule, **own}


def module(func: tirx.PrimFunc) -> Any:
    """The function compiled for a device."""
    with own_barriers():
        return tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=TARGET)


def run(func: tirx.PrimFunc, *arguments: Array | float) -> list[Array]:
    """All tensors after a call on the device."""
    vulkan.load()
    build.register()
    device = tvm.device("vulkan", 0)
    values = [tvm.runtime.tensor(a, device) if isinstance(a, np.ndarray) else a for a in arguments]
    module(func)["main"](*values)
    return [value.numpy() for value in values if not isinstance(value, (int, float))]


def _kernel(found: tirx.PrimFunc | Declined) -> tirx.PrimFunc:
    assert not isinstance(found, Declined), found.reason
    return found


def packed_weight(scheme_name: str, n: int, k: int, experts: int = 0) -> tuple[list[Array], Array]:
    """Packed arrays of a random weight, and what they hold."""
    scheme, rng = load_scheme(scheme_name), np.random.default_rng(n + k)
    lead = (experts,) if experts else ()
    w = rng.standard_normal((*lead, n, k)).astype(np.float32)
    rows = scheme.pack(w.reshape(-1, k))
    whole = scheme.unpack(rows, k).reshape(w.shape)
    packed = {name: a.reshape(*lead, n, -1) for name, a in rows.items()}
    return list(LAYOUT.repack(scheme, packed, n, k).values()), whole


def _near(found: Array, expected: Array, tolerance: float) -> None:
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0, atol=tolerance * np.abs(expected).max())


@dataclass(frozen=True)
class Product:
    """x [m, k] times a weight [n, k] in a scheme; `gated`, or by experts."""

    scheme: str
    n: int
    k: int
    dtype: str = "float32"
    gated: bool = False

    def check(self, subgroups: Subgroups) -> None:
        scheme = load_scheme(self.scheme)
        if self.gated:
            func = definitions.gated_matmul(scheme, LAYOUT, self.n, self.k, "silu", self.dtype)
        else:
            func = definitions.matmul(scheme, LAYOUT, self.n, self.k, self.dtype)
        op = op_of(func)
        assert op is not None
        kernel = _kernel(subgroup_matmul(op, self.dtype, subgroups.knobs))
        packed, w = packed_weight(self.scheme, self.n, self.k)
        for m in (1, 6):  # 6: a tile of 4 rows and a part of one
            x = np.random.default_rng(m).standard_normal((m, self.k)).astype(self.dtype)
            y = x.astype(np.float64) @ w.astype(np.float64).T
            if self.gated:
                gate, up = np.split(y, 2, axis=1)
                y = gate / (1 + np.exp(-gate)) * up
            found = run(kernel, x, *packed, np.full(y.shape, np.nan, self.dtype))[-1]
            _near(found, y, 3e-6 if self.dtype == "float32" else 1e-3)


@dataclass(frozen=True)
class Experts:
    """Two of four experts for each of three rows."""

    shared: bool

    def check(self, subgroups: Subgroups) -> None:
        n, k, m, top, experts = 64, 96, 3, 2, 4
        func = definitions.expert_matmul(load_scheme("q4f16_1"), LAYOUT, experts, n, k, top, self.shared, "float32")
        op = op_of(func)
        assert op is not None
        kernel = _kernel(subgroup_expert_matmul(op, "float32", subgroups.knobs))
        packed, w = packed_weight("q4f16_1", n, k, experts)
        rng = np.random.default_rng(5)
        x = rng.standard_normal((m if self.shared else m * top, k)).astype(np.float32)
        ids = np.array([[0, 3], [2, 2], [1, 9]], np.int32)  # 9 is the last expert
        rows = np.repeat(x, top, axis=0) if self.shared else x
        y = np.einsum("rk,rnk->rn", rows, w[np.minimum(ids.ravel(), experts - 1)])
        _near(run(kernel, x, *packed, ids, np.full(y.shape, np.nan, np.float32))[-1], y, 3e-6)


@dataclass(frozen=True)
class Pages:
    """Sequences of keys and values, in pages whose numbers are shuffled."""

    shape: AttentionShape
    lengths: tuple[int, ...]

    def arrays(self) -> tuple[list[Array], list[Array], Array, Array, Array, Array]:
        """K and V of each sequence [length, kv heads, dim]; pages, indptr, indices, length of last pages."""
        s, rng = self.shape, np.random.default_rng(sum(self.lengths))
        counts = [-(-length // PAGE) for length in self.lengths]
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        indices = rng.permutation(int(indptr[-1]) + 2)[: indptr[-1]].astype(np.int32)
        pages = rng.standard_normal((int(indptr[-1]) + 2, s.num_kv_heads, 2 * PAGE * s.head_dim)).astype(s.dtype)
        keys, values = [], []
        for b, length in enumerate(self.lengths):
            shape = (length, s.num_kv_heads, s.head_dim)
            k, v = (rng.standard_normal(shape).astype(s.dtype) for _ in range(2))
            for t in range(length):
                page = pages[indices[indptr[b] + t // PAGE]]
                half = PAGE * s.head_dim
                page[:, :half].reshape(-1, s.head_dim, PAGE)[:, :, t % PAGE] = k[t]
                page[:, half:].reshape(-1, PAGE, s.head_dim)[:, t % PAGE] = v[t]
            keys.append(k)
            values.append(v)
        last = np.array([(length - 1) % PAGE + 1 for length in self.lengths], np.int32)
        return keys, values, pages, indptr, indices, last


def attention(s: AttentionShape, q: Array, k: Array, v: Array, oldest: int, scale: float) -> tuple[Array, Array]:
    """One query [heads, D] over keys from `oldest`: output and log2 of the sum of 2**score, in float64."""
    out, lse = np.empty((s.num_heads, s.head_dim)), np.empty(s.num_heads)
    for head in range(s.num_heads):
        scores = k[oldest:, head // s.group].astype(np.float64) @ q[head].astype(np.float64) * scale
        if s.softcap:
            scores = np.tanh(scores / s.softcap) * s.softcap
        weights = np.exp(scores - scores.max())
        out[head] = weights @ v[oldest:, head // s.group].astype(np.float64) / weights.sum()
        lse[head] = (np.log(weights.sum()) + scores.max()) / np.log(2)
    return out, lse


@dataclass(frozen=True)
class Decode:
    """A query of each of some sequences; over 128 keys they are in parts."""

    shape: AttentionShape
    lengths: tuple[int, ...]

    def check(self, subgroups: Subgroups) -> None:
        shape = replace(self.shape, subgroup=subgroups.lanes, shuffled=subgroups.shuffled)
        kernel = decode(shape, shape.sliding_window, False)
        keys, values, pages, indptr, indices, last = Pages(shape, self.lengths).arrays()
        batch, scale = len(self.lengths), 0.2
        q = np.random.default_rng(7).standard_normal((batch, shape.num_heads, shape.head_dim)).astype(shape.dtype)
        tvm_pages = pages.reshape(len(pages), 2, shape.num_kv_heads, PAGE, shape.head_dim)
        positions = np.array(self.lengths, np.int32)
        zeros, lse = np.zeros(batch, np.int32), np.full(q.shape[:2], np.nan, np.float32)
        numbers = (0, 1.0, 1.0, scale)
        found = run(kernel, q, tvm_pages, indptr, indices, last, zeros, positions, np.full_like(q, np.nan), lse, *numbers)
        for b, length in enumerate(self.lengths):
            window = shape.sliding_window
            oldest = max(length - window + 1, 0) if window else 0
            out, sums = attention(shape, q[b], keys[b], values[b], oldest, scale)
            _near(found[-2][b], out, 2e-6 if shape.dtype == "float32" else 2e-3)
            np.testing.assert_allclose(found[-1][b], sums, rtol=0, atol=1e-5 if shape.dtype == "float32" else 1e-3)


@dataclass(frozen=True)
class Norm:
    """Two rows of a size that fills no round of a workgroup."""

    added: bool

    def check(self, subgroups: Subgroups) -> None:
        size, eps = 100, 1e-5
        func = (definitions.add_rms_norm if self.added else definitions.rms_norm)(size, eps, "float32", "float32")
        op = op_of(func)
        assert op is not None
        rng = np.random.default_rng(3)
        a, b = (rng.standard_normal((2, size)).astype(np.float32) for _ in range(2))
        weight, x = rng.standard_normal(size).astype(np.float32), (a + b if self.added else a).astype(np.float64)
        outputs = [np.full((2, size), np.nan, np.float32) for _ in range(1 + self.added)]
        found = run(_kernel(norm(op, "float32", subgroups.knobs)), *([a, b] if self.added else [a]), weight, *outputs)
        _near(found[-1], x / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps) * weight, 1e-6)
        if self.added:
            _near(found[-2], x, 1e-7)


CASES: dict[str, Callable[[Subgroups], None]] = {
    "int4": Product("q4f16_1", 96, 576).check,  # 9 units of columns: 4 subgroups of 16 have one or two
    "int4, groups that are odd, rows that fill no block": Product("q4f16_1", 70, 160).check,
    "int4, scales in float32": Product("q4f32_1", 64, 64).check,
    "int8": Product("q8f16_1", 96, 128).check,
    "float16": Product("q0f16", 64, 40).check,
    "float32": Product("q0f32", 40, 24).check,
    "activations in float16": Product("q4f16_1", 64, 128, "float16").check,
    "gate": Product("q4f16_1", 128, 64, gated=True).check,
    "experts of common rows": Experts(True).check,
    "experts of their own rows": Experts(False).check,
    "decode": Decode(AttentionShape(8, 2, 64, "float32"), (1, 40, 200)).check,
    "decode with a window": Decode(AttentionShape(6, 1, 24, "float32", sliding_window=37), (5, 90, 150)).check,
    "decode of 16 heads for one": Decode(AttentionShape(16, 1, 16, "float32"), (20,)).check,
    "decode with softcap in float16": Decode(AttentionShape(4, 4, 80, "float16", softcap=5.0), (16, 33)).check,
    "norm": Norm(False).check,
    "norm of a sum": Norm(True).check,
}


if __name__ == "__main__":
    for case in CASES.values():
        case(Subgroups(int(sys.argv[1]), shuffled=False))
