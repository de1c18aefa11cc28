"""Block formats and integers as kernels for GPUs read them: their codes, by the CPU, and the rules that take them."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import tirx
from tvm.script.ir_builder import tirx as I

from mlcpipe.nn import definitions
from mlcpipe.passes.schedule_kernels import first_rule
from mlcpipe.quantization import native_formats
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.targets import load_target
from tests.kernels.harness import compile_together, tensors
from tir_schedules.builder import Buffer, Expr, Tensor, function, put
from tir_schedules.gpu.kernel import pin
from tir_schedules.gpu.matmul.planes import RUN, RUN_STEPS, STEP, Kept, kept_of
from tir_schedules.op import op_of
from tir_schedules.rule import rules_in

K, LAYOUT = 2 * RUN, load_layout("rows32_pairs")
INTEGERS = ("uint4_g64_f16", "affine8_g64_bf16", "int8_row_f32", "fp4_g16_f32")
FORMATS = {**native_formats.SCHEMES, **{name: native_formats.native_scheme(name) for name in INTEGERS}}
OWN_RULES = {"matmul": "matmul", "gated_matmul": "matmul", "expert_matmul": "expert_matmul"}


def _definition(scheme: Scheme, kind: str) -> tirx.PrimFunc:
    if kind == "expert_matmul":
        return definitions.expert_matmul(scheme, LAYOUT, 4, 64, 512, 2, True, "float32")
    if kind == "gated_matmul":
        return definitions.gated_matmul(scheme, LAYOUT, 64, 512, "silu", "float32")
    make = definitions.matmul if kind == "matmul" else definitions.take
    return make(scheme, LAYOUT, 64, 512, "float32")


def _format(name: str) -> Kept:
    op = op_of(_definition(FORMATS[name], "matmul"))
    assert op is not None
    found = kept_of(op)
    assert found is not None
    return found


def _reader(name: str) -> tirx.PrimFunc:
    """Words of a row -> its codes or levels, float32[K]: of a run by a loop, of another without one."""
    of = _format(name)

    def body(words: Buffer, codes: Buffer) -> None:
        def read(step: Expr, run: int) -> None:
            places = [run * of.bits + i for some in of.words(step).values() for i in some]
            joined = of.joined([pin(words[place]) for place in places], step)
            for j in range(STEP):
                at, bit = of.place(j)
                put(codes, run * RUN + step * STEP + j, of.number(joined[at], bit) - I.float32(1 << of.width))

        with I.serial(0, RUN_STEPS) as step:
            read(step, 0)
        for step in range(RUN_STEPS):
            read(step, 1)

    arguments = {"words": Tensor((K * of.bits // 32,), "uint32"), "codes": Tensor((K,), "float32")}
    return function(f"read_{name}", arguments, body)


def test_codes_and_levels_of_every_format() -> None:
    functions = compile_together({name: _reader(name) for name in FORMATS})
    for name, scheme in FORMATS.items():
        codes = np.random.default_rng(7).integers(0, len(scheme.table) or 1 << scheme.bits, (1, K), dtype=np.uint8)
        args = tensors(
            (
                native_formats.pack_codes(codes, scheme.bits, scheme.bits == 8 and not scheme.blocked)[0],
                np.full(K, np.nan, np.float32),
            )
        )
        functions[name](*args)
        of = _format(name)
        expected = np.array(scheme.table)[codes[0]] if scheme.table else codes[0].astype(np.int64) - scheme.zero_point
        np.testing.assert_array_equal((args[1].numpy() - of.zero) * of.unit, expected * scheme.unit, err_msg=name)


@pytest.mark.fast_cases("vulkan-gpu.")
@pytest.mark.parametrize("target, rule", [("vulkan", "gpu."), ("nvidia", "gpu.subgroup_"), ("webgpu", "gpu.")])
def test_no_format_is_left_to_a_slow_rule(target: str, rule: str) -> None:
    for name, scheme in FORMATS.items():
        for kind, own in OWN_RULES.items():
            found = first_rule(rules_in("gpu"), _definition(scheme, kind), load_target(target).schedule)
            assert found[0] == rule + own, f"{name} {kind}"
        found = first_rule(rules_in("gpu"), _definition(scheme, "take"), load_target(target).schedule)
        assert found[0] == "gpu.take", name
