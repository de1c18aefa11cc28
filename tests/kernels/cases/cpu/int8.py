"""Cases of the matmul with int8 activations, for every integer dot product that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import numpy as np
from tvm import tirx

from mlcpipe.quantization import native_formats
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import Scheme, load_scheme
from mlcpipe.targets import host_instruction_sets
from tests.kernels.cases.cpu.matmul import (
    INTEGERS,
    KEPT,
    LAYOUT,
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
from tir_schedules.cpu.int8_activations import SMALLEST
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_expert_matmul import int8_expert_matmul
from tir_schedules.cpu.int8_gemm import CHUNK, chunk_of, gemm_fits
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.int8_unpacked import GROUP
from tir_schedules.cpu.packed_weight import packed_of
from tir_schedules.op import Op, op_of

# Knob `int8_dot` -> its lanes, the instruction set that it needs, a register tile (rows, tail_rows, blocks).
DOTS = {
    "amx_int8": (16, "amx-int8", (6, 4, 2)),
    "avx512_vnni": (16, "avx512vnni", (6, 4, 2)),
    "avx_vnni": (8, "avxvnni", (3, 2, 1)),
    "avx2": (8, "avx2", (2, 2, 1)),
    "neon_i8mm": (4, "i8mm", (3, 2, 1)),
    "neon_dotprod": (4, "dotprod", (3, 2, 1)),
}
HERE = [kind for kind, (_, needs, _) in DOTS.items() if needs in host_instruction_sets()]
SCHEMES = ("q4f16_1", "q8f16_1", "q8f16_0")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 25, 33)
# Whole chunks of 128 or 256: where unpacking to bytes first pays; the last has more than are unpacked at a time.
MANY_SHAPES = ((33, 128), (17, 640), (48, 1280))
# Halves of whole blocks, an odd number of them, and halves that part a block.
GATED = (("q4f16_1", 96, 640, "silu"), ("q4f16_1", 40, 128, "gelu_tanh"), ("q8f16_1", 40, 128, "silu"))
FEW_KEPT = ("avx_vnni", "avx2")  # whose kernels of block formats are in `everything`; test_qemu.py has some of avx2
MANY_ROWS = (1, 2, 5, 33, 63, 67, 70, 97)


def knobs_of(kind: str) -> dict[str, int | str]:
    """The schedule facts of a CPU with this dot product."""
    lanes, _, (rows, tail_rows, blocks) = DOTS[kind]
    tile = {"int8_rows": rows, "int8_tail_rows": tail_rows, "int8_blocks": blocks, "int8_prefetch_words": 64}
    return {"int8_dot": kind, "lanes": lanes, **tile}


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


def requantized(rows: dict[str, Array], k: int, chunk: int, zero: int) -> Array:
    """float64[n, k] of 4-bit codes and scales in row order as bytes on one scale a chunk, as `int8_gemm` makes them."""
    words = rows["q_weight"]
    codes = ((words[:, :, None] >> (4 * np.arange(8, dtype=np.uint32))) & 15).reshape(
        len(words), -1, chunk // GROUP, GROUP
    )
    scales = rows["q_scale"].astype(np.float32).reshape(len(words), -1, chunk // GROUP)
    top = np.abs(scales).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(top > 0, np.float32(256 * 127 / 8) / top, np.float32(0))
    factor = np.rint(scales * inverse).astype(np.int64)[..., None]
    bytes_ = ((codes.astype(np.int64) - zero) * factor + 128) >> 8
    step = (top * np.float32(8 / 127)).astype(np.float64)[..., None]
    return (bytes_ * step).reshape(len(words), -1)[:, :k]


def requantized_blocks(scheme: Scheme, rows: dict[str, Array], k: int, chunk: int) -> Array:
    """As `requantized`, of a block format in row order: its step is the largest that its codes can mean / 127."""
    codes = native_formats.unpack_codes(rows["q_weight"], scheme.bits).astype(np.int64)
    if scheme.table:
        codes = np.array(scheme.table)[codes] + scheme.zero_point
    highest = np.float32(max(scheme.table) + scheme.zero_point if scheme.table else (1 << scheme.bits) - 1)
    n, each = len(codes), 2 if scheme.minima else 1
    numbers = native_formats.scale_values(scheme, rows["q_scale"]).reshape(n, -1, 1, each)
    if scheme.super_size:
        numbers = numbers * rows["q_sub"].astype(np.float32).reshape(n, numbers.shape[1], -1, each)
    if scheme.zeros:
        zeros = rows["q_zero"].view(np.uint8).astype(np.float32).reshape(n, -1, 1, 1)
        numbers = np.concatenate([numbers, -(zeros * numbers)], axis=-1)
    shifted = scheme.minima or scheme.zeros
    numbers = np.repeat(numbers.reshape(n, -1, 1 + shifted), max(1, scheme.group(k) // GROUP), axis=1)
    numbers = numbers.reshape(n, k // chunk, -1, 1 + shifted)
    scale, minimum = numbers[..., 0], numbers[..., -1]
    if shifted:
        reach = np.maximum(np.abs(minimum), np.abs(scale * highest + minimum))
    else:
        reach = np.abs(scale) * max(np.float32(scheme.zero_point), highest - np.float32(scheme.zero_point))
    top = reach.max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(top > np.float32(SMALLEST), np.float32(256 * 127) / top, np.float32(0))
    factor = np.rint(scale * inverse).astype(np.int64)[..., None]
    offset = np.rint(minimum * inverse).astype(np.int64)[..., None] if shifted else 0
    codes = codes.reshape(n, *factor.shape[1:3], -1) - scheme.zero_point
    step = (top * np.float32(1 / 127)).astype(np.float64)[..., None]
    result: Array = ((codes * factor + offset + 128 >> 8) * step).reshape(n, k)
    return result


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
    def chunk(self) -> int:
        """Numbers of a row of w on one scale where codes are unpacked to bytes first, else 0."""
        w, dot = packed_of(self.op), Dot(self.kind, DOTS[self.kind][0])
        if not self.many or not gemm_fits(w, dot):
            return 0
        return CHUNK if self.kind in ("amx_int8", "neon_i8mm") else chunk_of(w, dot)

    @property
    def group(self) -> int:
        """Numbers of a row of x on one scale."""
        if not self.chunk and scheme_named(self.scheme).blocked:
            return min(scheme_named(self.scheme).group(self.k), GROUP)
        whole_row = self.many and packed_of(self.op).groups == 1 and self.k % CHUNK == 0
        return self.chunk or (CHUNK if whole_row else GROUP)


@cache
def weight(scheme: str, n: int, k: int, kind: str, chunk: int) -> Array:
    """float64[n, k] that a kernel multiplies with; `chunk` is as for `requantized`, or 0."""
    if not chunk:
        return packed(scheme, (n, k), kind)[1]
    loaded = scheme_named(scheme)
    arrays = dict(zip(loaded.shapes(n, k), packed(scheme, (n, k), kind)[0]))
    rows = load_layout(LAYOUT).unrepack(loaded, arrays, n, k)
    return (
        requantized_blocks(loaded, rows, k, chunk) if loaded.blocked else requantized(rows, k, chunk, loaded.zero_point)
    )


def int8_call(kernel: Int8Matmul, m: int, kind: str) -> Call:
    """x, packed weight -> y f32[m, n] or [m, n / 2]; integers are exact, so only scaling and adding groups rounds."""
    arrays = packed(kernel.scheme, (kernel.n, kernel.k), kind)[0]
    w = weight(kernel.scheme, kernel.n, kernel.k, kind, kernel.chunk)
    x = adversarial(kind, (m, kernel.k), np.random.default_rng([m, kernel.k]))
    seen = quantized(x, kernel.group)
    terms = kernel.k // kernel.group + 8 if scheme_named(kernel.scheme).blocked else kernel.k // GROUP + 8
    size = np.abs(w) if kernel.chunk else packed(kernel.scheme, (kernel.n, kernel.k), kind)[2]
    bound = terms * EPS * (np.abs(seen) @ size.T) + terms * TINY
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
    scheme = scheme_named(kernel.scheme)
    group = min(scheme.group(kernel.k), GROUP) if scheme.blocked else GROUP
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

    So is the smaller shape of every second block format.

    q4f32_1 differs from q4f16_1 in the type of scales alone.
    """
    shapes = [*((shape, ROWS) for shape in SHAPES), *((shape, MANY_ROWS) for shape in MANY_SHAPES)]
    blocks = [(scheme, kept_shapes(scheme)) for scheme in (*KEPT, *INTEGERS)]
    every = [*((scheme, shapes) for scheme in SCHEMES), ("q4f32_1", [shapes[4], shapes[-1]]), *blocks]
    for number, (scheme, chosen) in enumerate(every):
        for (i, ((n, k), rows)), many in product(enumerate(chosen), (False, True)):
            kernel = Int8Matmul(dot, scheme, n, k, many=many)
            fewer = many or number % 2 > 0 if blocked(scheme) else number > 0 and i % 2 != number % 2
            library = library_of(dot, scheme, more=fewer and (n, k) != chosen[-1][0])
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
