"""The rules for GPUs, in the order in which they are asked. A rule returns a scheduled PrimFunc or `Declined`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm import tirx

from tir_schedules.gpu.attention import OF_MATRICES, OF_SUBGROUPS, attention, of_matrices, of_subgroups
from tir_schedules.gpu.elementwise import elementwise
from tir_schedules.gpu.matmul import expert_matmul, matmul, take
from tir_schedules.gpu.norm import norm
from tir_schedules.gpu.route import moe_route
from tir_schedules.gpu.sampling import SAMPLING, sampling
from tir_schedules.gpu.subgroup_matmul import subgroup_expert_matmul, subgroup_matmul
from tir_schedules.op import Declined, Op, scheduled
from tir_schedules.paged import ATTENTION

Knobs = Mapping[str, int | str]
Rule = Callable[[tirx.PrimFunc, "Op | None", Knobs], "tirx.PrimFunc | Declined"]


def _hand_written(make: Callable[[Op, str, Knobs], tirx.PrimFunc | Declined]) -> Rule:
    """A rule that puts a hand-written kernel in place of a tagged definition; it is told the dtype of the output."""

    def rule(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
        if op is None:
            return Declined("not tagged")
        kernel = make(op, str(func.params[-1].ty.dtype), knobs)
        return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)

    return rule


def _subgroup_attention(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    kernel = Declined("not tagged") if op is None else of_subgroups(op, knobs)
    return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)


def _mma_attention(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    kernel = Declined("not tagged") if op is None else of_matrices(op, knobs)
    return kernel if isinstance(kernel, Declined) else scheduled(kernel, func)


def _attention(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    return Declined("not tagged") if op is None else scheduled(attention(func, op, knobs), func)


def _sampling(func: tirx.PrimFunc, op: Op | None, knobs: Knobs) -> tirx.PrimFunc | Declined:
    return Declined("not tagged") if op is None else scheduled(sampling(func, op, knobs), func)


# Name, the operations that it is for (none: any), rule.
RULES: tuple[tuple[str, tuple[str, ...], Rule], ...] = (
    ("gpu.subgroup_matmul", ("matmul", "gated_matmul"), _hand_written(subgroup_matmul)),
    ("gpu.subgroup_expert_matmul", ("expert_matmul",), _hand_written(subgroup_expert_matmul)),
    ("gpu.matmul", ("matmul", "gated_matmul"), _hand_written(matmul)),
    ("gpu.take", ("take",), _hand_written(take)),
    ("gpu.expert_matmul", ("expert_matmul",), _hand_written(expert_matmul)),
    ("gpu.subgroup_attention", OF_SUBGROUPS, _subgroup_attention),
    ("gpu.mma_attention", OF_MATRICES, _mma_attention),
    ("gpu.attention", ATTENTION, _attention),
    ("gpu.sampling", tuple(SAMPLING), _sampling),
    ("gpu.norm", ("rms_norm", "add_rms_norm"), _hand_written(norm)),
    ("gpu.moe_route", ("moe_route",), _hand_written(moe_route)),
    ("gpu.elementwise", (), elementwise),
)
