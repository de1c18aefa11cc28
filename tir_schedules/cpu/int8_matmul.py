"""y = x W^T for CPUs with integer dot products: W packed as `rows16`, x quantized to int8 in groups on the way.

A register tile of `rows` of x by 16 * `blocks` columns runs over all of K: per group its int32 sums, which start
at -zero_point * sum(q), are scaled into float32 sums. A kernel is for decode or prefill rows, and its
arithmetic is the same for any number of them:

- decode rows: groups of 32 on their own scales, see `int8_few_rows.py`;
- prefill rows: the same groups. Codes of fewer than 8 bits are unpacked to bytes once for all rows, see
  `int8_gemm.py`, and CPUs that multiply matrices do: in bytes (`int8_smmla.py`) or in bfloat16 (`bf16_amx.py`).

x is in panels of `rows` rows, what a tile broadcasts in a row. Layout of W: `mlcpipe/quantization/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.adapter_shape import AdapterShape, adapters_of
from tir_schedules.builder import Buffer, Expr, Tensor, function, kept
from tir_schedules.cpu.adapters import Adapters, adapter_arguments
from tir_schedules.cpu.bf16_amx import amx_fits, amx_gemm
from tir_schedules.cpu.gate import Gate, apply_gate, gate_of, ungated
from tir_schedules.cpu.int8_activations import Groups
from tir_schedules.cpu.int8_dot import KINDS, Dot, Weight
from tir_schedules.cpu.int8_few_rows import FEW_OF_MANY, FewTiles, few_of_many, one_row, several_rows
from tir_schedules.cpu.int8_gemm import DEPTH, Int8Tile, gemm, gemm_fits
from tir_schedules.cpu.int8_smmla import smmla_fits, smmla_gemm
from tir_schedules.cpu.int8_unpacked import GROUP, fine_groups
from tir_schedules.cpu.packed_weight import LANES, Packed, packed_of
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, NamedRule, hand_written


def dot_of(knobs: Knobs) -> Dot | Declined:
    """The integer dot product that the schedule's facts name."""
    kind = str(knobs.get("int8_dot", "none"))
    if kind not in KINDS:
        return Declined("no integer dot product")
    if not knobs.get("int8_activations", 1):
        return Declined("activations stay float32")
    return Dot(kind, int(knobs["lanes"]))


