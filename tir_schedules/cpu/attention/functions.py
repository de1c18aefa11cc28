"""The functions of attention over pages that the runtime owns, and the rule that makes them again with tuned tiles.

Their integers are those of `tir_schedules/step_layout.py`; `pages.py` describes pages.
"""

from __future__ import annotations

from dataclasses import replace

from tvm import tirx

from tir_schedules.builder import kept
from tir_schedules.cpu.attention.attend_few import attend_few
from tir_schedules.cpu.attention.attend_many import attend_many
from tir_schedules.cpu.attention.flash import Tiles, chosen
from tir_schedules.cpu.attention.keys import BLOCK_PAGES
from tir_schedules.cpu.attention.pages import AttentionShape
from tir_schedules.cpu.attention.rotate import rotate
from tir_schedules.cpu.attention.store_pages import store_pages
from tir_schedules.op import Op, by_hand
from tir_schedules.paged import heads_of, is_bidirectional, sees_ahead
from tir_schedules.rule import Knobs, NamedRule, hand_written
from tir_schedules.step import ATTEND

FEW = Tiles()
LATENT = Tiles(max_rows=24)  # heads share a key: a tile is all of them, or many, by one page or 16 dimensions
# Each task brings keys to float32 itself, so many rows share them.
MANY = Tiles(16, 4, task_rows=128)


@kept
def page_functions(
    shape: AttentionShape, scale: float, window: int = 0, bidirectional: bool = False, ahead: bool = False
) -> dict[str, tirx.PrimFunc]:
    """Role -> tagged function, for layers whose scores are times `scale` and that have a `window` (0: none).

    store_pages(qkv, step, pages)       K and V of all rows to their places, before attention; none for `queries_only`
    attend_few(qkv, step, pages, out)   decode rows
    attend_many(qkv, step, pages, out)  prefill rows; `bidirectional`: of texts whose rows attend to all others,
                                        `ahead`: up to the step's `last_key`
    rotate_qkv(qkv), rotate_out(out)    where `rotated_dims`: before `store_pages` and after attention, in place
    """
    attending = {
        **({} if shape.queries_only else {"store_pages": store_pages(shape)}),
        **(
            {}
            if shape.distances or shape.ahead
            else {"attend_few": attend_few(shape, scale, window, LATENT if shape.latent else FEW)}
        ),
        "attend_many": attend_many(shape, scale, window, MANY, bidirectional, ahead),
    }
    rotating = {}
    if shape.rotated_dims:
        rotating["rotate_qkv"] = rotate(shape, "rotate_qkv", shape.row_heads, shape.head_dim)
        rotating["rotate_out"] = rotate(shape, "rotate_out", shape.num_heads, shape.v_dim)
    facts = {**shape.facts, "scale": scale, "window": window}
    facts |= ({"bidirectional": 1} if bidirectional else {}) | ({"ahead": 1} if ahead else {})
    return by_hand(attending, "", **facts) | by_hand(rotating, "", **shape.facts)


@kept
def keep_functions(shape: AttentionShape) -> dict[str, tirx.PrimFunc]:
    """`store_pages`, and `rotate_qkv` where `rotated_dims`, for rows of k and v alone, which have no queries."""
    made = {"store_pages": store_pages(shape)}
    if shape.rotated_dims:
        made["rotate_qkv"] = rotate(shape, "rotate_qkv", shape.row_heads, shape.head_dim)
    return by_hand(made, "", **shape.facts)


def attention_tiles(op: Op, knobs: Knobs) -> Tiles:
    """The tiles of an attention function, with those of the knobs."""
    names = {"max_rows": "attention_rows"}
    if op.kind == "attend_few":
        names |= {"accumulators": "attention_accumulators", "part_pages": "attention_pages"}
        return replace(LATENT if op.facts.get("latent") else FEW, **chosen(names, knobs))
    tiles = replace(MANY, **chosen(names | {"task_rows": "attention_task_rows"}, knobs))
    return replace(tiles, accumulators=tiles.max_rows * BLOCK_PAGES)


def attention(func: tirx.PrimFunc, op: Op, knobs: Knobs) -> tirx.PrimFunc:
    """An attention function with the tiles of the knobs; `func` itself without such knobs."""
    tiles = attention_tiles(op, knobs)
    if tiles == attention_tiles(op, {}):
        return func
    shape = AttentionShape(**heads_of(op))
    scale, window = float(op.facts["scale"]), op.int("window")
    if op.kind == "attend_few":
        return attend_few(shape, scale, window, tiles)
    return attend_many(shape, scale, window, tiles, is_bidirectional(op), sees_ahead(op))


RULES = (NamedRule("cpu.attention", ATTEND, hand_written(attention)),)
