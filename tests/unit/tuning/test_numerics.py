"""Whatever a space allows computes what numpy does: the corners of each space, and a few choices in between."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from tests.kernels.cases.cpu.int8 import HERE, Int8Matmul, int8_call, knobs_of
from tests.kernels.cases.cpu.matmul import Matmul, matmul_call
from tests.kernels.cases.cpu.page_attention import PageKernel, attend_call
from tests.kernels.harness import assert_outputs, compile_together
from tir_schedules.cpu.attention import AttentionShape, attention
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.spaces import SPACES
from tir_schedules.op import op_of
from tir_schedules.rule import rules_in
from tir_schedules.space import Space

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HERE, reason="this CPU has no integer dot product that kernels know"),
]
ROWS = {"gemv": (1,), "few": (2, 13, 33), "gemm": (1, 64, 97)}
FEW, MANY = (Int8Matmul(HERE[0] if HERE else "", "q4f16_1", 97, 1280, many=many) for many in (False, True))
FLOAT = Matmul("q4f16_1", 97, 100)


COUNT = 2


def chosen(space: Space) -> list[dict[str, int]]:
    """The last of the choices, which is large, and one more."""
    every = list(space.choices())
    return [every[-1], random.Random(space.bucket).choice(every)]


@cache
def spaces(kernel: Int8Matmul) -> Mapping[str, Space]:
    return {space.bucket: space for space in SPACES["cpu.int8_matmul"](kernel.op, knobs_of(kernel.kind))}


@cache
def functions(kernel: Int8Matmul) -> Mapping[str, Any]:
    made = {}
    for index in range(COUNT):  # the choice of each range of rows in one kernel, as records put them
        knobs = knobs_of(kernel.kind)
        for space in spaces(kernel).values():
            knobs |= chosen(space)[index]
        made[f"f{index}"] = int8_matmul(kernel.op, knobs)
    return compile_together(made)


@pytest.mark.parametrize("bucket", ROWS)
def test_choices_of_the_integer_kernels_are_within_numpys_bounds(bucket: str) -> None:
    kernel = MANY if bucket == "gemm" else FEW
    if bucket not in spaces(kernel):
        pytest.skip(f"the kernel of {kernel.kind} has nothing to choose for {bucket}")
    for index in range(COUNT):
        for m in ROWS[bucket]:
            assert_outputs(functions(kernel)[f"f{index}"], int8_call(kernel, m, "normal"))


def test_choices_of_the_float_kernel_are_within_numpys_bounds() -> None:
    definition = FLOAT.definition()
    op, rule = op_of(definition), {one.name: one.rule for one in rules_in("cpu")}["cpu.matmul"]
    assert op is not None
    knobs = {"gemm_rows": 12, "gemm_blocks": 2, "gemm_depth": 256, "lanes": 16}
    (space,) = SPACES["cpu.matmul"](op, knobs)
    made = {f"f{i}": rule(definition, op, {**knobs, **choice}) for i, choice in enumerate(chosen(space))}
    for function in compile_together(made).values():
        for m in (1, 5, 33):
            assert_outputs(function, matmul_call(FLOAT, m, "normal"))


HEADS = (AttentionShape(14, 2, 32, "float16", sliding_window=40), AttentionShape(4, 2, 64, "q8"))
# Parts of one page of 4 or more, the last of them short; prompts that end within a tile of queries.
ATTENTION = {"attend_few": [(297, 300), (0, 1), (63, 64)], "attend_many": [(0, 90), (70, 103), (16, 21)]}


@cache
def attention_functions() -> Mapping[str, Any]:
    made = {}
    for index, shape in enumerate(HEADS):
        for role in ATTENTION:
            func = PageKernel(shape, role, shape.sliding_window).build()
            op = op_of(func)
            assert op is not None
            (space,) = SPACES["cpu.attention"](op, {})
            made[f"{role}_{index}"] = attention(func, op, chosen(space)[index])
    return compile_together(made)


@pytest.mark.parametrize("role", ATTENTION)
def test_choices_of_attention_are_within_numpys_bounds(role: str) -> None:
    for index, shape in enumerate(HEADS):
        call = attend_call(PageKernel(shape, role, shape.sliding_window), ATTENTION[role])
        assert_outputs(attention_functions()[f"{role}_{index}"], call)
