"""Cases of the matmul with int8 activations, for every integer dot product that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from tvm import tirx

from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import host_instruction_sets
from tests.kernels.cases.cpu.matmul import (
    INTEGERS,
    KEPT,
    MORE,
    SHAPES,
    ExpertMatmul,
    Matmul,
    expert_call,
    gated,
    packed,
    scheme_named,
    whole,
)
from tests.kernels.harness import EPS, KINDS, TINY, Array, Call, Case, adversarial, unwritten
from tir_schedules.cpu.bf16_amx import amx_fits
from tir_schedules.cpu.int8_activations import SMALLEST
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_expert_matmul import int8_expert_matmul
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.int8_unpacked import GROUP
from tir_schedules.cpu.packed_weight import packed_of
from tir_schedules.op import Op, op_of

# Knob `int8_dot` -> its lanes, the instruction set that it needs, a register tile (rows, tail_rows, blocks).
DOTS = {
    "amx_int8": (16, "amx-bf16", (6, 4, 2)),
    "avx512_vnni": (16, "avx512vnni", (6, 4, 2)),
    "avx_vnni": (8, "avxvnni", (3, 2, 1)),
    "avx2": (8, "avx2", (2, 2, 1)),
    "neon_i8mm": (4, "i8mm", (3, 2, 1)),
    "neon_dotprod": (4, "dotprod", (3, 2, 1)),
}
HERE = [kind for kind, (_, needs, _) in DOTS.items() if needs in host_instruction_sets()]
SCHEMES = ("q4f16_1", "q8f16_1", "q8f16_0")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 33)
# The last has more of K than is unpacked at a time.
MANY_SHAPES = ((33, 128), (17, 640), (48, 1280))
# Halves of whole blocks, an odd number of them, and halves that part a block.
GATED = (("q4f16_1", 96, 640, "silu"), ("q4f16_1", 40, 128, "gelu_tanh"), ("q8f16_1", 40, 128, "silu"))
FEW_KEPT = ("avx_vnni", "avx2")  # whose kernels of block formats are in `everything`; test_qemu.py has some of avx2
MANY_ROWS = (1, 2, 5, 33, 63, 67, 70, 97)


def knobs_of(kind: str) -> dict[str, int | str]:
    """The schedule facts of a CPU with this dot product."""
    lanes, _, (rows, tail_rows, blocks) = DOTS[kind]
    tile = {"int8_rows": rows, "int8_tail_rows": tail_rows, "int8_blocks": blocks, "int8_prefetch_words": 64}
    return {"int8_dot": kind, "lanes": lanes, "int8_gemv_streams": 2 if lanes == 16 else 1, **tile}


def quantized(x: Array, size: int = GROUP) -> Array:
    """float64 of x float32[..., K] as the kernels see it: int8 in groups of `size`, by the same float32 arithmetic."""
    k = x.shape[-1]
    groups = -(-k // size)
    padded = np.zeros((*x.shape[:-1], groups * size), np.float32)
    padded[..., :k] = x
    padded = padded.reshape(*x.shape[:-1], groups, size)
    peak = np.abs(padded).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(peak > np.float32(SMALLEST), np.float32(127) / peak, np.float32(0))
    q = np.rint(padded * inverse).astype(np.float64)
    scale = (peak * np.float32(1 / 127)).astype(np.float64)
    return (q * scale).reshape(*x.shape[:-1], groups * size)[..., :k]


def bfloat16(x: Array) -> Array:
    """float64 of float32 numbers, each rounded to the nearest bfloat16, of two the even one."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return nearest.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Int8Matmul:
    """x f32[m, k] times packed w [n, k] transposed, x in int8; with an activation: act(gate) * up of its halves.

    `many`: x has the tokens of a prompt.
    """

    kind: str
    scheme: str
    n: int
    k: int
    activation: str = ""
    many: bool = False

    @property
    def symbol(self) -> str:
        return f"int8{self.activation}_{self.kind}_{self.scheme}_{self.n}_{self.k}{'_many' * self.many}"

    def definition(self) -> None:
        """The TE body is exact: what it gives is not what this kernel promises."""

    @property
    def op(self) -> Op:
        op = op_of(Matmul(self.scheme, self.n, self.k, self.activation, self.many).definition())
        assert op is not None
        return op

    def build(self) -> tirx.PrimFunc:
        kernel = int8_matmul(self.op, knobs_of(self.kind))
        assert isinstance(kernel, tirx.PrimFunc), kernel
        return kernel

    @property
    def floats(self) -> bool:
        """Whether x and w are bfloat16."""
        return self.many and amx_fits(packed_of(self.op), Dot(self.kind, DOTS[self.kind][0]))


