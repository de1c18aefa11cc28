from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from numpy.typing import NDArray
from tvm import te, tirx

from mlcpipe.errors import CompileError
from mlcpipe.quantization import load_layout, load_scheme
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.te import decode_code, dequantize_element
from tests.unit.quantization.reference import GROUPED, KINDS, PLAIN, group_of, make_weight

Array = NDArray[Any]


def compiled(inputs: list[te.Tensor], output: te.Tensor) -> Callable[..., Array]:
    """inputs -> output, compiled for this CPU."""
    shape = tuple(int(extent) for extent in output.shape)
    module = tvm.compile(te.create_prim_func([*inputs, output]), target="llvm")

    def run(*arrays: Array) -> Array:
        out = tvm.runtime.tensor(np.zeros(shape, str(output.dtype)))
        module(*map(tvm.runtime.tensor, arrays), out)
        result: Array = out.numpy()
        return result

    return run


LAYOUTS = ((None, "row"), (None, "rows16"), (2, "rows32_pairs"))
# Each layout in one dtype; `everything` has the others.
FORMS = [(*layout, dtype) for layout, dtype in zip(LAYOUTS, ("float32", "float16", "float32"))]
SELDOM = [(*layout, dtype) for layout in LAYOUTS for dtype in ("float32", "float16") if (*layout, dtype) not in FORMS]


@pytest.mark.parametrize(
    ("experts", "layout_name", "out_dtype"),
    [*FORMS, *(pytest.param(*form, marks=pytest.mark.everything) for form in SELDOM)],
)
@pytest.mark.parametrize("scheme_name", [*GROUPED, *PLAIN])
def test_dequantize_element_is_unpack(scheme_name: str, layout_name: str, experts: int | None, out_dtype: str) -> None:
    scheme, layout, n, k = load_scheme(scheme_name), load_layout(layout_name), 17, 100
    packed = pack(scheme, make_weight("outlier", (n, k) if experts is None else (experts, n, k)))
    stored = layout.repack(scheme, packed, n, k)
    inputs = [te.placeholder(a.shape, a.dtype.name, name=name) for name, a in stored.items()]
    scale = inputs[1] if scheme.bits else None
    output = te.compute(
        (n, k) if experts is None else (experts, n, k),
        lambda *indices: dequantize_element(scheme, layout, inputs[0], scale, indices, out_dtype),
    )
    found = compiled(inputs, output)(*stored.values())
    np.testing.assert_array_equal(found, unpack(scheme, packed, k).astype(out_dtype))


@pytest.mark.parametrize("name", GROUPED)
def test_decode_code_of_a_column_known_when_compiling(name: str) -> None:
    bits, _, per_word, _ = GROUPED[name]
    scheme = load_scheme(name)
    words = np.random.default_rng(0).integers(0, 2**32, 16, dtype=np.uint32)
    column = 3 * per_word - 1
    source = te.placeholder((16,), "uint32", name="words")
    output = te.compute((16,), lambda i: decode_code(scheme, source[i], column))
    expected = words >> np.uint32(bits * (per_word - 1)) & np.uint32(2**bits - 1)
    np.testing.assert_array_equal(compiled([source], output)(words), expected)


@pytest.mark.parametrize("name", GROUPED)
def test_codes_are_those_of_tvm_arithmetic(name: str) -> None:
    """The formula of the format in TVM's own arithmetic and rounding, in the model's dtype, on the CPU."""
    bits, _, per_word, dtype = GROUPED[name]
    group = group_of(name, 96)
    scheme, zero = load_scheme(name), 2 ** (bits - 1) - 1
    shape, model_dtype = (64, group), np.dtype(dtype).name
    source = te.placeholder(shape, model_dtype, name="w")
    column = te.reduce_axis((0, group), name="column")
    peak = te.compute((64,), lambda i: te.max(tirx.abs(source[i, column]), axis=column))
    z = tirx.const(zero, model_dtype)
    scaled = te.compute(shape, lambda i, j: tirx.round(source[i, j] / (peak[i] / z) + z))
    output = te.compute(
        shape, lambda i, j: tirx.min(tirx.max(scaled[i, j], tirx.const(0, model_dtype)), z + z).astype("uint32")
    )
    run, shifts = compiled([source], output), (bits * np.arange(per_word)).astype(np.uint32)
    for kind in set(KINDS) - {"denormal16", "denormal32", "zeros"}:
        w = make_weight(kind, shape, seed=7)
        words = pack(scheme, w)["q_weight"]
        codes = words[:, :, None] >> shifts & np.uint32(2**bits - 1)
        np.testing.assert_array_equal(codes.reshape(shape), run(w.astype(dtype)), kind)


def test_a_scale_that_is_missing_or_superfluous_is_an_error() -> None:
    weight = te.placeholder((4, 4), "uint32", name="weight")
    row = load_layout("row")
    with pytest.raises(CompileError, match="dequantize_element in q4f16_1; expected a scale; found none"):
        dequantize_element(load_scheme("q4f16_1"), row, weight, None, (0, 0), "float32")
    with pytest.raises(CompileError, match="dequantize_element in q0f16; expected no scale; found weight"):
        dequantize_element(load_scheme("q0f16"), row, weight, weight, (0, 0), "float32")
