"""The choices of `mlcpipe tune` in the kernels for CPUs, by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tir_schedules.cpu.attention import attention_tiles
from tir_schedules.cpu.bf16_amx import amx_fits
from tir_schedules.cpu.int8_dot import Dot
from tir_schedules.cpu.int8_gemm import Int8Tile, gemm_fits
from tir_schedules.cpu.int8_matmul import dot_of, many_tile_of, tiles_of
from tir_schedules.cpu.int8_smmla import smmla_fits
from tir_schedules.cpu.packed_weight import packed_of
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs
from tir_schedules.space import Choice, Space, with_default

FEW_ROWS, MANY_ROWS = 16, 256  # of x, that short and long prompts are measured with
CONTEXT = 1024  # cached tokens that attention is measured with
_REGISTERS = {4: 32, 8: 16, 16: 32}  # of vectors: NEON, AVX2, AVX-512
_L2_BYTES = 512 << 10
_ROWS = (2, 3, 4, 5, 6, 8, 9, 10, 12, 14, 16)


def _int8_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row and several decode rows, or prefill rows, as in `int8_matmul.py`."""
    w, dot = packed_of(op), dot_of(knobs)
    if isinstance(dot, Declined):
        return ()
    tiles, many = tiles_of(knobs), many_tile_of(knobs)
    if not op.many_rows:
        return (_gemv(tiles.gemv_streams, tiles.prefetch_words), _tile("few", FEW_ROWS, tiles.few, dot, {}))
    if amx_fits(w, dot) or smmla_fits(w, dot):
        return ()
    if not gemm_fits(w, dot):
        return (_tile("few", MANY_ROWS, tiles.few, dot, {}),)
    return (_tile("gemm", MANY_ROWS, many, dot, {"int8_depth": (many.depth, (256, 512, 1024, 2048))}),)


def _gemv(streams: int, prefetch: int) -> Space:
    default = {"int8_prefetch_words": prefetch, "int8_gemv_streams": streams}
    knobs = {"int8_prefetch_words": (0, 16, 32, 48, 64, 96, 128, 192, 256), "int8_gemv_streams": (1, 2, 3, 4)}
    return Space("gemv", 1, "gemv", with_default(knobs, default), default, lambda choice: "")


def _tile(bucket: str, rows: int, tile: Int8Tile, dot: Dot, more: Mapping[str, tuple[int, tuple[int, ...]]]) -> Space:
    """A register tile; `more` knobs: name -> (what it is now, its values).

    A group's sums in int32 are next to those in float32.
    """
    names = {name: f"int8_{name}.{bucket}" for name in ("rows", "tail_rows", "blocks")}
    default = {names["rows"]: tile.rows, names["tail_rows"]: tile.tail_rows, names["blocks"]: tile.blocks}
    knobs: dict[str, tuple[int, ...]] = {names["rows"]: _ROWS, names["tail_rows"]: _ROWS, names["blocks"]: (1, 2, 3, 4)}
    for name, (value, values) in more.items():
        default[name], knobs[name] = value, values

    def problem(choice: Choice) -> str:
        tall, tail, wide = (choice[names[name]] for name in ("rows", "tail_rows", "blocks"))
        if tail != tall and 3 * tail != 2 * tall:
            return f"{tail} rows in the last panels are neither {tall} nor two thirds of it"
        sums = 2 * tall * wide * 16 // dot.lanes
        if sums > _REGISTERS[dot.lanes] - 2:
            return f"{sums} sums do not fit {_REGISTERS[dot.lanes]} vector registers"
        if "int8_depth" in choice and choice["int8_depth"] * 16 * wide > _L2_BYTES:
            return f"{choice['int8_depth']} by {16 * wide} bytes are more than a cache holds"
        return ""

    return Space(bucket, rows, "gemm", with_default(knobs, default), default, problem)


def _matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """Prefill or decode rows of the matmul in float32."""
    default = {name: int(knobs[name]) for name in ("gemm_rows", "gemm_blocks", "gemm_depth")}
    values = {"gemm_rows": (4, 8, 12, 16), "gemm_blocks": (1, 2, 3, 4), "gemm_depth": (64, 128, 256, 512, 1024)}
    lanes = int(knobs["lanes"])

    def problem(choice: Choice) -> str:
        sums = choice["gemm_rows"] * choice["gemm_blocks"] * 16 // lanes
        return f"{sums} sums, more than {most}, would be in memory" if sums > most else ""

    now = default["gemm_rows"] * default["gemm_blocks"] * 16 // lanes
    most = max(now, 2 * _REGISTERS.get(lanes, 16))
    return (Space("gemm", 128, "gemm", with_default(values, default), default, problem),)


def _attention(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """Register tiles of one query's heads and how its keys are split among threads; tiles and tasks of a prompt."""
    tiles = attention_tiles(op, knobs)
    if op.kind == "attend_few":
        default = {
            "attention_accumulators": tiles.accumulators,
            "attention_rows": tiles.max_rows,
            "attention_pages": tiles.part_pages,
        }
        values = {
            "attention_accumulators": (8, 12, 16, 20, 24, 28, 32),
            "attention_rows": (1, 2, 4, 6, 8, 12),
            "attention_pages": (4, 8, 16, 32),
        }
        return (Space("decode", 1, "attention", with_default(values, default), default, lambda choice: "", CONTEXT),)
    default = {"attention_rows": tiles.max_rows, "attention_task_rows": tiles.task_rows}
    values = {"attention_rows": (2, 3, 4, 5, 6, 7), "attention_task_rows": (16, 32, 48, 64, 96, 128, 192)}
    return (
        Space("prefill", MANY_ROWS, "attention", with_default(values, default), default, lambda choice: "", CONTEXT),
    )


SPACES: Mapping[str, Callable[[Op, Knobs], tuple[Space, ...]]] = {
    "cpu.int8_matmul": _int8_matmul,
    "cpu.matmul": _matmul,
    "cpu.attention": _attention,
}
