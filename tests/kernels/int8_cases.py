"""Cases of the matmul with int8 activations, for every integer dot product that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import host_instruction_sets
from tir_schedules.cpu.int8_activations import GROUP, SMALLEST
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.op import op_of

from .harness import EPS, KINDS, TINY, Array, Call, Case, adversarial, unwritten
from .matmul_cases import LAYOUT, SHAPES, packed

# Knob `int8_dot` -> its lanes, the instruction set that it needs, a register tile (rows, tail_rows, blocks).
DOTS = {
    "avx512_vnni": (16, "avx512vnni", (6, 4, 2)),
    "avx_vnni": (8, "avxvnni", (3, 2, 1)),
    "avx2": (8, "avx2", (2, 2, 1)),
    "neon_dotprod": (4, "dotprod", (3, 2, 1)),
}
HERE = [kind for kind, (_, needs, _) in DOTS.items() if needs in host_instruction_sets()]
SCHEMES = ("q4f16_1", "q8f16_1", "q4f32_1")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 33)


def knobs_of(kind: str) -> dict[str, int | str]:
    """The schedule facts of a CPU with this dot product."""
    lanes, _, (rows, tail_rows, blocks) = DOTS[kind]
    tile = {"int8_rows": rows, "int8_tail_rows": tail_rows, "int8_blocks": blocks, "int8_prefetch_groups": 16}
    return {"int8_dot": kind, "lanes": lanes, **tile}


def quantized(x: Array) -> Array:
    """float64 of x float32[..., K] as the kernels see it: int8 in groups of 32, by the same float32 arithmetic."""
    k = x.shape[-1]
    groups = -(-k // GROUP)
    padded = np.zeros((*x.shape[:-1], groups * GROUP), np.float32)
    padded[..., :k] = x
    padded = padded.reshape(*x.shape[:-1], groups, GROUP)
    peak = np.abs(padded).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(peak > np.float32(SMALLEST), np.float32(127) / peak, np.float32(0))
    q = np.rint(padded * inverse).astype(np.float64)
    scale = (peak * np.float32(1 / 127)).astype(np.float64)
    return (q * scale).reshape(*x.shape[:-1], groups * GROUP)[..., :k]


@dataclass(frozen=True)
class Int8Matmul:
    """x f32[m, k] times packed w [n, k] transposed, x in int8."""

    kind: str
    scheme: str
    n: int
    k: int

    @property
    def symbol(self) -> str:
        return f"int8_{self.kind}_{self.scheme}_{self.n}_{self.k}"

    def definition(self) -> None:
        """The TE body is exact: what it gives is not what this kernel promises."""

    def build(self) -> tirx.PrimFunc:
        body = definitions.matmul(load_scheme(self.scheme), load_layout(LAYOUT), self.n, self.k, "float32")
        op = op_of(body)
        assert op is not None
        kernel = int8_matmul(op, knobs_of(self.kind))
        assert isinstance(kernel, tirx.PrimFunc), kernel
        return kernel


def int8_call(kernel: Int8Matmul, m: int, kind: str) -> Call:
    """x, packed weight -> y f32[m, n]; integers are exact, so only scaling and adding groups rounds."""
    arrays, w, _ = packed(kernel.scheme, (kernel.n, kernel.k), kind)
    x = adversarial(kind, (m, kernel.k), np.random.default_rng([m, kernel.k]))
    seen = quantized(x)
    terms = kernel.k // GROUP + 8
    bound = terms * EPS * (np.abs(seen) @ np.abs(w).T) + terms * TINY
    args = (x, *arrays, unwritten((m, kernel.n)))
    return Call(args, {len(args) - 1: (seen @ w.T, bound)})


def cases() -> Iterator[Case]:
    """Small cases of every dot product and scheme, then timed ones of the best."""
    for dot in HERE:
        for scheme in SCHEMES:
            for i, (n, k) in enumerate(SHAPES):
                kernel = Int8Matmul(dot, scheme, n, k)
                for j, m in enumerate(ROWS):
                    kind = KINDS[(i + j) % len(KINDS)]
                    yield Case(
                        f"{kernel.symbol}-m{m}-{kind}", f"int8-{dot}", kernel, partial(int8_call, kernel, m, kind)
                    )
    for scheme, n, k, rows in (
        ("q4f16_1", 8192, 2048, (1, 4, 16, 512)),
        ("q4f16_1", 2048, 8192, (1, 16, 512)),
        ("q4f16_1", 4864, 896, (1, 512)),
        ("q8f16_1", 8192, 2048, (1, 16, 512)),
    ):
        for dot in HERE[:1]:
            kernel = Int8Matmul(dot, scheme, n, k)
            nbytes = load_scheme(scheme).nbytes(n, k)
            for m in rows:
                yield Case(
                    f"{kernel.symbol}-m{m}",
                    "timed-int8",
                    kernel,
                    partial(int8_call, kernel, m, "normal"),
                    nbytes=nbytes + 4 * m * (n + k),
                    flops=2 * m * n * k,
                    timed=True,
                )
