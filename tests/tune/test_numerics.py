"""Whatever a space allows computes what numpy does: the corners of each space, and a few choices in between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from tests.kernels.attention_cases import CacheKernel, cached_call, chunk_call, decode_call
from tests.kernels.harness import Call, assert_outputs, compile_together
from tests.kernels.int8_cases import HERE, Int8Matmul, int8_call, knobs_of
from tests.kernels.matmul_cases import Matmul, matmul_call
from tir_schedules.cpu.attention import AttentionShape, attention
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.rules import RULES
from tir_schedules.cpu.spaces import SPACES
from tir_schedules.op import op_of
from tir_schedules.space import Space

pytestmark = pytest.mark.skipif(not HERE, reason="this CPU has no integer dot product that kernels know")
ROWS = {"gemv": (1,), "few": (2, 13, 33), "gemm": (64, 97)}
KERNEL = Int8Matmul(HERE[0] if HERE else "", "q4f16_1", 97, 1280)
FLOAT = Matmul("q4f16_1", 97, 100)


COUNT = 2


def chosen(space: Space) -> list[dict[str, int]]:
    """The last of the choices, which is large, and one more."""
    every = list(space.choices())
    return [every[-1], random.Random(space.bucket).choice(every)]


@cache
def spaces() -> Mapping[str, Space]:
    return {space.bucket: space for space in SPACES["cpu.int8_matmul"](KERNEL.op, knobs_of(KERNEL.kind))}


@cache
def functions() -> Mapping[str, Any]:
    made = {}
    for index in range(COUNT):  # the choice of each range of rows in one kernel, as records put them
        knobs = knobs_of(KERNEL.kind)
        for space in spaces().values():
            knobs |= chosen(space)[index]
        made[f"f{index}"] = int8_matmul(KERNEL.op, knobs)
    return compile_together(made)


@pytest.mark.parametrize("bucket", ROWS)
def test_choices_of_the_integer_kernels_are_within_numpys_bounds(bucket: str) -> None:
    if bucket not in spaces():
        pytest.skip(f"the kernel of {KERNEL.kind} has nothing to choose for {bucket}")
    for index in range(COUNT):
        for m in ROWS[bucket]:
            assert_outputs(functions()[f"f{index}"], int8_call(KERNEL, m, "normal"))


def test_choices_of_the_float_kernel_are_within_numpys_bounds() -> None:
    definition = FLOAT.definition()
    op, rule = op_of(definition), {name: make for name, _, make in RULES}["cpu.matmul"]
    assert op is not None
    knobs = {"gemm_rows": 12, "gemm_blocks": 2, "gemm_depth": 256, "lanes": 16}
    (space,) = SPACES["cpu.matmul"](op, knobs)
    made = {f"f{i}": rule(definition, op, {**knobs, **choice}) for i, choice in enumerate(chosen(space))}
    for function in compile_together(made).values():
        for m in (1, 5, 33):
            assert_outputs(function, matmul_call(FLOAT, m, "normal"))


HEADS = (AttentionShape(14, 2, 32, "float16", sliding_window=40), AttentionShape(4, 2, 64, "q8"))
# Parts of one page of 4 or more, the last of them short; chunks that end within a tile of queries.
ATTENTION = {
    "decode": lambda s: decode_call(s, False, [300, 1, 64]),
    "decode_sliding": lambda s: decode_call(s, True, [300, 40, 7]),
    "prefill_chunk": lambda s: chunk_call(s, [7, 90]),
    "prefill_cached": lambda s: cached_call(s, False, [70, 16], [33, 5]),
}


@cache
def attention_functions() -> Mapping[str, Any]:
    made = {}
    for index, shape in enumerate(HEADS):
        for role in ATTENTION:
            if role == "decode_sliding" and not shape.sliding_window:
                continue
            func = CacheKernel(shape, role).build()
            op = op_of(func)
            assert op is not None
            (space,) = SPACES["cpu.attention"](op, {})
            made[f"{role}_{index}"] = attention(func, op, chosen(space)[index])
    return compile_together(made)


@pytest.mark.parametrize("role", ATTENTION)
def test_choices_of_attention_are_within_numpys_bounds(role: str) -> None:
    make: Callable[[AttentionShape], Call] = ATTENTION[role]
    for index, shape in enumerate(HEADS):
        function = attention_functions().get(f"{role}_{index}")
        if function is not None:
            assert_outputs(function, make(shape))