def group_of(scheme: str, k: int) -> int:
    """Numbers of a row of x on one scale."""
    return min(scheme_named(scheme).group(k), GROUP) if scheme_named(scheme).blocked else GROUP


def int8_call(kernel: Int8Matmul, m: int, kind: str) -> Call:
    """x, packed weight -> y f32[m, n] or [m, n / 2]; integers are exact, so only scaling and adding groups rounds."""
    arrays, w, size = packed(kernel.scheme, (kernel.n, kernel.k), kind)
    x, group = adversarial(kind, (m, kernel.k), np.random.default_rng([m, kernel.k])), group_of(kernel.scheme, kernel.k)
    if kernel.floats:
        seen, w, terms, least = bfloat16(x), bfloat16(w), kernel.k, 2.0**-126  # tiles take subnormal numbers as zeros
        # The kernel's weights have rounding errors before they become bfloat16, which may then be the next number.
        slack = 2.0**-8 * 2.0**-4
    else:
        seen, terms, least, slack = quantized(x, group), kernel.k // group + 8, TINY, 0.0
    bound = (terms * EPS + slack) * (np.abs(seen) @ size.T) + terms * least
    expected, bound = gated(seen @ w.T, bound, kernel.activation)
    args = (x, *arrays, unwritten(expected.shape))
    return Call(args, {len(args) - 1: (expected, bound)})


@dataclass(frozen=True)
class Int8ExpertMatmul:
    """x f32[m or m * top, k] times the packed w [experts, n, k] that ids choose, x in int8."""

    kind: str
    scheme: str
    n: int
    k: int
    experts: int
    top: int
    shared: bool

    @property
    def symbol(self) -> str:
        return f"int8_{self.exact.symbol}_{self.kind}"

    @property
    def exact(self) -> ExpertMatmul:
        return ExpertMatmul(self.scheme, self.n, self.k, self.experts, self.top, self.shared)

    def definition(self) -> None:
        """The TE body is exact: what it gives is not what this kernel promises."""

    def build(self) -> tirx.PrimFunc:
        op = op_of(self.exact.definition())
        assert op is not None
        kernel = int8_expert_matmul(op, knobs_of(self.kind))
        assert isinstance(kernel, tirx.PrimFunc), kernel
        return kernel


def int8_expert_call(kernel: Int8ExpertMatmul, m: int, kind: str) -> Call:
    """The call of the exact kernel, with what the integer kernel sees of x."""
    call = expert_call(kernel.exact, m, kind)
    x, ids = call.args[0], call.args[-2]
    assert isinstance(x, np.ndarray) and isinstance(ids, np.ndarray)
    _, w, sizes = packed(kernel.scheme, (kernel.experts, kernel.n, kernel.k), kind)
    chosen = np.clip(ids, 0, kernel.experts - 1).reshape(-1)
    group = group_of(kernel.scheme, kernel.k)
    seen = np.repeat(quantized(x, group), kernel.top if kernel.shared else 1, axis=0)
    expected = np.stack([row @ w[e].T for row, e in zip(seen, chosen)])
    terms = kernel.k // group + 8
    size = np.stack([np.abs(row) @ sizes[e].T for row, e in zip(seen, chosen)])
    return Call(call.args, {len(call.args) - 1: (expected, terms * EPS * size + terms * TINY)})


def _experts(dot: str, scheme: str, number: int) -> Iterator[Case]:
    """Of all schemes but the first, the shape that its number in the list gives is not for `everything`."""
    for i, shape in enumerate(((33, 100, 4, 2, True), (16, 40, 3, 3, False), (7, 33, 2, 1, False))):
        kernel = Int8ExpertMatmul(dot, scheme, shape[0], whole(scheme, shape[1]), *shape[2:])
        library = library_of(dot, scheme, more=number > 0 and i != number % 3)
        for m, kind in zip((1, 3, 40, 2), KINDS):
            yield Case(f"{kernel.symbol}-m{m}-{kind}", library, kernel, partial(int8_expert_call, kernel, m, kind))


