"""Activations in int8: what is lost, what is not hidden, and what the rule declines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import sym, tirx

from mlcpipe.nn import definitions
from mlcpipe.quantization import native_formats
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.packing import unpack
from mlcpipe.quantization.scheme import load_scheme
from tests.kernels.cases.cpu.int8 import HERE, Int8Matmul, knobs_of, quantized
from tests.kernels.cases.cpu.matmul import LAYOUT, Matmul, packed, scheme_named
from tests.kernels.harness import adversarial, compile_together, tensors, unwritten
from tir_schedules.adapter_shape import AdapterShape
from tir_schedules.cpu.adapted_matmul import adapted_matmul
from tir_schedules.cpu.int8_activations import panel_row, whole_panels
from tir_schedules.cpu.int8_matmul import int8_matmul
from tir_schedules.cpu.int8_unpacked import GROUP
from tir_schedules.op import op_of
from tir_schedules.rule import Declined

pytestmark = pytest.mark.skipif(not HERE, reason="this CPU has no integer dot product that kernels know")


@pytest.mark.parametrize("kind", ("normal", "outlier", "zeros"))
def test_an_activation_is_off_by_half_a_step_of_its_group(kind: str) -> None:
    x = adversarial(kind, (7, 320), np.random.default_rng(3))
    step = np.abs(x).reshape(7, -1, GROUP).max(-1) / 127
    assert (np.abs(quantized(x) - x) <= np.repeat(step, GROUP, -1) * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("scheme", ("q4f16_1", "Q4_K"))
def test_a_prompt_is_as_exact_as_decode(scheme: str) -> None:
    """Against float64 arithmetic with the same weights, also where four channels are 20 or 100 times as large."""
    n, k, m = 32, 1024, 12
    kernels = {str(many): Int8Matmul(HERE[0], scheme, n, k, many=many).build() for many in (False, True)}
    functions, (arrays, w, _) = compile_together(kernels), packed(scheme, (n, k), "normal")
    random = np.random.default_rng(5)
    for factor in (1, 20, 100):
        x = random.standard_normal((m, k)).astype(np.float32)
        x[:, random.choice(k, 4, replace=False)] *= factor
        square = {}
        for name, function in functions.items():
            args = tensors((x, *arrays, unwritten((m, n))))
            function(*args)
            square[name] = np.square(args[-1].numpy() - x.astype(np.float64) @ w.T).mean()
        assert 0 < square["True"] <= 1.3 * square["False"]


@pytest.fixture(scope="module")
def kernel() -> Any:
    which = Int8Matmul(HERE[0], "q4f16_1", 40, 96)
    return compile_together({"f": which.build()})["f"]


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("m", (1, 9))
def test_what_is_not_a_number_shows_in_its_row_only(kernel: Any, bad: float, m: int) -> None:
    arrays, w, _ = packed("q4f16_1", (40, 96), "normal")
    x = adversarial("normal", (m, 96), np.random.default_rng(5))
    x[m - 1, 50] = bad
    args = tensors((x, *arrays, unwritten((m, 40))))
    kernel(*args)
    y = args[-1].numpy()
    assert np.isnan(y[m - 1]).all()
    np.testing.assert_allclose(y[: m - 1], quantized(x[: m - 1]) @ w.T, atol=1e-5)


@pytest.mark.parametrize("rows, tail_rows", ((6, 4), (3, 2), (5, 5), (1, 1)))
def test_panels_cover_every_row_once(rows: int, tail_rows: int) -> None:
    simplify = sym.Analyzer().simplify
    for m in range(2, 60):
        whole = int(simplify(whole_panels(tirx.const(m, "int64"), rows, tail_rows)))
        tail = -(-max(m - whole * rows, 0) // tail_rows)
        assert whole >= 0
        assert whole + tail <= -(-m // tail_rows)  # panels that are allocated
        sizes = [rows] * whole + [tail_rows] * tail
        starts = [int(simplify(panel_row(tirx.const(p, "int64"), tirx.const(whole, "int64"), rows, tail_rows)))
                  for p in range(whole + tail)]  # fmt: skip
        assert starts == [sum(sizes[:p]) for p in range(len(sizes))]
        assert m <= sum(sizes) <= m + (1 if (rows, tail_rows) == (6, 4) and m >= 8 else rows)


def declined(scheme: str, layout: str = "rows16", **knobs: int | str) -> str:
    op = op_of(definitions.matmul(load_scheme(scheme), load_layout(layout), 32, 64, "float32"))
    assert op is not None
    answer = int8_matmul(op, knobs_of(HERE[0]) | knobs)
    assert isinstance(answer, Declined)
    return answer.reason


def test_the_rule_says_why_it_does_not_apply() -> None:
    assert declined("q4f16_1", int8_dot="none") == "no integer dot product"
    assert declined("q4f16_1", int8_activations=0) == "activations stay float32"
    assert declined("q3f16_1") == "3-bit codes, 10 a word"
    assert declined("q0f16") == "0-bit codes, 0 a word"
    assert "layout row" in declined("q4f16_1", "row")


@pytest.mark.parametrize(("scheme", "fused"), [("q4f16_1", True), ("int4_row_f16", False)])
def test_adapters_go_into_products_whose_scales_are_not_of_whole_rows(scheme: str, fused: bool) -> None:
    product = op_of(Matmul(scheme, 64, 128).definition())
    assert product is not None
    assert (adapted_matmul(product, AdapterShape(128, (64,), "uint8")) is not None) == fused


@pytest.mark.skipif("avx2" not in HERE, reason="sums in int16 are those of AVX2, which this CPU lacks")
@pytest.mark.parametrize("name", ("q4f16_1", "TQ2_0", "Q2_K", "Q3_K", "Q5_0", "Q6_K", "MXFP4", "IQ1_S", "IQ4_NL"))
def test_sums_of_the_largest_products_fit(name: str) -> None:
    """Every code is that of the largest level, every x is 127 steps."""
    n, k = 16, 512
    scheme = scheme_named(name)
    code = int(np.argmax(scheme.table or range(1 << scheme.bits)))
    rows = {name: np.ones(shape, dtype) for name, (shape, dtype) in scheme.shapes(n, k).items()}
    rows["q_weight"] = native_formats.pack_codes(np.full((n, k), code, np.uint8), scheme.bits)
    x = np.ones((3, k), np.float32)
    stored = load_layout(LAYOUT).repack(scheme, rows, n, k).values()
    kernel = compile_together({"f": Int8Matmul("avx2", name, n, k).build()})["f"]
    expected = quantized(x) @ unpack(scheme, rows, k).astype(np.float64).T
    for m in (1, 3):
        args = tensors((x[:m], *stored, unwritten((m, n))))
        kernel(*args)
        np.testing.assert_allclose(args[-1].numpy(), expected[:m], rtol=1e-5)
