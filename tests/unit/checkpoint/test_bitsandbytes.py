"""bitsandbytes and BitNet: packed here from the formats' descriptions, read back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint import open_checkpoint
from tests.unit.checkpoint.bitsandbytes_files import MAPS, NAME, four_bits, write
from tests.unit.checkpoint.helpers import write_tensors
from tests.unit.checkpoint.quantized_files import K, N, refused


@pytest.mark.parametrize("nested", (False, True))
@pytest.mark.parametrize("kind", MAPS)
def test_four_bits(kind: str, nested: bool, tmp_path: Path) -> None:
    tensors, codes, absmax = four_bits(kind, nested)
    write(tmp_path, tensors)
    found = open_checkpoint(tmp_path)
    assert list(found.tensors) == [NAME] and found.info(NAME).dtype == {"nf4": "NF4", "fp4": "BNB_FP4"}[kind]
    levels, steps = np.array(MAPS[kind][0], np.float32), MAPS[kind][1]
    np.testing.assert_array_equal(found.read(NAME), levels[codes] * np.repeat(absmax, 64, 1))
    parts = found.read_parts(NAME)
    np.testing.assert_array_equal(parts.codes, codes)
    np.testing.assert_array_equal(parts.scales, (absmax / np.float32(steps)).astype(np.float16))
    assert not found.keeps_all


def test_eight_bits(tmp_path: Path) -> None:
    draw = np.random.default_rng(6)
    weight = draw.integers(-127, 128, (N, K)).astype(np.int8)
    scales = draw.uniform(0.01, 0.2, N).astype(np.float32)
    tensors = {NAME: weight, "m.q_proj.SCB": scales, "m.q_proj.weight_format": np.zeros((), np.uint8)}
    write(tmp_path, tensors, load_in_4bit=False, load_in_8bit=True, llm_int8_threshold=6.0)
    found = open_checkpoint(tmp_path)
    expected = weight * (scales / np.float32(127))[:, None]
    np.testing.assert_array_equal(found.read(NAME), expected)
    assert list(found.tensors) == [NAME] and found.info(NAME).dtype == "int8_row_f32" and found.keeps_all
    write(tmp_path, tensors | {"m.q_proj.weight_format": np.array([2], np.int8)}, load_in_4bit=False, load_in_8bit=True)
    assert "in the order of a kernel" in refused(tmp_path)


@pytest.mark.parametrize("linear_class", (None, "autobitlinear"))
def test_ternary(linear_class: str | None, tmp_path: Path) -> None:
    steps = np.random.default_rng(7).integers(-1, 2, (N, K))
    quarters = (steps + 1).astype(np.uint8).reshape(4, N // 4, K)
    packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
    tensors = {NAME: packed, "m.q_proj.weight_scale": np.array([4.0], np.float32)}
    fields = {"quant_method": "bitnet", "linear_class": linear_class}
    write(tmp_path, tensors, load_in_4bit=None, bnb_4bit_quant_storage=None, **fields)
    found = open_checkpoint(tmp_path)
    expected = (steps * (0.25 if linear_class is None else 4)).astype(np.float32)
    np.testing.assert_array_equal(found.read(NAME), expected)
    assert found.info(NAME).dtype == "int2_row_f32" and found.keeps_all
    tensors[NAME] = packed | 3
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert "code 3" in refused(tmp_path)


@pytest.mark.parametrize(
    "state",
    [{"blocksize": 128}, {"shape": [N, K + 1]}, {"shape": [N * K]}, {"shape": [2**40, 64]}, {"quant_type": "fp4"},
     {"nested_offset": float("nan")}, {"nested_offset": "1"}, {"nested_blocksize": 64}, {"shape": [True, K]}],
    ids=str,
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(state: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, four_bits("nf4", True, **state)[0])
    assert "state" in refused(tmp_path) or "does not fit" in refused(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[]", b"[" * 3000, b'{"a":' * 700 + b"1" + b"}" * 700, b" " * 5000, b"\xff"])
def test_bombs_in_a_state_are_refused(text: bytes, tmp_path: Path) -> None:
    tensors = four_bits("nf4", False)[0]
    tensors[f"{NAME}.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
    write(tmp_path, tensors)
    assert "bitsandbytes__nf4" in refused(tmp_path)


@pytest.mark.parametrize("part", ("absmax", "quant_map", "nested_absmax", "nested_quant_map"))
def test_a_missing_or_short_tensor_is_named(part: str, tmp_path: Path) -> None:
    tensors = four_bits("nf4", True)[0]
    whole = tensors.pop(f"{NAME}.{part}")
    write(tmp_path, tensors)
    assert f"weight.{part}" in refused(tmp_path)
    write(tmp_path, tensors | {f"{NAME}.{part}": whole[:-1]})
    assert f"weight.{part}" in refused(tmp_path)


def test_storage_in_another_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path, four_bits("nf4", False)[0], bnb_4bit_quant_storage="bfloat16")
    assert "bnb_4bit_quant_storage" in refused(tmp_path)
