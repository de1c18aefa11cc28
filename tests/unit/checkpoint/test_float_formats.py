"""NVFP4, MXFP4, MXFP8 and 2:4 sparsity: numbers bit for bit, those of the reference packages, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.errors import CheckpointError
from tests.unit.checkpoint.float_files import SPARSE_FIELDS, write_fields, write_mxfp8, write_sparse
from tests.unit.checkpoint.helpers import write_tensors
from tests.unit.checkpoint.quantized_files import METHODS, Form, K, N, random_codes, refused, write

NAME = "m.q_proj.weight"
FLOATS = {"nvfp4": (Form(4, 16, "floats"), "fp4_g16_f32"), "mxfp4": (Form(4, 32, "floats"), "MXFP4")}


@pytest.mark.parametrize("method", FLOATS)
def test_numbers_of_4_bits_are_kept(method: str, tmp_path: Path) -> None:
    form, scheme = FLOATS[method]
    dynamic = "local" if method == "nvfp4" else True
    inputs = {"num_bits": 4, "type": "float", "dynamic": dynamic, "strategy": "tensor_group", "group_size": 16}
    fields = METHODS[method][1](form)["quantization_config"]
    fields["config_groups"]["group_0"]["input_activations"] = inputs
    codes = write(
        tmp_path, method, form, config=fields, tensors={"m.q_proj.input_global_scale": np.ones(1, np.float32)}
    )
    found = open_checkpoint(tmp_path)
    assert list(found.tensors) == ["m.norm.weight", NAME] and found.info(NAME).dtype == scheme
    assert found.quantized_as == "compressed-tensors" and found.keeps_all
    parts = found.read_parts(NAME)
    np.testing.assert_array_equal(parts.codes, codes.codes)
    if method == "nvfp4":
        np.testing.assert_array_equal(parts.scales, codes.scales)
    else:
        np.testing.assert_array_equal(parts.scales.view(np.uint8), codes.stored)
    np.testing.assert_array_equal(found.read(NAME), codes.values())


# torch.manual_seed(5), torch.randn(2, 32), packed by compressed-tensors 0.20.0: packed, scales, global scale, and the
# first numbers that it unpacks, in bfloat16.
PACKED = {
    "nvfp4": ("37ffa7e982ceb5cc57c9b9913ae82561c99616f449e39eeb245111cd4e974565", "7a7e7c7b", "10bd7144",
              [1.984375, 0.49609375, -1.984375, -1.984375, 1.984375, -0.330078125, -0.1650390625, -1.3203125]),
    "mxfp4": ("26dd96d982bda4ba47c9a9913ae82551b99516e449d29eda234111bc4e963455", "7e7e", "",
              [2.0, 0.5, -1.5, -1.5, 2.0, -0.25, -0.25, -1.5]),
}  # fmt: skip


@pytest.mark.parametrize("method", PACKED)
def test_numbers_that_compressed_tensors_wrote(method: str, tmp_path: Path) -> None:
    packed, scales, divisor, expected = PACKED[method]
    dtype = np.uint8 if method == "mxfp4" else ml_dtypes.float8_e4m3fn
    tensors: dict[str, Any] = {
        "m.q_proj.weight_packed": np.frombuffer(bytes.fromhex(packed), np.uint8).reshape(2, 16),
        "m.q_proj.weight_scale": np.frombuffer(bytes.fromhex(scales), dtype).reshape(2, -1),
        "m.q_proj.weight_global_scale": np.frombuffer(bytes.fromhex(divisor), "<f4") if divisor else None,
    }
    write(tmp_path, method, FLOATS[method][0], tensors=tensors)
    found = open_checkpoint(tmp_path).read(NAME)[0, :8].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), np.array(expected, np.float32))


@pytest.mark.parametrize("mlx", (True, False))
def test_mxfp8_is_exact_in_float32_and_rounded_when_kept(mlx: bool, tmp_path: Path) -> None:
    expected = write_mxfp8(tmp_path, mlx)
    found = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(found.read(NAME), expected)
    parts, groups = found.read_parts(NAME), expected.reshape(N, -1, 32)
    kept = (parts.codes.reshape(groups.shape) - np.float32(128)) * parts.scales[:, :, None].astype(np.float32)
    assert found.info(NAME).dtype == "Q8_0" and not found.keeps_all
    assert (np.abs(kept - groups) <= np.abs(groups).max(-1, keepdims=True) / 127 * 0.6).all()


@pytest.mark.parametrize("mlx", (True, False))
def test_other_groups_of_mxfp8_are_refused(mlx: bool, tmp_path: Path) -> None:
    write_mxfp8(tmp_path, mlx, group=64)
    assert "group_size" in refused(tmp_path)


@pytest.mark.parametrize("exponent", (254, 255))
def test_scales_that_overflow_or_are_nan_are_refused(exponent: int, tmp_path: Path) -> None:
    write_mxfp8(tmp_path)
    tensors = {"m.q_proj.weight": np.full((N, K // 4), 0x7E7E7E7E, "<u4"),  # 448
               "m.q_proj.scales": np.full((N, K // 32), exponent, np.uint8)}  # fmt: skip
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="not finite"):
        open_checkpoint(tmp_path).read(NAME)


def test_a_matrix_without_columns_is_refused(tmp_path: Path) -> None:
    """Its rows would be counted one by one."""
    write_mxfp8(tmp_path)
    empty = {f"m.q_proj.{part}": np.empty((1 << 31, 0), dtype) for part, dtype in (("weight", "<u4"), ("scales", "u1"))}
    write_tensors(tmp_path / "model.safetensors", empty)
    assert "is empty" in refused(tmp_path)


@pytest.mark.parametrize("dtype", (ml_dtypes.bfloat16, np.float16, np.float32))
def test_two_of_four_are_read_as_a_dense_matrix(dtype: Any, tmp_path: Path) -> None:
    expected = write_sparse(tmp_path, dtype)
    found = open_checkpoint(tmp_path)
    assert list(found.tensors) == ["m.norm.weight", NAME] and found.info(NAME).dtype == np.dtype(dtype).name
    assert found.quantized_as is None and found.quantization(None) != "keep"
    np.testing.assert_array_equal(found.read(NAME), expected)


def test_two_of_four_that_compressed_tensors_wrote(tmp_path: Path) -> None:
    """Version 0.12.2, the last ones with the format."""
    tensors = {
        "m.q_proj.compressed": np.frombuffer(bytes.fromhex("5e37e9b898385139c5bbf3bb86406fc0"), np.float16).reshape(
            2, 4
        ),
        "m.q_proj.bitmask": np.frombuffer(bytes.fromhex("9363"), np.uint8).reshape(2, 1),
        "m.q_proj.shape": np.array([[2], [8]]),
    }
    write_fields(tmp_path, tensors, SPARSE_FIELDS)
    expected = [[0.4604, -0.6138, 0, 0, 0.5742, 0, 0, 0.6646], [-0.9712, -0.9937, 0, 0, 0, 2.2617, -2.2168, 0]]
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read(NAME), np.float32(np.float16(expected)))


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("weight_scale", lambda a: np.full_like(a, np.nan), "not finite"),
        ("weight_scale", lambda a: a[:, :-1], "does not fit"),
        ("weight_scale", lambda a: a.astype(np.float32), "does not fit"),
        ("weight_packed", lambda a: a[:, :-8], "does not fit"),
        ("weight_packed", lambda a: a.view(np.int8), "does not fit"),
        ("weight_global_scale", np.zeros_like, "not finite"),
        ("weight_global_scale", lambda a: a * np.float32(np.nan), "not finite"),
        ("weight_global_scale", lambda a: np.repeat(a, 2), "does not fit"),
        ("weight_global_scale", lambda a: None, "weight_global_scale"),
    ],
)
def test_tensors_of_nvfp4_that_do_not_fit_are_refused(part: str, change: Any, message: str, tmp_path: Path) -> None:
    form = FLOATS["nvfp4"][0]
    stored = METHODS["nvfp4"][0]("m.q_proj", random_codes(form), form)[f"m.q_proj.{part}"]
    write(tmp_path, "nvfp4", form, tensors={f"m.q_proj.{part}": change(stored.copy())})
    assert message in refused(tmp_path)


@pytest.mark.parametrize("method", FLOATS)
@pytest.mark.parametrize(
    "fields", [{"group_size": 64}, {"num_bits": 8}, {"symmetric": False}, {"type": "int"}], ids=str
)
def test_fields_that_change_numbers_of_4_bits_are_refused(method: str, fields: Any, tmp_path: Path) -> None:
    form = Form(4, FLOATS[method][0].group, "floats", fields=fields)
    write(tmp_path, method, form)
    assert next(iter(fields)) in refused(tmp_path)


@pytest.mark.parametrize(
    "part, value, message",
    [
        ("compressed", np.zeros((N, K // 2), np.int8), "does not fit"),
        ("compressed", np.zeros((N, K // 2 - 1), np.float16), "does not fit"),
        ("compressed", np.full((N, K // 2), np.nan, np.float32), "not finite"),
        ("bitmask", np.full((N, K // 8 - 1), 0x33, np.uint8), "does not fit"),
        ("bitmask", np.full((N, K // 8), 0x77, np.uint8), "two of each four"),
        ("shape", np.array([[N], [K - 4]], np.int64), "a multiple of 8 columns"),
        ("bitmask", np.full((N, K // 8), 0x0F, np.uint8), "two of each four"),
        ("shape", np.array([N, K + 8]), "does not fit"),
        ("weight_scale", np.ones((N, 1), np.float32), "sparse"),
        ("shape", np.array([N, -K]), "not the shape"),
        ("shape", np.array([N, K, 1]), "does not fit"),
    ],
)
def test_sparse_tensors_that_do_not_fit_are_refused(part: str, value: Any, message: str, tmp_path: Path) -> None:
    write_sparse(tmp_path, **{part: value})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).read(NAME)


def test_another_structure_of_sparsity_is_refused(tmp_path: Path) -> None:
    write_sparse(tmp_path)
    sparsity = {**SPARSE_FIELDS["sparsity_config"], "sparsity_structure": "unstructured"}  # type: ignore[dict-item]
    write_fields(tmp_path, {"m.norm.weight": np.ones(K, np.float32)}, {**SPARSE_FIELDS, "sparsity_config": sparsity})
    assert "sparsity_structure" in refused(tmp_path)
