"""What can be tuned in the kernels for GPUs, by the rule that makes them.

Every choice keeps to what all targets grant: 8 rows of 32 invocations with 16 sums each are 256 invocations and 16 KiB
of shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tir_schedules.gpu.matmul import HEAD
from tir_schedules.op import Op
from tir_schedules.space import Choice, Knobs, Space

MANY_ROWS = 128  # of x, that prompts are measured with
_MOST_SUMS = 128  # of an invocation: more are in memory on any device
_GEMV: Mapping[str, tuple[int, ...]] = {
    "gemv_blocks": (1, 2, 4, 8, 16),
    "gemv_invocations": (1, 1024, 4096, 16384, 65536),
}
_WORDS: Mapping[str, tuple[int, ...]] = {"gemv_words": (8, 16, 32, 64, 128)}
_GEMM: Mapping[str, tuple[int, ...]] = {"gemm_rows": (1, 2, 4, 8, 16), "gemm_blocks": (1, 2, 4, 8, 16, 32)}


def _matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """One row; many rows where the kernel has a GEMM for them."""
    return _gemv_and_gemm(op, {**_GEMV, **_WORDS}, knobs)


def _subgroup_matmul(op: Op, knobs: Knobs) -> tuple[Space, ...]:
    """The same; what an invocation has at least is not to choose."""
    return _gemv_and_gemm(op, _GEMV, knobs)


def _gemv_and_gemm(op: Op, gemv: Mapping[str, tuple[int, ...]], knobs: Knobs) -> tuple[Space, ...]:
    one = _space("gemv", 1, gemv, knobs)
    head = op.kind == "matmul" and op.int("n") >= HEAD * op.int("k")
    return (one,) if head else (one, _space("gemm", MANY_ROWS, _GEMM, knobs))


def _space(bucket: str, rows: int, values: Mapping[str, tuple[int, ...]], knobs: Knobs) -> Space:
    default = {name: int(knobs[name]) for name in values}
    allowed = {name: tuple(sorted({*choices, default[name]})) for name, choices in values.items()}
    now = default.get("gemm_rows", 1) * default.get("gemm_blocks", 1)

    def problem(choice: Choice) -> str:
        sums, most = choice.get("gemm_rows", 1) * choice.get("gemm_blocks", 1), max(now, _MOST_SUMS)
        return f"{sums} sums of an invocation are more than {most}" if sums > most else ""

    return Space(bucket, rows, bucket, allowed, default, problem)


SPACES: Mapping[str, Callable[[Op, Knobs], tuple[Space, ...]]] = {
    "gpu.matmul": _matmul,
    "gpu.subgroup_matmul": _subgroup_matmul,
}
