"""Register tiles other than the target's: a board's own file may choose them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from tvm import tirx

from tir_schedules.cpu.matmul import Tile, matmul
from tir_schedules.op import Declined, op_of

from .harness import assert_outputs, compile_together
from .matmul_cases import Matmul, matmul_call

TILES = (Tile(4, 1, 32), Tile(8, 3, 48), Tile(16, 1, 1), Tile(12, 4, 4096))
KERNELS = (Matmul("q4f16_1", 97, 100), Matmul("q3f16_1", 40, 100), Matmul("q0f16", 97, 100))


def kernel(which: Matmul, tile: Tile) -> tirx.PrimFunc | Declined:
    op = op_of(which.definition())
    assert op is not None
    return matmul(op, tile)


def symbol(which: Matmul, tile: Tile) -> str:
    return f"{which.symbol}_{tile.rows}_{tile.blocks}_{tile.depth}"


@cache
def functions() -> Mapping[str, Any]:
    return compile_together({symbol(k, tile): kernel(k, tile) for k in KERNELS for tile in TILES})


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("which", KERNELS, ids=lambda k: k.symbol)
def test_any_tile_is_numpy(which: Matmul, tile: Tile) -> None:
    for m in (1, 2, 5, 12, 16, 33):
        assert_outputs(functions()[symbol(which, tile)], matmul_call(which, m, "normal"))


def test_a_tile_that_would_read_past_its_panel_is_declined() -> None:
    answer = kernel(KERNELS[0], Tile(6, 2, 256))
    assert answer == Declined("a register tile of 6 rows is not a multiple of 4")
