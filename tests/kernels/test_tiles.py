"""Register tiles other than the target's: a board's own file may choose them."""

from __future__ import annotations

from itertools import product

import pytest
from tvm import tirx

from tests.kernels.cases.cpu.matmul import Matmul, matmul_call
from tests.kernels.harness import assert_outputs, compile_together
from tir_schedules.cpu.matmul import Tile, matmul
from tir_schedules.op import op_of
from tir_schedules.rule import Declined

TILES = (Tile(4, 1, 32), Tile(8, 3, 48), Tile(16, 1, 1), Tile(12, 4, 4096))
SIZES = (("q4f16_1", 97, 100), ("q3f16_1", 40, 100), ("q0f16", 97, 100))
KERNELS = tuple(Matmul(*size, many=many) for size, many in product(SIZES, (False, True)))


def kernel(which: Matmul, tile: Tile) -> tirx.PrimFunc | Declined:
    op = op_of(which.definition())
    assert op is not None
    return matmul(op, tile)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("which", KERNELS, ids=lambda k: k.symbol)
@pytest.mark.fast_cases(f"{KERNELS[0].symbol}-{TILES[0]}", f"{KERNELS[-1].symbol}-{TILES[1]}")
def test_any_tile_is_numpy(which: Matmul, tile: Tile) -> None:
    function = compile_together({"f": kernel(which, tile)})["f"]
    for m in (1, 2, 5, 12, 16, 33):
        assert_outputs(function, matmul_call(which, m, "normal"))


def test_a_tile_that_would_read_past_its_panel_is_declined() -> None:
    answer = kernel(KERNELS[0], Tile(6, 2, 256))
    assert answer == Declined("a register tile of 6 rows is not a multiple of 4")
