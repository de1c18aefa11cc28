"""The inner loops of the kernels for ARM cores with i8mm, as they are compiled: no such core is at hand to time them."""

from __future__ import annotations

import re

import pytest
import tvm

from mlcpipe.targets import load_target
from tests.kernels.cases.cpu.int8 import Int8Matmul
from tests.kernels.qemu import Machine, machine_code

LOOP = re.compile(r"^(\.L\w+):.*\n((?:\t(?!b\.).*\n)+)\tb\.\w+\t\1$", re.MULTILINE)


def assembly(kernel: Int8Matmul) -> str:
    """A kernel compiled with the words of the variant that has it."""
    (variant,) = (v for v in load_target("cpu").variants if v.schedule["int8_dot"] == kernel.kind)
    target = Machine(variant.name, variant.arch, "", variant.mcpu, variant.mattr).target()
    mod = tvm.IRModule({"f": kernel.build().with_attr("global_symbol", "f")})
    return str(machine_code(mod, target).inspect_source("asm"))


@pytest.mark.parametrize("scheme", ("q4f16_1", "q8f16_0"))
def test_a_step_loads_both_factors_once_and_spills_nothing(scheme: str) -> None:
    # Spans of 128; those of 32 are one block of code with their scaling.
    loops = [
        body
        for _, body in LOOP.findall(assembly(Int8Matmul("neon_i8mm", scheme, 64, 256, many=True)))
        if "smmla" in body
    ]
    found = set()
    for body in loops:
        loads = [line for line in body.splitlines() if re.match(r"\tld[rp]\t", line)]
        assert "[sp" not in body
        assert len(body.splitlines()) <= body.count("smmla") + len(loads) + 4  # two pointers, a count, its comparison
        found.add((body.count("smmla"), sum(len(re.findall(r"\bq\d+", line)) for line in loads)))
    # 6 or 4 rows by 16 columns: pairs of rows times pairs of columns, and a register of each pair.
    assert found == {(3 * 8, 3 + 8), (2 * 8, 2 + 8)}