def library_of(dot: str, scheme: str, *, more: bool = False) -> str:
    """The library of a case. AVX-VNNI differs from AVX2 by one instruction alone."""
    return f"int8-{dot}{MORE if more or (blocked(scheme) and dot in FEW_KEPT) else ''}"


def blocked(scheme: str) -> bool:
    """Whether a scheme is a block format."""
    return scheme in (*KEPT, *INTEGERS)


def kept_shapes(scheme: str) -> list[tuple[tuple[int, int], tuple[int, ...]]]:
    """Shapes that rows of a block format can have, with numbers of rows of x."""
    deep = ((48, 1280), (1, 7, 67))
    return [deep] if scheme_named(scheme).table else [((33, whole(scheme, 96)), (1, 2, 5, 13)), deep]


def dot_cases(dot: str) -> Iterator[Case]:
    """Small cases of one dot product, every scheme, half of the shapes of those with 8 bits for `everything`.

    So are few rows of two in three block formats, whose experts read a weight as one row does, and a prompt's smaller
    shape of them all.

    q4f32_1 differs from q4f16_1 in the type of scales alone.
    """
    shapes = [*((shape, ROWS) for shape in SHAPES), *((shape, MANY_ROWS) for shape in MANY_SHAPES)]
    blocks = [(scheme, kept_shapes(scheme)) for scheme in (*KEPT, *INTEGERS)]
    every = [*((scheme, shapes) for scheme in SCHEMES), ("q4f32_1", [shapes[4], shapes[-1]]), *blocks]
    for number, (scheme, chosen) in enumerate(every):
        for (i, ((n, k), rows)), many in product(enumerate(chosen), (False, True)):
            kernel = Int8Matmul(dot, scheme, n, k, many=many)
            deep = (n, k) == chosen[-1][0]
            if blocked(scheme):
                more = not deep if many else number % 3 > 0
            else:
                more = number > 0 and i % 2 != number % 2 and not deep
            library = library_of(dot, scheme, more=more)
            for j, m in enumerate(rows):
                kind = KINDS[(i + j) % len(KINDS)]
                yield Case(f"{kernel.symbol}-m{m}-{kind}", library, kernel, partial(int8_call, kernel, m, kind))
        yield from _experts(dot, scheme, number)
    for (scheme, n, k, activation), many in product(GATED, (False, True)):
        kernel = Int8Matmul(dot, scheme, n, k, activation, many)
        for m, kind in zip((1, 7, 67, 96), KINDS):
            yield Case(f"{kernel.symbol}-m{m}-{kind}", f"int8-{dot}", kernel, partial(int8_call, kernel, m, kind))


def cases() -> Iterator[Case]:
    """Small cases of every dot product that this CPU has, then timed ones of the best."""
    for dot in HERE:
        yield from dot_cases(dot)
    for dot in HERE[:1]:
        expert = Int8ExpertMatmul(dot, "q4f16_1", 1536, 2048, 8, 2, True)
        nbytes = load_scheme("q4f16_1").nbytes(1536, 2048)
        for m, read in ((1, 2), (256, 8)):
            yield Case(
                f"{expert.symbol}-m{m}",
                "timed-int8",
                expert,
                partial(int8_expert_call, expert, m, "normal"),
                nbytes=read * nbytes,
                flops=2 * 2 * m * 1536 * 2048,
                timed=True,
                arithmetic="int8",
            )
    for scheme, n, k, rows in (
        ("q4f16_1", 8192, 2048, (1, 4, 16, 512)),
        ("q4f16_1", 2048, 8192, (1, 16, 512)),
        ("q4f16_1", 4864, 896, (1, 512)),
        ("q8f16_1", 8192, 2048, (1, 16, 512)),
    ):
        for dot in HERE[:1]:
            nbytes = load_scheme(scheme).nbytes(n, k)
            for m in rows:
                kernel = Int8Matmul(dot, scheme, n, k, many=m > 16)
                yield Case(
                    f"{kernel.symbol}-m{m}",
                    "timed-int8",
                    kernel,
                    partial(int8_call, kernel, m, "normal"),
                    nbytes=nbytes + 4 * m * (n + k),
                    flops=2 * m * n * k,
                    timed=True,
                    arithmetic="int8",
                )
