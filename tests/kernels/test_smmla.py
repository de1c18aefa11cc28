"""The inner loops of the kernels for ARM cores with i8mm, as they are compiled: no such core is at hand to time them."""

from __future__ import annotations

import re

import pytest
import tvm

from mlcpipe.targets import load_target
from tests.kernels.cases.cpu.int8 import Int8Matmul
from tests.kernels.qemu import Machine, machine_code

BLOCK = re.compile(r"^\.L\w+:.*\n((?:\t.*\n)+)", re.MULTILINE)


def assembly(kernel: Int8Matmul) -> str:
    """A kernel compiled with the words of the variant that has it."""
    (variant,) = (v for v in load_target("cpu").variants if v.schedule["int8_dot"] == kernel.kind)
    target = Machine(variant.name, variant.arch, "", variant.mcpu, variant.mattr).target()
    mod = tvm.IRModule({"f": kernel.build().with_attr("global_symbol", "f")})
    return str(machine_code(mod, target).inspect_source("asm"))


@pytest.mark.parametrize("scheme", ("q4f16_1", "q8f16_0"))
def test_32_of_k_are_one_block_with_each_sum_scaled_once(scheme: str) -> None:
    blocks = BLOCK.findall(assembly(Int8Matmul("neon_i8mm", scheme, 64, 256, many=True)))
    # 6 rows by 16 columns: 3 pairs of rows times 8 of columns, 4 steps of 8 along K.
    (block,) = (block for block in blocks if block.count("smmla") == 3 * 8 * 4)
    assert [block.count(f"\t{name}\t") for name in ("scvtf", "fmul", "fmla")] == [3 * 8] * 3
    # Beside them 3 + 8 loads a step and a load and a store of each scaled sum; LLVM moves 75 to 90 registers more.
    assert len(block.splitlines()) <= 3 * 8 * (4 + 3 + 2) + 4 * (3 + 8) + 100
