"""The rules for GPUs, in the order in which they are asked. A rule returns a scheduled PrimFunc or `Declined`.

`subgroup` and `mma` are knobs of a target's [schedule]; without `subgroup` its size is unknown.

gpu.subgroup_matmul         `subgroup` is set and k is whole quantization groups of whole 8 columns. Few rows
                            by GEMV; many by GEMM on `mma` (int4 and int8 groups of 32, or plain float16), else on
                            cooperative matrices (`matrix_rows`, float16, k a multiple of 32), else in registers.
gpu.subgroup_expert_matmul  As above for experts; many rows go to `mma` or stay GEMV.
gpu.matmul                  Every other matmul in layout rows32_pairs.
gpu.take                    Rows of an embedding table in layout rows32_pairs.
gpu.expert_matmul           Experts where `subgroup` is not set, or the weight does not fit.
gpu.subgroup_attention      Decode: `subgroup` is set and head_dim is a multiple of 8.
gpu.mma_attention           Prompts over own pages: `mma` and `subgroup` = 32, float16, head_dim a multiple of 16.
gpu.attention               All other attention; keeps the function as written unless knobs change its tile.
gpu.sampling                MLC's softmax, sort and top-p; keeps the function unless knobs change it.
gpu.norm, gpu.moe_route     Always.
gpu.elementwise             Functions without a tag, and definitions that no rule above took.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from tir_schedules.gpu.attention.functions import (
    DECODE_KINDS,
    PREFILL_KINDS,
    attention,
    mma_attention,
    subgroup_attention,
)
from tir_schedules.gpu.elementwise import elementwise
from tir_schedules.gpu.matmul.experts import expert_matmul
from tir_schedules.gpu.matmul.subgroup import subgroup_expert_matmul, subgroup_matmul
from tir_schedules.gpu.matmul.take import take
from tir_schedules.gpu.matmul.tiled import matmul
from tir_schedules.gpu.norm import norm
from tir_schedules.gpu.route import moe_route
from tir_schedules.gpu.sampling.mlc_contract import SAMPLING, sampling
from tir_schedules.op import Op
from tir_schedules.rule import Declined, Knobs, Rule, Rules, hand_written


def _with_dtype(make: Callable[[Op, str, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """The rule of a kernel whose maker takes the dtype of its output."""
    return hand_written(lambda func, op, knobs: make(op, str(func.params[-1].ty.dtype), knobs))


RULES: Rules = (
    ("gpu.subgroup_matmul", ("matmul", "gated_matmul"), _with_dtype(subgroup_matmul)),
    ("gpu.subgroup_expert_matmul", ("expert_matmul",), _with_dtype(subgroup_expert_matmul)),
    ("gpu.matmul", ("matmul", "gated_matmul"), _with_dtype(matmul)),
    ("gpu.take", ("take",), _with_dtype(take)),
    ("gpu.expert_matmul", ("expert_matmul",), _with_dtype(expert_matmul)),
    ("gpu.subgroup_attention", DECODE_KINDS, hand_written(lambda _, op, knobs: subgroup_attention(op, knobs))),
    ("gpu.mma_attention", ("attend_many",), hand_written(lambda _, op, knobs: mma_attention(op, knobs))),
    ("gpu.attention", (*DECODE_KINDS, *PREFILL_KINDS), hand_written(attention)),
    ("gpu.sampling", tuple(SAMPLING), hand_written(sampling)),
    ("gpu.norm", ("rms_norm", "add_rms_norm"), _with_dtype(norm)),
    ("gpu.moe_route", ("moe_route",), _with_dtype(moe_route)),
    ("gpu.elementwise", (), elementwise),
)
