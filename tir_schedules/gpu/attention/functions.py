"""The functions of attention over pages that the runtime owns, and the rules that make functions that attend again.

Their integers are those of `tir_schedules/step_layout.py`; `pages.py` describes pages.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from tir_schedules.builder import kept
from tir_schedules.gpu.attention import decode_mma, prefill_mma
from tir_schedules.gpu.attention.attend_few import attend_few
from tir_schedules.gpu.attention.attend_many import attend_many
from tir_schedules.gpu.attention.decode import decode
from tir_schedules.gpu.attention.decode_part import DecodeTile, decode_tile
from tir_schedules.gpu.attention.move_pages import store_pages
from tir_schedules.gpu.attention.pages import AttentionShape
from tir_schedules.gpu.attention.prefill import prefill_cached, prefill_chunk
from tir_schedules.gpu.attention.prefill_tile import PrefillTile, prefill_tile
from tir_schedules.gpu.attention.rotate import rotate
from tir_schedules.gpu.matmul.packed_loads import GROUP_LANES
from tir_schedules.op import Op, by_hand
from tir_schedules.paged import ATTENTION, heads_of, is_bidirectional
from tir_schedules.rule import Declined, Knobs, NamedRule, hand_written


@kept
def page_functions(
    shape: AttentionShape, scale: float, window: int = 0, bidirectional: bool = False
) -> dict[str, tirx.PrimFunc]:
    """Role -> tagged function, for layers whose scores are times `scale` and that have a `window` (0: none).

    store_pages(qkv, step, pages)       K and V of all rows to their places, before attention; none for `queries_only`
    attend_few(qkv, step, pages, out)   decode rows
    attend_many(qkv, step, pages, out)  prefill rows; `bidirectional`: of texts whose rows attend to all others
    rotate_qkv(qkv), rotate_out(out)    where `rotated_dims`: before `store_pages` and after attention, in place
    """
    attending = {
        **({} if shape.queries_only else {"store_pages": store_pages(shape)}),
        "attend_few": attend_few(shape, scale, window),
        "attend_many": attend_many(shape, scale, window, bidirectional=bidirectional),
    }
    facts = {**shape.facts, "scale": scale, "window": window} | ({"bidirectional": 1} if bidirectional else {})
    rotating = {}
    if shape.rotated_dims:
        rotating["rotate_qkv"] = rotate(shape, "rotate_qkv", shape.row_heads, shape.head_dim)
        rotating["rotate_out"] = rotate(shape, "rotate_out", shape.num_heads, shape.v_dim)
    return by_hand(attending, "", **facts) | by_hand(rotating, "", **shape.facts)


DECODE_KINDS = (*(kind for kind in ATTENTION if "decode" in kind), "attend_few")
PREFILL_KINDS = (*(kind for kind in ATTENTION if "prefill" in kind), "attend_many")


def subgroup_attention(op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Decode for a target with subgroups of known size."""
    size = int(knobs.get("subgroup", 0))
    if not size or op.int("head_dim") % GROUP_LANES:
        return Declined(f"heads of {op.int('head_dim')}" if size else "subgroups of unknown size")
    shape = AttentionShape(**heads_of(op), subgroup=size, shuffled=bool(knobs["shuffle_x"]))
    if op.kind == "attend_few" and not decode_mma.problem(shape, knobs):
        shape = replace(shape, mma=True)
    return _decode(op, shape, decode_tile(knobs))


def mma_attention(op: Op, knobs: Knobs) -> tirx.PrimFunc | Declined:
    """Rows of prompts, for a target with matrix units."""
    shape = AttentionShape(**heads_of(op), subgroup=int(knobs.get("subgroup", 0)))
    if reason := prefill_mma.problem(shape, knobs):
        return Declined(reason)
    tile = prefill_mma.TILE
    return attend_many(shape, float(op.facts["scale"]), op.int("window"), tile, True, is_bidirectional(op))


def attention(func: tirx.PrimFunc, op: Op, knobs: Knobs) -> tirx.PrimFunc:
    """An attention function with the tile of the knobs; `func` itself if that is the default tile."""
    shape = AttentionShape(**heads_of(op))
    if op.kind in DECODE_KINDS:
        decoding = decode_tile(knobs)
        return func if decoding == DecodeTile() else _decode(op, shape, decoding)
    tile = prefill_tile(knobs)
    return func if tile == PrefillTile() else _prefill(op, shape, tile)


def _decode(op: Op, shape: AttentionShape, tile: DecodeTile) -> tirx.PrimFunc:
    if op.kind == "attend_few":
        return attend_few(shape, float(op.facts["scale"]), op.int("window"), tile)
    return decode(shape, *_window_of(op), tile)


def _prefill(op: Op, shape: AttentionShape, tile: PrefillTile) -> tirx.PrimFunc:
    if op.kind == "attend_many":
        scale, window = float(op.facts["scale"]), op.int("window")
        return attend_many(shape, scale, window, tile, bidirectional=is_bidirectional(op))
    if "chunk" in op.kind:
        return prefill_chunk(shape, tile)
    return prefill_cached(shape, *_window_of(op), tile)


def _window_of(op: Op) -> tuple[int, bool]:
    """The window that a function of the cache masks by (0: none), and whether TVM tells it of windows."""
    sliding = op.kind.endswith("_sliding")
    return op.int("sliding_window") if sliding or op.int("all_slide") else 0, sliding


RULES = (
    NamedRule(
        "gpu.subgroup_attention",
        DECODE_KINDS,
        hand_written(lambda _, op, knobs: subgroup_attention(op, knobs)),
        before="gpu.attention",
    ),
    NamedRule(
        "gpu.mma_attention",
        ("attend_many",),
        hand_written(lambda _, op, knobs: mma_attention(op, knobs)),
        before="gpu.attention",
    ),
    NamedRule("gpu.attention", (*DECODE_KINDS, *PREFILL_KINDS), hand_written(attention)),
)
