"""Cases of matmul, expert_matmul and what else reads packed weights: take, dequantize."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

import numpy as np
from tvm import tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization import native_formats
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme, load_scheme, scheme_names
from mlcpipe.support.defaults import SEARCH
from tests.kernels.harness import EPS, KINDS, TINY, Array, Call, Case, adversarial, by_rules, unwritten
from tir_schedules.op import with_facts

ROWS = (1, 2, 3, 4, 5, 11, 12, 13, 16, 24, 33)
# Every N and every K of the list once, in pairs; the last crosses the depth that the GEMM holds in scratch twice.
MORE = "-more"  # ends the names of libraries that are for `everything`
SHAPES = ((1, 8), (15, 33), (16, 40), (17, 64), (97, 100), (100, 96), (33, 600))
# The codes, tables and scales of the rest occur among these, if not together.
KEPT = tuple(
    name
    for name in native_formats.SCHEMES
    if name not in ("TQ2_0", "Q2_0", "IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_S", "BNB_FP4")
)
# Zero points, minima, and zero points of the middle; 3, 4 and 8 bits; groups, rows; every dtype of scales.
INTEGERS = ("uint4_g128_f16", "affine4_g64_bf16", "int4_g128_bf16", "uint3_row_f32", "uint8_g32_f32", "affine8_g64_f16",
            "int8_row_f32", "int4_row_f32", "int8_g128_f16", "fp4_g16_f32")  # fmt: skip
SCHEMES = {
    "q4f16_1": SHAPES,
    "q3f16_1": SHAPES,
    "q8f16_1": SHAPES,
    "q8f16_0": SHAPES,
    "q0f16": SHAPES,
    "q4f32_1": ((97, 100), (16, 600)),
    "q8f32_1": ((97, 100), (16, 600)),
    "q8f32_0": ((97, 100), (16, 600)),
    "q0f32": ((97, 100), (1, 33)),
    **{name: ((97, 256), (16, 768))[bool(native_formats.SCHEMES[name].table) :] for name in KEPT},
    **dict.fromkeys(INTEGERS, ((97, 256),)),
}
GATED = (("q4f16_1", 40, 100, "silu"), ("q4f16_1", 30, 64, "gelu_tanh"), ("q0f16", 64, 33, "silu"))
LAYOUT = "rows16"


@dataclass(frozen=True)
class Matmul:
    """x f32[m, k] times packed w [n, k] transposed; with an activation: act(gate) * up of its halves.

    `many`: x has the tokens of a prompt.
    """

    scheme: str
    n: int
    k: int
    activation: str = ""
    many: bool = False

    @property
    def symbol(self) -> str:
        return f"matmul{self.activation}_{self.scheme}_{self.n}_{self.k}{'_many' * self.many}"

    def definition(self) -> tirx.PrimFunc:
        scheme, layout = scheme_named(self.scheme), load_layout(LAYOUT)
        if self.activation:
            func = definitions.gated_matmul(scheme, layout, self.n, self.k, self.activation, "float32")
        else:
            func = definitions.matmul(scheme, layout, self.n, self.k, "float32")
        return with_facts(func, rows="many") if self.many else func

    def build(self) -> tirx.PrimFunc:
        rule, func = by_rules(self.definition(), int8_activations=0)
        assert rule == "cpu.matmul"
        return func


@dataclass(frozen=True)
class ExpertMatmul:
    """x f32[m or m * top, k] times the packed w [experts, n, k] that ids choose."""

    scheme: str
    n: int
    k: int
    experts: int
    top: int
    shared: bool

    @property
    def symbol(self) -> str:
        return f"expert_{self.scheme}_{self.n}_{self.k}_{self.experts}_{self.top}_{self.shared}"

    def definition(self) -> tirx.PrimFunc:
        return definitions.expert_matmul(
            scheme_named(self.scheme),
            load_layout(LAYOUT),
            self.experts,
            self.n,
            self.k,
            self.top,
            self.shared,
            "float32",
        )

    def build(self) -> tirx.PrimFunc:
        rule, func = by_rules(self.definition(), int8_activations=0)
        assert rule == "cpu.expert_matmul"
        return func


@dataclass(frozen=True)
class Take:
    """Rows of a packed table."""

    scheme: str
    n: int
    k: int
    dtype: str = "float32"

    @property
    def symbol(self) -> str:
        return f"take_{self.scheme}_{self.n}_{self.k}_{self.dtype}"

    def definition(self) -> tirx.PrimFunc:
        return definitions.take(scheme_named(self.scheme), load_layout(LAYOUT), self.n, self.k, self.dtype)

    def build(self) -> tirx.PrimFunc:
        return by_rules(self.definition())[1]


@dataclass(frozen=True)
class Dequantize:
    """The whole packed weight as floats."""

    scheme: str
    n: int
    k: int
    experts: int | None

    @property
    def symbol(self) -> str:
        return f"dequantize_{self.scheme}_{self.n}_{self.k}_{self.experts}"

    def definition(self) -> tirx.PrimFunc:
        return definitions.dequantize(
            scheme_named(self.scheme), load_layout(LAYOUT), self.n, self.k, "float32", self.experts
        )

    def build(self) -> tirx.PrimFunc:
        return by_rules(self.definition())[1]


def scheme_named(name: str) -> Scheme:
    """A scheme, or that of a block format or of integers."""
    return load_scheme(name) if name in scheme_names() else native_formats.native_scheme(name)


def unit_of(scheme: str) -> int:
    """What rows of a block format are a multiple of; 8 for the others."""
    found = scheme_named(scheme)
    return max(found.super_size or found.group_size, native_formats.RUN) if found.kept else 8


def whole(scheme: str, k: int) -> int:
    """The next k that rows of a scheme may have."""
    unit = unit_of(scheme) if scheme_named(scheme).kept else 1
    return -(-k // unit) * unit


def random_parts(scheme: Scheme, shape: tuple[int, ...], rng: np.random.Generator, scale: float) -> dict[str, Array]:
    """Packed arrays of a block format in row order: all codes, all signs of scales, and some that are 0."""
    rows, shapes = math.prod(shape[:-1]), scheme.shapes(*shape[-2:])
    codes = rng.integers(0, len(scheme.table) or 1 << scheme.bits, (rows, scheme.padded(shape[-1])), dtype=np.uint8)
    scales = random_scales(scheme, (rows, shapes["q_scale"][0][-1]), rng, scale)
    subs = None
    for name in {"q_sub", "q_zero"} & set(shapes):
        subs = rng.integers(-128, 128, (rows, shapes[name][0][-1])).astype(np.int8)
    if scheme.zeros and subs is not None:
        subs &= np.uint8((1 << scheme.bits) - 1).view(np.int8)
    arrays = native_formats.pack_parts(scheme, codes, scales, subs)
    return {name: array.reshape(*shape[:-1], -1) for name, array in arrays.items()}


def random_scales(scheme: Scheme, shape: tuple[int, ...], rng: np.random.Generator, scale: float) -> Array:
    """Scales of a block format about as large as `scale`, as they are stored."""
    if scheme.scale_format == "e4m3":
        return rng.integers(0, 127, shape).astype(np.int8)
    if scheme.scale_format == "e8m0":  # from the smallest on where all are tiny
        first = 120 if scale > 2**-9 else 0
        return rng.integers(first, first + 12, shape, dtype=np.uint8).view(np.int8)
    scales: Array = (rng.standard_normal(shape) * scale).astype(scheme.model_dtype)
    scales[rng.random(shape) < 0.1] = 0
    return (scales.view(np.uint32) >> 16).astype(np.uint16) if scheme.scale_format == "bf16" else scales


@lru_cache(4)  # a shape's kinds; those of real models are 300 MB each
def packed(scheme_name: str, shape: tuple[int, ...], kind: str) -> tuple[tuple[Array, ...], Array, Array]:
    """Stored arrays of a random weight; w float64 as they mean it; per element the size of what a kernel adds up.

    A GEMV sums codes and subtracts zero_point * sum(x) later, so its rounding follows |w| + zero_point * scale.
    """
    scheme = scheme_named(scheme_name)
    rng = np.random.default_rng([*scheme_name.encode(), *shape])
    # Denormal weights for float16 scales, not for float32: 2**-20 makes scales of 2**-22 and below.
    scale = 2.0**-20 if kind == "denormal" else 0.1
    if scheme.kept:
        rows = random_parts(scheme, shape, rng, scale)
    else:
        w = adversarial("normal" if kind == "denormal" else kind, shape, rng, scale)
        rows = pack(scheme, w, method=SEARCH)  # all codes and signs of scales
    stored = load_layout(LAYOUT).repack(scheme, rows, *shape[-2:])
    w = unpack(scheme, rows, shape[-1]).astype(np.float64)
    return tuple(stored.values()), w, np.abs(w) + _zero_points(scheme, rows, shape[-1])


def _zero_points(scheme: Scheme, rows: dict[str, Array], k: int) -> Array | float:
    if scheme.bits == 0:
        return 0.0
    if scheme.kept:
        flat = {name: _unsigned(scheme, name, a).reshape(-1, a.shape[-1]) for name, a in rows.items()}
        if scheme.zeros:
            no_codes = {**flat, "q_weight": np.zeros_like(flat["q_weight"])}
            zeros = native_formats.unpack(scheme, no_codes, k).astype(np.float64)
            codes = native_formats.unpack(replace(scheme, zeros=False), flat, k).astype(np.float64)
            return (codes - zeros).reshape(*rows["q_weight"].shape[:-1], k)
        table = tuple(level + 2 * scheme.zero_point for level in scheme.table)
        opposite = native_formats.unpack(replace(scheme, zero=-scheme.zero_point, table=table), flat, k)
        return opposite.astype(np.float64).reshape(*rows["q_weight"].shape[:-1], k)
    scales = np.repeat(np.abs(rows["q_scale"]).astype(np.float64), scheme.group(k), axis=-1)
    return scales[..., :k] * scheme.zero_point


def _unsigned(scheme: Scheme, name: str, array: Array) -> Array:
    """Scales and sub-scales without their signs; another array as it is."""
    if name == "q_scale" and scheme.scale_format == "bf16":
        return array & np.uint16(0x7FFF)
    signed = {"q_sub"} if scheme.scale_format else {"q_scale", "q_sub"}
    return np.abs(array.astype(np.float32)) if name in signed else array


def _bound(x: Array, size: Array) -> Array:
    """Error bound of x @ size.T summed in float32 in any order (Higham, Accuracy and Stability, 3.1)."""
    terms = x.shape[-1] + 16
    bound: Array = terms * EPS * (np.abs(x).astype(np.float64) @ size.T) + terms * TINY
    return bound


def matmul_call(kernel: Matmul, m: int, kind: str) -> Call:
    """x, packed weight -> y f32[m, n], or [m, n / 2]."""
    arrays, w, size = packed(kernel.scheme, (kernel.n, kernel.k), kind)
    x = adversarial(kind, (m, kernel.k), np.random.default_rng([m, kernel.k]))
    expected, bound = gated(x.astype(np.float64) @ w.T, _bound(x, size), kernel.activation)
    args = (x, *arrays, unwritten(expected.shape))
    return Call(args, {len(args) - 1: (expected, bound)})


def gated(h: Array, bound: Array, activation: str) -> tuple[Array, Array]:
    """act(gate) * up of float64 h [m, 2 * width] that is known within `bound`; h itself without an activation."""
    if not activation:
        return h, bound
    (gate, up), (gate_bound, up_bound) = np.split(h, 2, axis=1), np.split(bound, 2, axis=1)
    # Both are gate * sigmoid(z).
    z = gate if activation == "silu" else math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)
    act = gate * np.exp(-np.logaddexp(0, -z))
    # Neither is steeper than 1.13. exp: see `fast_math.py`; it stops at e^-87. z has four roundings.
    reach = np.minimum(np.abs(z), 88)
    rounding = (8 * EPS + 3e-7 + (7.4e-8 + 4 * EPS) * reach) * np.abs(act) + 1e-37 * np.abs(gate)
    act_bound = 1.13 * gate_bound + rounding
    result: Array = act * up
    return result, act_bound * (np.abs(up) + up_bound) + np.abs(act) * up_bound + 2 * EPS * np.abs(result) + TINY


def expert_call(kernel: ExpertMatmul, m: int, kind: str) -> Call:
    """x, packed weights, ids -> y f32[m * top, n]; the first id is below the range, the last above."""
    arrays, w, size = packed(kernel.scheme, (kernel.experts, kernel.n, kernel.k), kind)
    rng = np.random.default_rng([m, kernel.top])
    x = adversarial(kind, (m if kernel.shared else m * kernel.top, kernel.k), rng)
    ids = rng.random((m, kernel.experts)).argsort(axis=1)[:, : kernel.top].astype(np.int32)  # as a router: distinct
    if m > 1:
        ids[0, 0], ids[-1, -1] = -3, kernel.experts + 2
    chosen = np.clip(ids, 0, kernel.experts - 1).reshape(-1)
    rows = np.repeat(x, kernel.top, axis=0) if kernel.shared else x
    expected = np.stack([r.astype(np.float64) @ w[e].T for r, e in zip(rows, chosen)])
    bound = np.stack([_bound(r, size[e]) for r, e in zip(rows, chosen)])
    args = (x, *arrays, ids, unwritten((m * kernel.top, kernel.n)))
    return Call(args, {len(args) - 1: (expected, bound)})


def take_call(kernel: Take, m: int, kind: str) -> Call:
    """packed table, ids -> rows: exact; ids outside read the nearest row."""
    arrays, w, _ = packed(kernel.scheme, (kernel.n, kernel.k), kind)
    ids = np.random.default_rng(m).integers(-2, kernel.n + 2, m).astype(np.int32)
    args = (*arrays, ids, unwritten((m, kernel.k), kernel.dtype))
    rows = w[np.clip(ids, 0, kernel.n - 1)].astype(kernel.dtype).astype(np.float64)
    return Call(args, {len(args) - 1: (rows, 0.0)})


def dequantize_call(kernel: Dequantize, kind: str) -> Call:
    """packed weight -> floats: exact."""
    shape = (kernel.n, kernel.k) if kernel.experts is None else (kernel.experts, kernel.n, kernel.k)
    arrays, w, _ = packed(kernel.scheme, shape, kind)
    return Call((*arrays, unwritten(shape)), {len(arrays): (w, 0.0)})


def cases() -> Iterator[Case]:
    """Small cases of every scheme, then timed ones. After the first, every second of all shapes is for `everything`."""
    for number, (scheme, shapes) in enumerate(SCHEMES.items()):
        for i, ((n, k), many) in enumerate(product(shapes, (False, True))):
            kernel = Matmul(scheme, n, k, many=many)
            more = MORE if number and shapes == SHAPES and i // 2 % 2 != number % 2 else ""
            for j, m in enumerate(ROWS):
                kind = KINDS[(i // 2 + j) % len(KINDS)]
                yield Case(f"{kernel.symbol}-m{m}-{kind}", scheme + more, kernel, partial(matmul_call, kernel, m, kind))
        yield from _lookups(scheme)
        yield from _experts(scheme)
    for (scheme, n, k, activation), many in product(GATED, (False, True)):
        kernel = Matmul(scheme, n, k, activation, many)
        for m, kind in zip((1, 3, 13, 24), KINDS):
            yield Case(f"{kernel.symbol}-m{m}-{kind}", scheme, kernel, partial(matmul_call, kernel, m, kind))
    yield from timed_cases()


def _lookups(scheme: str) -> Iterator[Case]:
    unit = unit_of(scheme)
    for kind in KINDS:
        take = Take(scheme, 19, unit * 9)
        yield Case(f"{take.symbol}-{kind}", scheme, take, partial(take_call, take, 9, kind))
        for experts in (None, 2):
            whole = Dequantize(scheme, 17, unit * 9, experts)
            yield Case(f"{whole.symbol}-{kind}", scheme, whole, partial(dequantize_call, whole, kind))
    # More elements than one thread takes, and a lookup in half precision.
    wide, half = Take(scheme, 50, 500 // unit * unit), Take(scheme, 19, unit * 9, "float16")
    yield Case(f"{wide.symbol}-many", scheme, wide, partial(take_call, wide, 40, "normal"))
    yield Case(f"{half.symbol}-half", scheme, half, partial(take_call, half, 9, "normal"))


def _experts(scheme: str) -> Iterator[Case]:
    for n, k, experts, top, shared in ((33, 100, 4, 2, True), (16, 40, 3, 3, False), (7, 33, 2, 1, False)):
        kernel = ExpertMatmul(scheme, n, whole(scheme, k), experts, top, shared)
        for m, kind in zip((1, 3, 5, 2), KINDS):
            yield Case(f"{kernel.symbol}-m{m}-{kind}", scheme, kernel, partial(expert_call, kernel, m, kind))


def timed_cases() -> Iterator[Case]:
    """Sizes of models with one and three billion parameters."""
    for scheme, n, k, rows in (
        ("q4f16_1", 8192, 2048, (1, 16, 128)),
        ("q4f16_1", 2048, 8192, (1,)),
        ("q8f16_1", 4096, 2048, (1,)),
        ("q3f16_1", 4096, 2048, (1,)),
        ("q0f16", 2048, 2048, (1, 128)),
    ):
        nbytes = scheme_named(scheme).nbytes(n, k)
        for m in rows:
            kernel = Matmul(scheme, n, k, many=m > 16)
            yield Case(
                f"{kernel.symbol}-m{m}",
                "timed-matmul",
                kernel,
                partial(matmul_call, kernel, m, "normal"),
                nbytes=nbytes + 4 * m * (n + k),
                flops=2 * m * n * k,
                timed=True,
            )
    expert = ExpertMatmul("q4f16_1", 1536, 2048, 4, 2, True)
    yield Case(
        f"{expert.symbol}-m1",
        "timed-matmul",
        expert,
        partial(expert_call, expert, 1, "normal"),
        nbytes=2 * load_scheme("q4f16_1").nbytes(1536, 2048),
        flops=2 * 2 * 1536 * 2048,
        timed=True,
    )
