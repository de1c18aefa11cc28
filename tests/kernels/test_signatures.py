"""Sampling functions of every target have the names, arguments and results that `tir_schedules/sampling.py` lists."""

from __future__ import annotations

import importlib

import pytest
from tvm import tirx

from tir_schedules.sampling import DRAWS, SIGNATURES, dimensions, sampling_names

VOCAB = 100


@pytest.mark.parametrize("kernels", ("cpu", "gpu"))
def test_functions_have_the_signatures_of_the_table(kernels: str) -> None:
    functions = importlib.import_module(f"tir_schedules.{kernels}.sampling").sampling_functions(VOCAB)
    denoising = set(DRAWS.values())  # on CPUs
    assert set(functions) == (
        set(sampling_names(own_pages=True)) | denoising if kernels == "cpu" else set(SIGNATURES) - denoising
    )
    sizes = dimensions(VOCAB)
    for name, function in functions.items():
        signature = SIGNATURES[name]
        expected = [
            (tensor.dtype, tuple(sizes.get(str(dim), dim) for dim in tensor.shape))
            for tensor in (*signature.inputs, *signature.outputs)
        ]
        found = [
            (str(param.ty.dtype), tuple(dim.name if isinstance(dim, tirx.Var) else int(dim) for dim in param.ty.shape))
            for param in function.params
        ]
        assert found == expected, name


def test_a_signature_reads_as_text() -> None:
    assert str(SIGNATURES["argsort_probs"]) == "argsort_probs(probs: f32[b, V]) -> (f32[b, V], i32[b, V])"
    assert str(SIGNATURES["apply_bitmask_inplace"]) == (
        "apply_bitmask_inplace(logits: f32[b, V], seq: i32[n], mask: i32[b, ceil(V/32)])"
    )
