"""Products with the matrix of each head against numpy; a row has the same bits whichever rows are beside it."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.nn import definitions
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import load_scheme
from tests.kernels.harness import Array, compile_together, tensors
from tir_schedules.cpu.head_matmul import head_matmul
from tir_schedules.op import op_of
from tir_schedules.rule import Declined

HEADS, COLUMNS = 3, 72


@pytest.mark.parametrize("scheme", ["q4f16_1", pytest.param("q0f16", marks=pytest.mark.full)])
@pytest.mark.parametrize(("n", "k"), [(80, 72), pytest.param(16, 40, marks=pytest.mark.full)])
def test_head_matmul_is_numpy(scheme: str, n: int, k: int) -> None:
    how, layout, draw = load_scheme(scheme), load_layout("rows16"), np.random.default_rng(n)
    packed = pack(how, draw.standard_normal((HEADS * n, k)).astype(np.float32), name="w", method="rtn")
    weight = unpack(how, packed, k).reshape(HEADS, n, k).astype(np.float64)
    definition = definitions.head_matmul(how, layout, HEADS, n, k, COLUMNS, "float32")
    kernel = head_matmul(op_of(definition))
    assert not isinstance(kernel, Declined)
    run = compile_together({"head_matmul": kernel})["head_matmul"]
    x = draw.standard_normal((19, HEADS, COLUMNS)).astype(np.float32)

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
    np.testing.assert_allclose(whole, np.einsum("mhk,hnk->mhn", x[..., :k], weight), atol=3e-5)
    for rows in (slice(0, 1), slice(4, 7), slice(10, 19)):
        np.testing.assert_array_equal(product(x[rows]), whole[rows])


def test_other_rows_than_whole_blocks_are_declined() -> None:
    definition = definitions.head_matmul(load_scheme("q0f32"), load_layout("rows16"), HEADS, 24, 32, COLUMNS, "float32")
    assert isinstance(head_matmul(op_of(definition)), Declined)
