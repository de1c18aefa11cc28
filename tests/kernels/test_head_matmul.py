"""Products with the matrix of each head against numpy; a row has the same bits whichever rows are beside it."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import load_scheme
from tests.kernels.cases.cpu.int8 import HERE, knobs_of, quantized
from tests.kernels.cases.cpu.matmul import scheme_named
from tests.kernels.harness import Array, compile_together, tensors
from tir_schedules.cpu.head_matmul import head_matmul
from tir_schedules.cpu.int8_head_matmul import int8_head_matmul
from tir_schedules.op import op_of
from tir_schedules.rule import Declined

HEADS, COLUMNS = 3, 72


CASES = [("q4f16_1", 80, 72, False), ("q4f16_1", 80, 72, True)]
MORE = [("q0f16", 80, 72, False), ("q0f16", 16, 40, False), ("q4f16_1", 16, 40, False), ("q8f16_1", 16, 40, True),
        ("Q4_K", 32, 256, True)]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "n", "k", "integers"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_head_matmul_is_numpy(scheme: str, n: int, k: int, integers: bool) -> None:
    """`integers`: x is rounded to int8, as the kernel for integer dot products sees it."""
    if integers and not HERE:
        pytest.skip("this CPU has no integer dot product that kernels know")
    how, layout, draw = scheme_named(scheme), load_layout("rows16"), np.random.default_rng(n)
    columns = max(COLUMNS, k)
    packed = pack(how, draw.standard_normal((HEADS * n, k)).astype(np.float32), name="w", method="rtn")
    weight = unpack(how, packed, k).reshape(HEADS, n, k).astype(np.float64)
    op = op_of(definitions.head_matmul(how, layout, HEADS, n, k, columns, "float32"))
    assert op is not None
    kernel = int8_head_matmul(op, knobs_of(HERE[0])) if integers else head_matmul(op)
    assert not isinstance(kernel, Declined)
    run = compile_together({"head_matmul": kernel})["head_matmul"]
    x = draw.standard_normal((19, HEADS, columns)).astype(np.float32)
    seen = quantized(x[..., :k]) if integers else x[..., :k]

    def product(rows: Array) -> Array:
        values = tensors(
            (
                rows,
                *layout.repack(how, packed, HEADS * n, k).values(),
                np.full((len(rows), HEADS, n), np.nan, np.float32),
            )
        )
        run(*values)
        return values[-1].numpy()

    whole = product(x)
    np.testing.assert_allclose(whole, np.einsum("mhk,hnk->mhn", seen, weight), atol=3e-5)
    for rows in (slice(0, 1), slice(4, 7), slice(10, 19)):
        np.testing.assert_array_equal(product(x[rows]), whole[rows])


def test_other_rows_than_whole_blocks_are_declined() -> None:
    definition = definitions.head_matmul(load_scheme("q0f32"), load_layout("rows16"), HEADS, 24, 32, COLUMNS, "float32")
    assert isinstance(head_matmul(op_of(definition)), Declined)