def int8_matmul(op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """The kernel for a tagged `matmul`, `gated_matmul` or `adapted_matmul`: x f32[m, K], packed W, y f32[m, N] or
    [m, N / 2], m >= 1; the arguments of its adapters are before y.
    """
    dot, w = dot_of(knobs), packed_of(op)
    if isinstance(dot, Declined):
        return dot
    reason = unfit(op, w)
    if reason:
        return Declined(reason)
    if op.many_rows:
        return _many_kernel(w, dot, tiles_of(knobs), many_tile_of(knobs), gate_of(op))
    return _few_kernel(w, dot, tiles_of(knobs), gate_of(op), adapters_of(op))


def tiles_of(knobs: Knobs) -> FewTiles:
    """The register tiles of decode rows by the schedule's facts: `int8_rows` for all, `int8_rows.few` for 8 on.

    So a tile for 16 rows may be one that 2 rows would mostly waste.
    """
    streams = int(knobs.get("int8_gemv_streams", 1))
    return FewTiles(int(knobs["int8_prefetch_words"]), streams, _tile(knobs, "several"), _tile(knobs, "few"))


def many_tile_of(knobs: Knobs) -> Int8Tile:
    """The register tile of prefill rows: `int8_rows.gemm`, or `int8_rows`."""
    return _tile(knobs, "gemm")


def _tile(knobs: Knobs, bucket: str) -> Int8Tile:
    sizes = (knobs.get(f"int8_{name}.{bucket}", knobs[f"int8_{name}"]) for name in ("rows", "tail_rows", "blocks"))
    rows, tail_rows, blocks = map(int, sizes)
    return Int8Tile(rows, tail_rows, blocks, int(knobs.get("int8_depth", DEPTH)))


def unfit(op: Op, w: Packed) -> str:
    """Why the integer kernels do not take a weight, or ""."""
    if op.str("layout") != "rows16":
        return f"weight layout {op.str('layout')} has no CPU kernel"
    if w.blocked:
        return ""
    if w.bits not in (4, 8) or w.codes_per_word * w.bits != 32:
        return f"{w.bits}-bit codes, {w.codes_per_word} a word"
    if w.group_size != GROUP and w.groups > 1:
        return f"groups of {w.group_size}"
    return ""


def _function(
    w: Packed,
    dot: Dot,
    gate: Gate | None,
    body: Callable[[Buffer, Weight, Buffer, Expr, Adapters | None], None],
    shape: AdapterShape | None = None,
) -> tirx.PrimFunc:
    """x, packed W, what says which adapters there are, y, and what `body(x, weight, y, m, adapters)` emits."""
    m, columns = tirx.Var("m", "int64"), w.n if gate is None else gate.width
    arguments = {
        "x": Tensor((m, w.k), "float32"),
        **w.arrays(),
        **(adapter_arguments(shape) if shape is not None else {}),
        "y": Tensor((m, columns), "float32"),
    }

    def emit(X: Buffer, *rest: Any) -> None:
        arrays = len(w.arrays())
        adapters = None if shape is None else Adapters(shape, *rest[arrays:-1])
        body(X, Weight(w, dot, *rest[:arrays]), rest[-1], m, adapters)

    return function("kernel", arguments, emit)


@kept
def _few_kernel(w: Packed, dot: Dot, tiles: FewTiles, gate: Gate | None, shape: AdapterShape | None) -> tirx.PrimFunc:
    """Groups of 32, also where a row has one scale."""

    def body(X: Buffer, weight: Weight, Y: Buffer, m: Expr, adapters: Adapters | None) -> None:
        _dot_products(X, weight, Y, m, tiles, fine_groups(weight), gate, adapters)

    return _function(w, dot, gate, body, shape)


@kept
def _many_kernel(w: Packed, dot: Dot, tiles: FewTiles, many: Int8Tile, gate: Gate | None) -> tirx.PrimFunc:
    """What the CPU has for many rows."""

    def body(X: Buffer, weight: Weight, Y: Buffer, m: Expr, _: Adapters | None) -> None:
        if amx_fits(w, dot) or smmla_fits(w, dot):
            sums = ungated(gate, Y, m)
            (amx_gemm if amx_fits(w, dot) else smmla_gemm)(X, weight, sums, m)
            return apply_gate(gate, sums, Y, m)
        if not gemm_fits(w, dot):
            return _dot_products(X, weight, Y, m, tiles, fine_groups(weight), gate)
        with I.If(m <= I.int64(FEW_OF_MANY)):
            with I.Then():
                sums = ungated(gate, Y, FEW_OF_MANY)
                few_of_many(X, weight, sums, m, fine_groups(weight), tiles.prefetch_words)
                apply_gate(gate, sums, Y, m)
            with I.Else():
                _gemm(X, weight, Y, m, many, gate)

    return _function(w, dot, gate, body)


def _gemm(X: Buffer, weight: Weight, Y: Buffer, m: Expr, tile: Int8Tile, gate: Gate | None) -> None:
    """A gate in each thread where halves of the columns end with blocks."""
    if gate is not None and gate.width % LANES == 0:
        return gemm(X, weight, Y, m, tile, gate)
    sums = ungated(gate, Y, m)
    gemm(X, weight, sums, m, tile, None)
    apply_gate(gate, sums, Y, m)


def _dot_products(
    X: Buffer,
    weight: Weight,
    Y: Buffer,
    m: Expr,
    tiles: FewTiles,
    groups: Groups,
    gate: Gate | None,
    adapters: Adapters | None = None,
) -> None:
    """Codes as they are stored, x in `groups`."""
    with I.If(m == I.int64(1)):
        with I.Then():
            row = ungated(gate, Y, 1)
            one_row(X, weight, row, tiles, groups, adapters)
            apply_gate(gate, row, Y, 1)
        with I.Else():
            rows = ungated(gate, Y, m)
            several_rows(X, weight, rows, m, tiles, groups, adapters)
            apply_gate(gate, rows, Y, m)


RULES = (
    NamedRule(
        "cpu.int8_matmul",
        ("matmul", "gated_matmul", "adapted_matmul"),
        hand_written(lambda _, op, knobs: int8_matmul(op, knobs)),
        before="cpu.matmul",
    ),
)
