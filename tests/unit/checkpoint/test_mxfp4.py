"""Experts in stacks, as gpt-oss, Granite, transformers 5 and mlx-lm have them: numbers bit for bit, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mlcpipe.checkpoint import expert_stacks, open_checkpoint
from tests.unit.checkpoint.helpers import numbers, write_tensors
from tests.unit.checkpoint.mxfp4_files import EXPERTS, HIDDEN, MODULE, WIDTH, of_experts, random_stack, write, write_mlx
from tests.unit.checkpoint.quantized_files import refused


def test_codes_are_kept(tmp_path: Path) -> None:
    expected = write(tmp_path)
    found = open_checkpoint(tmp_path)
    assert set(found.tensors) == {*expected, "model.norm.weight"}
    assert found.quantized_as == "mxfp4" and found.keeps_all and found.quantization(None) == "keep"
    for name, value in expected.items():
        assert found.info(name).dtype == ("MXFP4" if name.endswith("weight") else "bfloat16")
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)
    blocks, scales = random_stack(1, EXPERTS, 2 * WIDTH, HIDDEN)
    parts = found.read_parts(f"{MODULE}.2.up_proj.weight")
    np.testing.assert_array_equal(parts.scales.view(np.uint8), scales[2, 1::2])
    np.testing.assert_array_equal(parts.codes[:, 0:32:2], blocks[2, 1::2, 0] & 15)
    np.testing.assert_array_equal(parts.codes[:, 1:32:2], blocks[2, 1::2, 0] >> 4)
    assert found.info(f"{MODULE}.2.up_proj.weight").nbytes == WIDTH * HIDDEN // 2 + WIDTH * HIDDEN // 32


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the reference is computed by torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="the reference unpacks there")
    write(tmp_path)
    found = open_checkpoint(tmp_path)
    stack = [torch.from_numpy(part) for part in random_stack(1, EXPERTS, 2 * WIDTH, HIDDEN)]
    numbers_ = mxfp4.convert_moe_packed_tensors(*stack, dtype=torch.float32).numpy()  # [experts, hidden, 2 * width]
    for expert in range(EXPERTS):
        gate, up = (found.read(f"{MODULE}.{expert}.{name}_proj.weight") for name in ("gate", "up"))
        np.testing.assert_array_equal(gate, numbers_[expert, :, 0::2].T)
        np.testing.assert_array_equal(up, numbers_[expert, :, 1::2].T)


def test_experts_that_are_not_converted_stay_numbers(tmp_path: Path) -> None:
    plain = (numbers(EXPERTS, WIDTH, HIDDEN) * 0.1).astype(ml_dtypes.bfloat16)
    fields = {"modules_to_not_convert": ["model.layers.0.mlp.experts.down_proj"]}
    write(tmp_path, fields, down_proj_blocks=None, down_proj_scales=None, down_proj=plain)
    found = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(found.read(f"{MODULE}.1.down_proj.weight"), plain[1].astype(np.float32).T)
    assert found.info(f"{MODULE}.1.gate_proj.weight").dtype == "MXFP4" and found.keeps_all


def test_stacks_of_bfloat16_become_matrices(tmp_path: Path) -> None:
    gate_up = numbers(EXPERTS, HIDDEN, 2 * WIDTH).astype(ml_dtypes.bfloat16)
    write_tensors(tmp_path / "model.safetensors", {f"{MODULE}.gate_up_proj": gate_up})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    found = open_checkpoint(tmp_path)
    assert found.quantized_as is None and found.quantization(None) != "keep"
    expected = of_experts({f"{MODULE}.gate_up_proj": gate_up.astype(np.float32).swapaxes(1, 2)})
    assert set(found.tensors) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)


def test_stacks_of_mlx_keep_their_codes(tmp_path: Path) -> None:
    expected = write_mlx(tmp_path)
    found = open_checkpoint(tmp_path)
    assert set(found.tensors) == set(expected) and found.keeps_all
    assert {found.info(name).dtype for name in expected} == {"MXFP4", "affine8_row_f32", "bfloat16"}
    for name, value in expected.items():
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)


@pytest.mark.parametrize("mixtral", (False, True))
def test_stacks_of_mlx_without_codes_become_matrices(mixtral: bool, tmp_path: Path) -> None:
    block = f"model.layers.0.{'block_sparse_moe' if mixtral else 'mlp'}"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    stacks = [numbers(EXPERTS, WIDTH, HIDDEN, seed=i).astype(np.float16) for i in range(3)]
    stored = {
        f"{block}.switch_mlp.{name}.weight": stack for name, stack in zip(("gate_proj", "up_proj", "down_proj"), stacks)
    }
    write_tensors(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral" if mixtral else "qwen3_moe"}))
    found = open_checkpoint(tmp_path)
    assert found.quantized_as is None and len(found.tensors) == 3 * EXPERTS
    for name, stack in zip(names, stacks):
        for expert, rows in enumerate(stack):
            np.testing.assert_array_equal(found.read(f"{block}.experts.{expert}.{name}.weight"), rows)


def write_fused(folder: Path, **changed: Any) -> dict[str, Any]:
    """Stacks of transformers 5 and of Granite, with parts by the ends of their names `changed` -> float32 by name."""
    mlp, granite = "model.layers.0.mlp.experts", "model.layers.1.block_sparse_moe"
    stored = {
        f"{mlp}.gate_up_proj": numbers(EXPERTS, 2 * WIDTH, HIDDEN, seed=1),
        f"{mlp}.down_proj": numbers(EXPERTS, HIDDEN, WIDTH, seed=2),
        f"{granite}.input_linear.weight": numbers(EXPERTS, 2 * WIDTH, HIDDEN, seed=3),
        f"{granite}.output_linear.weight": numbers(EXPERTS, HIDDEN, WIDTH, seed=4),
        "model.layers.1.shared_mlp.input_linear.weight": numbers(2 * WIDTH, HIDDEN, seed=5),
        "model.layers.1.shared_mlp.output_linear.weight": numbers(HIDDEN, WIDTH, seed=6),
    }
    gate_up, down, w13, w2, shared, shared_down = stored.values()
    expected = {f"model.layers.1.shared_mlp.{name}_proj.weight": part
                for name, part in zip(("gate", "up", "down"), (*np.split(shared, 2), shared_down))}  # fmt: skip
    for e in range(EXPERTS):
        parts = (*np.split(gate_up[e], 2), down[e], *np.split(w13[e], 2), w2[e])
        names = [f"{mlp}.{e}.{name}_proj" for name in ("gate", "up", "down")]
        names += [f"{granite}.experts.{e}.{name}" for name in ("w1", "w3", "w2")]
        expected |= {f"{name}.weight": part for name, part in zip(names, parts)}
    stored |= {next((one for one in stored if one.endswith(end)), end): value for end, value in changed.items()}
    write_tensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps({"model_type": "granitemoe"}))
    return expected


def test_fused_stacks_become_matrices(tmp_path: Path) -> None:
    expected = write_fused(tmp_path)
    found = open_checkpoint(tmp_path)
    assert set(found.tensors) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found.read(name), value, err_msg=name)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("gate_up_proj", np.zeros((EXPERTS, 2 * WIDTH + 1, HIDDEN), np.float32), "gate_up_proj' is no stack"),
        ("gate_up_proj", np.zeros((2 * WIDTH, HIDDEN), np.float32), "gate_up_proj' is no stack"),
        ("gate_up_proj", np.zeros((5000, 2, 1), np.float32), "gate_up_proj' is no stack"),
        ("down_proj", np.zeros((0, HIDDEN, WIDTH), np.float32), "down_proj' is no stack"),
        ("down_proj", np.zeros((EXPERTS, HIDDEN, WIDTH), np.int32), "down_proj' does not fit"),
        ("block_sparse_moe.input_linear.weight", np.zeros((4, 3, 2), np.float32), "input_linear.weight' is no stack"),
        ("shared_mlp.input_linear.weight", np.zeros((3, 2), np.float32), "input_linear.weight' is no stack"),
        ("shared_mlp.output_linear.weight", np.zeros((1, 3, 2), np.float32), "output_linear.weight' is no stack"),
        ("model.layers.0.mlp.experts.1.up_proj.weight", np.zeros((WIDTH, HIDDEN), np.float32), "stored twice"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_fused_stacks_that_do_not_fit_are_refused(part: str, value: Any, message: str, tmp_path: Path) -> None:
    write_fused(tmp_path, **{part: value})
    assert message in refused(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("gate_proj.scales", None, "has no codes"),
        ("gate_proj.scales", np.zeros((EXPERTS - 1, WIDTH, HIDDEN // 32), np.uint8), f"{EXPERTS} experts"),
        ("gate_proj.scales", np.zeros((EXPERTS, WIDTH, HIDDEN // 16), np.uint8), "does not fit"),
        ("gate_proj.weight", np.zeros((5000, 1, 4), np.uint32), "no stack of experts"),
        ("gate_proj.weight", np.zeros((0, WIDTH, HIDDEN // 8), np.uint32), "no stack of experts"),
        ("gate_proj.weight", np.zeros((WIDTH, HIDDEN // 8), np.uint32), "no stack of experts"),
        ("gate_proj.bias", np.zeros(WIDTH, np.float32), "no stack of experts"),
        ("down_proj.scales", np.full((EXPERTS, HIDDEN, 1), np.nan, np.float32), "not finite"),
        ("down_proj.biases", None, "down_proj.biases"),
        ("1.gate_proj.weight", np.zeros((WIDTH, HIDDEN), np.float32), "stored twice"),
        ("1.gate_proj.bias", np.zeros(WIDTH, np.float32), "stored twice"),
    ],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_stacks_of_mlx_that_do_not_fit_are_refused(part: str, value: Any, message: str, tmp_path: Path) -> None:
    write_mlx(tmp_path, **{part: value})
    assert message in refused(tmp_path)


_BLOCKS, _SCALES = random_stack(1, EXPERTS, 2 * WIDTH, HIDDEN)
_BIAS = np.zeros((EXPERTS, 2 * WIDTH), np.float32)
BROKEN: list[tuple[str, Any, str]] = [
    ("gate_up_proj_scales", np.full_like(_SCALES, 255), "not finite"),
    ("gate_up_proj_scales", None, "gate_up_proj_scales"),
    ("gate_up_proj_scales", _SCALES[:, :-1], "does not fit"),
    ("gate_up_proj_scales", _SCALES.astype(np.float32), "does not fit"),
    ("gate_up_proj_blocks", _BLOCKS.view(np.int8), "does not fit"),
    ("gate_up_proj_blocks", _BLOCKS[..., :8], "does not fit"),
    ("gate_up_proj_blocks", _BLOCKS.reshape(EXPERTS, 2 * WIDTH, -1), "no stack of experts"),
    ("gate_up_proj_blocks", _BLOCKS[:, :-1], "no stack of experts"),
    ("gate_up_proj_blocks", np.zeros((5000, 2, 1, 16), np.uint8), "no stack of experts"),
    ("gate_up_proj_blocks", np.zeros((0, 2, 1, 16), np.uint8), "no stack of experts"),
    ("gate_up_proj", np.zeros((EXPERTS, HIDDEN, 2 * WIDTH), np.float32), "stored twice"),
    ("gate_up_proj_bias", np.full_like(_BIAS, np.nan), "not finite"),
    ("gate_up_proj_bias", _BIAS[:, :-1], "no stack of experts"),
    ("gate_up_proj_bias", _BIAS.astype(np.int32), "does not fit"),
    ("gate_up_proj_bias", _BIAS[0], "no stack of experts"),
]


@pytest.mark.parametrize(("part", "value", "message"), BROKEN, ids=lambda value: str(value)[:24])
def test_tensors_that_do_not_fit_are_refused(part: str, value: Any, message: str, tmp_path: Path) -> None:
    write(tmp_path, **{part: value})
    assert message in refused(tmp_path)


def test_more_experts_than_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for written, limits in ((write, (2, 10)), (write_mlx, (2, 10))):  # of the codes, of the biases
        written(tmp_path)
        for limit in limits:
            monkeypatch.setattr(expert_stacks, "MAX_TENSORS", limit)
            assert "too many experts" in refused(tmp_path)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    assert "model.safetensors" in refused(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"modules_to_not_convert": ["model.layers.*.mlp.experts"]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert"),
        ({"group_size": 64}, "group_size"),
        ({"quant_method": "mxfp6"}, "quant_method"),
    ],
    ids=str,
)
def test_fields_that_change_the_numbers_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, fields)
    assert message in refused(tmp_path)
