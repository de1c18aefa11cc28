"""Random expressions, alone and in vectors: numpy's numbers to the bit. A failure names the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tests.spirv import harness
from tests.spirv.expressions import DTYPES, Generator, Node, inputs
from tir_schedules.builder import Tensor, function
from tir_schedules.gpu.kernel import launch

SIZE = 256
SEEDS = range(48)
_BATCH = 24
_DEPTH = 3
_LANES = (1, 1, 2, 4, 8)


def _function(seed: int) -> tuple[tirx.PrimFunc, Node]:
    """A kernel that computes an expression, its elements in vectors for some seeds, and the expression."""
    dtype, lanes = DTYPES[seed % len(DTYPES)], _LANES[seed % len(_LANES)]
    made: list[Node] = []

    def body(*arguments: Any) -> None:
        *buffers, output = arguments
        with launch(32, SIZE // 32 // lanes) as (bx, _, tx), I.vectorized(0, lanes) as lane:
            index = (bx * 32 + tx) * lanes + lane
            made.append(Generator(seed, buffers, index, SIZE, lanes > 1).expression(dtype, _DEPTH))
            I.buffer_store(output, made[-1].expr, [index])

    arguments = {f"x{i}": Tensor((SIZE,), one) for i, one in enumerate(DTYPES)}
    func = function("main", {**arguments, "y": Tensor((SIZE,), dtype)}, body)
    return func.with_attr("global_symbol", f"seed{seed}"), made[-1]


@pytest.mark.parametrize("first", SEEDS[::_BATCH])
def test_numbers_are_those_of_numpy(first: int, device: None) -> None:
    harness.build.register()
    made = {seed: _function(seed) for seed in range(first, first + _BATCH)}
    functions = {f"seed{seed}": func for seed, (func, _) in made.items()}
    compiled = tvm.compile(tvm.IRModule(functions), target=harness.TARGET)
    target = tvm.device("vulkan", 0)
    arrays = inputs(SIZE, 1)
    tensors = [tvm.runtime.tensor(a, target) for a in arrays]
    for seed, (_, node) in made.items():
        expected = np.broadcast_to(node.numbers(arrays), (SIZE,))
        assert node.low <= expected.min() and expected.max() <= node.high, f"the generator, seed {seed}"
        output = tvm.runtime.tensor(np.zeros(SIZE, node.dtype), target)
        compiled[f"seed{seed}"](*tensors, output)
        np.testing.assert_array_equal(output.numpy(), expected.astype(node.dtype), err_msg=f"seed {seed}")
