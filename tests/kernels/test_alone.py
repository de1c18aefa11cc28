"""A row's numbers are the same alone and beside others: its arithmetic follows its kind, not how many rows there are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.kernels.cases.cpu.alone import Experts, Product, assert_rows_are_as_alone
from tests.kernels.cases.cpu.int8 import HERE, Int8ExpertMatmul, Int8Matmul
from tests.kernels.cases.cpu.matmul import ExpertMatmul, Matmul
from tests.kernels.harness import Array, compile_together, tensors

# More of K than is unpacked at a time; columns that end in a block.
SHAPES = (("q4f16_1", 40, 1280, ""), ("Q4_K", 48, 768, ""), ("Q6_K", 48, 768, ""), ("q4f16_1", 96, 640, "silu"), ("q4f16_1", 17, 96, ""), ("q8f16_1", 33, 640, ""),
          ("q8f16_0", 33, 640, ""), ("q8f16_0", 17, 96, "silu"))  # fmt: skip
FLOAT = (("q0f16", 33, 2100, ""), ("Q4_K", 48, 768, ""), ("q0f32", 17, 33, ""), ("q4f16_1", 97, 600, ""), ("q4f16_1", 40, 640, "silu"),
         ("q3f16_1", 40, 600, "silu"), ("q8f16_0", 33, 600, ""))  # fmt: skip
EXPERTS = (33, 128, 4, 2)
# Few rows on a CPU with AMX have the code of avx512_vnni, and AVX-VNNI differs from AVX2 by one instruction: a shape of
# each, the others in `make test-everything` alone.
INTEGERS = [Int8Matmul(dot, *shape, many) for dot, shape, many in product(HERE, SHAPES, (False, True))]
SELDOM = {
    one
    for one in INTEGERS
    if (one.scheme, one.n) != SHAPES[0][:2] and (one.kind == "avx_vnni" or (one.kind == "amx_int8" and not one.many))
}
KERNELS: tuple[Product | Experts, ...] = (
    *INTEGERS,
    *(Matmul(*shape, many) for shape, many in product(FLOAT, (False, True))),
    *(Int8ExpertMatmul(HERE[0], "q4f16_1", *EXPERTS, shared) for shared in (False, True) if HERE),
    *(ExpertMatmul(scheme, *EXPERTS, shared) for scheme, shared in (("q4f16_1", True), ("q0f16", False))),
)
FAST = [kernel.symbol for kernel in KERNELS if kernel.scheme == "q4f16_1" and kernel.k == SHAPES[0][2]][:2]


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(one, marks=pytest.mark.everything if one in SELDOM else ()) for one in KERNELS],
    ids=lambda kernel: kernel.symbol,
)
@pytest.mark.fast_cases(*FAST, "matmul_q0f32_17_33", "matmul_q0f32_17_33_many")
def test_a_row_has_the_bits_that_it_has_alone(kernel: Product | Experts) -> None:
    function = compile_together({"f": kernel.build()})["f"]

    def run(calls: Sequence[tuple[Array, ...]]) -> list[Any]:
        found = []
        for call in calls:
            args = tensors(call)
            function(*args)
            found.append(args[-1].numpy())
        return found

    assert_rows_are_as_alone(kernel, run)
