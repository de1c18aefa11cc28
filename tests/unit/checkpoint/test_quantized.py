"""Quantized safetensors: codes, scales and zero points bit for bit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.quantized_matrix import widened
from mlcpipe.compiler.export import kept_formats
from mlcpipe.errors import CheckpointError, TargetError
from mlcpipe.targets import load_target
from mlcpipe.weights.native_formats import keep
from mlcpipe.weights.table import Weight
from tests.unit.checkpoint.helpers import numbers, write_tensors
from tests.unit.checkpoint.quantized_files import BFLOAT16, METHODS, Form, K, N, random_codes, refused, write

V2 = {"checkpoint_format": "gptq_v2"}
FORMS = [
    *[("gptq", Form(bits, 32)) for bits in (2, 3, 4, 8)],
    *[("gptq", Form(bits, 64, fields=V2)) for bits in (3, 4, 8)],
    ("gptq", Form(4, 0, dtype=BFLOAT16)),
    ("gptq", Form(4, 128, "middle")),
    ("awq", Form(4, 32)),
    ("awq", Form(4, 128, dtype=np.float32)),
    ("awq", Form(4, 0)),
    *[("mlx", Form(bits, 64, "biases", BFLOAT16)) for bits in (2, 3, 4, 5, 6, 8)],
    ("mlx", Form(4, 32, "biases")),
    *[("compressed-tensors", Form(bits, 64, "middle", BFLOAT16)) for bits in (2, 3, 4, 5, 6, 8)],
    *[("compressed-tensors", Form(bits, 32)) for bits in (3, 4, 8)],
    ("compressed-tensors", Form(4, 0, dtype=BFLOAT16)),
    ("int-quantized", Form(8, 0, "middle", BFLOAT16)),
    ("int-quantized", Form(8, 0)),
]


@pytest.mark.parametrize("method, form", FORMS, ids=lambda value: value if isinstance(value, str) else str(value.bits))
def test_codes_and_scales_are_the_stored_ones(method: str, form: Form, tmp_path: Path) -> None:
    codes = write(tmp_path, method, form)
    found = open_checkpoint(tmp_path)
    assert list(found.tensors) == ["m.norm.weight", "m.q_proj.weight"]
    assert (
        found.quantized_as == method.replace("int-quantized", "compressed-tensors")
        and found.keeps_all
        and found.quantization(None) == "keep"
    )
    assert "quantization_config" not in found.config and "quantization" not in found.config
    tensor = found.info("m.q_proj.weight")
    kind = {"zeros": "uint", "middle": "int", "biases": "affine"}[form.kind]
    assert tensor.dtype.startswith(f"{kind}{form.bits}_") and tensor.shape == (N, K)
    parts = found.read_parts("m.q_proj.weight")
    np.testing.assert_array_equal(parts.codes, codes.codes)
    scales = codes.scales if codes.biases is None else np.stack([codes.scales, codes.biases], -1).reshape(N, -1)
    np.testing.assert_array_equal(widened(parts.scales), scales.astype(np.float32))
    assert parts.scales.nbytes == scales.nbytes or scales.shape[1] == 1
    if form.kind == "zeros":
        assert parts.subs is not None
        np.testing.assert_array_equal(parts.subs.view(np.uint8), codes.zeros)
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), codes.values())


@pytest.mark.parametrize("target", ["x86_64-linux", "vulkan", "webgpu", "cuda", "metal"])
def test_a_target_without_kernels_refuses_a_form(target: str, tmp_path: Path) -> None:
    """Ours read all forms."""
    write(tmp_path, "gptq", Form(4, 32))
    name, device = "m.q_proj.weight", load_target(target)
    weight, found = Weight(name, (N, K), "float32", "scheme", ((name,),)), open_checkpoint(tmp_path)
    (kept,) = keep([weight], found, device, kept_formats(device))
    assert kept.scheme is not None and kept.scheme.name == "uint4_g32_f16"
    with pytest.raises(TargetError, match=f"no kernel of {target} reads uint4_g32_f16") as refusal:
        keep([weight], found, device, {"Q4_0", "int"})
    assert "add --quantization q4f16_1" in str(refusal.value)


def tensor_of(method: str, part: str, change: Any, form: Form = Form(4, 32)) -> dict[str, NDArray[Any]]:
    """A tensor of the module, changed."""
    stored = METHODS[method][0]("m.q_proj", random_codes(form), form)[f"m.q_proj.{part}"].copy()
    return {f"m.q_proj.{part}": change(stored)}


def _nan(scales: NDArray[Any]) -> NDArray[Any]:
    scales[1, 1] = np.nan
    return scales


def _index(value: int) -> Any:
    def change(index: NDArray[Any]) -> NDArray[Any]:
        index[5] = value
        return index

    return change


@pytest.mark.parametrize(
    "method, config, message",
    [
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"bits": True}, "bits"),
        ("gptq", {"group_size": 0.5}, "group_size"),
        ("gptq", {"checkpoint_format": "gptq_p"}, "checkpoint_format"),
        ("gptq", {"act_bits": 4}, "act_bits"),
        ("gptq", {"group_size": 64}, "contradict"),
        ("gptq", {"quant_method": "exl2"}, "exl2"),
        ("gptq", {"quant_method": None}, "quant_method"),
        ("gptq", {"quant_method": ["aqlm"]}, "quant_method"),
        ("awq", {"bits": 3}, "bits"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"group_size": 128}, "contradict"),
        ("awq", {"rotation": 1}, "rotation"),
        *[
            ("gptq", {name: value}, name)
            for name, value in [
                ("rotation", "hadamard"),
                ("adapter", {"rank": 8}),
                ("spinquant_config", {"r1": True}),
                ("super_bits", 6),
                ("static_kv_dtype", "fp8"),
                ("data_type", "mx_fp"),
                ("act_bits", 8),
                ("is_marlin_format", True),
                ("format", "marlin"),
                ("pack_dtype", "int16"),
                ("awq_gemm_checkpoint", True),
                ("codebook", "e8p"),
                ("kv_cache_scheme", {"num_bits": 8}),
                ("w_bit", 8),
            ]
        ],
        ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"}, "format"),
        ("awq", {"version": "gemm", "format": "gemv_fast"}, "format"),
        ("awq", {"backend": "llm-awq"}, "backend"),
        ("awq", {"act_bits": 8}, "act_bits"),
        ("awq", {"method": "gptq"}, "method"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "packing_format"),
        ("gptq", {"quant_method": "intel/auto-round", "backend": "auto_round:qbits_zp"}, "packing_format"),
        ("gptq", {"quant_method": "auto-round", "data_type": "nv_fp"}, "data_type"),
        ("mlx", {"bits": 7}, "bits"),
        ("mlx", {"mode": "mxfp6"}, "mode"),
        ("mlx", {"mode": "mxfp8"}, "bits"),
        ("mlx", {"group_size": 48}, "group_size"),
        ("mlx", {"m.q_proj": False}, "m.q_proj"),
        ("mlx", {"m.o_proj": {"bits": 4, "group_size": 32}}, "m.o_proj"),
        ("mlx", {"hadamard": 3}, "hadamard"),
        ("compressed-tensors", {"format": "marlin-24"}, "format"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ("compressed-tensors", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config.format"),
        ("compressed-tensors", {"transform_config": {"R1": 1}}, "transform_config"),
        ("compressed-tensors", {"config_groups": {"group_0": {"weights": None}}}, "weights"),
        ("compressed-tensors", {"config_groups": {"group_0": []}}, "group_0"),
        ("compressed-tensors", {"config_groups": {}}, "groups"),
    ],
)
def test_fields_that_change_the_result_are_refused_by_name(
    method: str, config: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, method, Form(4, 32, "biases" if method == "mlx" else "zeros"), config=config)
    assert message in refused(tmp_path)


# What tools write beside the format, as published checkpoints have it.
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "AutoRound": {
        "autoround_version": "0.16.1", "provider": "auto-round", "data_type": "int", "to_quant_block_names": "model.layers",
        "block_name_to_quantize": ["model.layers"], "iters": 1000, "lr": 1e-3, "minmax_lr": 1e-3, "nsamples": 512, "seqlen": 2048,
        "amp": True, "batch_size": 4, "enable_minmax_tuning": True, "enable_quanted_input": True, "dataset": "pile-10k",
        "enable_norm_bias_tuning": False, "gradient_accumulate_steps": 2, "low_gpu_mem_usage": True, "scale_dtype": "torch.float16",
        "static_kv_granularity": "tensor", "supported_types": ["Linear"], "act_bits": 16, "act_dynamic": True, "act_sym": True,
        "act_group_size": 32, "act_data_type": "int", "extra_config": {"m.o_proj": {"bits": 16, "data_type": "float"}},
    },
    "GPTQModel": {
        "meta": {"quantizer": ["gptqmodel:5.0.0"], "mse": 0.0, "gptaq": None}, "dynamic": {"-:.*o_proj": {}}, "lm_head": False,
        "pack_dtype": "int32", "mse": 2.4, "hyb_act": False, "v2": True, "v2_alpha": 0.25, "act_group_aware": True,
        "damp_auto_increment": 0.01, "quantizer": "gptqmodel:5.0.0", "failsafe_strategy": "rtn", "offload_to_disk": True,
        "sym": True, "desc_act": False, "rotation": None, "adapter": None,
    },
    "optimum": {
        "dataset": "c4", "tokenizer": None, "damp_percent": 0.1, "true_sequential": True, "static_groups": False, "batch_size": 1,
        "model_seqlen": 2048, "exllama_config": {"version": 1}, "use_exllama": True, "use_cuda_fp16": False, "pad_token_id": None,
        "cache_block_outputs": True, "module_name_preceding_first_block": ["model.embed_tokens"], "max_input_length": None,
        "modules_in_block_to_quantize": [["self_attn.q_proj"]], "model_file_base_name": "model", "disable_exllama": True,
    },
    "AutoAWQ": {
        "modules_to_not_convert": ["lm_head"], "do_fuse": True, "fuse_max_seq_len": 512, "modules_to_fuse": {"mlp": []},
        "backend": "autoawq", "exllama_config": {"version": 2}, "duo_scaling": True, "n_parallel_calib_samples": 8,
    },
}  # fmt: skip
NAMES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "gptq": (
        {}, {"checkpoint_format": "gptq", "format": "gptq", "method": "gptq"}, {"bits": None, "wbits": 4},
        {"group_size": None, "groupsize": 32},
        *({"quant_method": "auto-round", "packing_format": f"auto_round:{name}"} for name in ("auto_gptq", "gptq")),
        {"quant_method": "auto-round"}, {"quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
        {"quant_method": "intel/auto-round", "backend": "gptq:exllamav2", "regex_config": {".*o_proj": {"bits": 16}}},
    ),
    "gptq_v2": (
        {"checkpoint_format": "gptq_v2"}, {"format": "GPTQ_V2"},
        *({"quant_method": "auto-round", "packing_format": name} for name in ("auto_round", "auto_round:gptqmodel")),
        {"quant_method": "intel/auto-round", "backend": "autoround:exllamav2"},
        {"quant_method": "intel/auto-round", "backend": "auto_round:tritonv2", "train_bs": 8, "n_samples": 512},
    ),
    "awq": (
        {}, {"version": "GEMM", "format": "gemm", "method": "awq"}, {"version": None, "checkpoint_format": "gemm"},
        *({"quant_method": "auto-round", "packing_format": f"auto_round:{name}"} for name in ("auto_awq", "awq")),
        {"quant_method": "intel/auto-round", "backend": "auto_round:awq:gemm"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "version, names", [(version, names) for version, each in NAMES.items() for names in each], ids=str
)
def test_what_tools_write_beside_the_format_changes_nothing(
    version: str, names: Mapping[str, Any], tool: str, tmp_path: Path
) -> None:
    method = version.removesuffix("_v2")
    form = Form(4, 32, fields=V2 if version == "gptq_v2" else {})
    fields = {**dict.fromkeys(form.fields), **TOOLS[tool], **names}
    codes = write(tmp_path, method, form, config=fields)
    found = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), codes.values())
    assert found.quantized_as == names.get("quant_method", method).removeprefix("intel/")


def test_what_llm_compressor_writes_beside_the_format_changes_nothing(tmp_path: Path) -> None:
    beside = {
        "observer": "mse",
        "observer_kwargs": {"maxshrink": 0.2},
        "actorder": "static",
        "scale_dtype": "torch.float16",
    }
    fields = METHODS["compressed-tensors"][1](Form(4, 32, fields=beside))["quantization_config"]
    fields |= {"version": "0.15.0", "global_compression_ratio": 1.5, "run_compressed": True, "provider": "auto-round",
               "transform_config": {}, "sparsity_config": {}, "use_optimized_inference": True}  # fmt: skip
    codes = write(tmp_path, "compressed-tensors", Form(4, 32), config=fields)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("m.q_proj.weight"), codes.values())


def test_what_transformers_writes_is_read(tmp_path: Path) -> None:
    from transformers.utils.quantization_config import AutoRoundConfig, AwqConfig, GPTQConfig

    for method, config in (
        ("gptq", GPTQConfig(4, group_size=32)), ("awq", AwqConfig(4, group_size=32)), ("gptq", AutoRoundConfig(4, 32)),
    ):  # fmt: skip
        codes = write(
            tmp_path, method, Form(4, 32), config={**config.to_dict(), "quant_method": config.quant_method.value}
        )
        np.testing.assert_array_equal(open_checkpoint(tmp_path).read("m.q_proj.weight"), codes.values())


@pytest.mark.parametrize(
    "method, part, change, message",
    [
        ("gptq", "scales", _nan, "not finite"),
        ("gptq", "scales", lambda a: a[:, :32], "does not fit"),
        ("gptq", "scales", lambda a: a.astype(np.float64), "does not fit"),
        ("gptq", "qweight", lambda a: a[:-1], "do"),
        ("gptq", "qweight", lambda a: a.reshape(-1), "qweight"),
        ("gptq", "qzeros", lambda a: a[:, :-1], "do not fit"),
        ("gptq", "qzeros", lambda a: a.reshape(-1), "do not fit"),
        ("gptq", "g_idx", _index(-1), "out of range"),
        ("gptq", "g_idx", _index(8), "out of range"),
        ("gptq", "g_idx", _index(3), "different sizes"),
        ("gptq", "g_idx", lambda a: a[:7], "does not fit"),
        ("awq", "scales", _nan, "not finite"),
        ("awq", "scales", lambda a: a[:1], "do"),
        ("awq", "qweight", lambda a: a[:40], "do"),
        ("awq", "qzeros", lambda a: a[:, :4], "does not fit"),
        ("mlx", "scales", _nan, "not finite"),
        ("mlx", "scales", lambda a: a[:, :3], "does not fit"),
        ("mlx", "biases", lambda a: a.astype(np.float32), "does not fit"),
        ("mlx", "weight", lambda a: a[:, :-1], "does not fit"),
        ("compressed-tensors", "weight_scale", _nan, "not finite"),
        ("compressed-tensors", "weight_scale", lambda a: a[:, :3], "does not fit"),
        ("compressed-tensors", "weight_packed", lambda a: a[:, :3], "does not fit"),
        ("compressed-tensors", "weight_shape", lambda a: -a, "not the shape"),
        ("compressed-tensors", "weight_shape", lambda a: a << 40, "not the shape"),
        ("compressed-tensors", "weight_shape", lambda a: a[:1], "does not fit"),
        ("compressed-tensors", "weight_zero_point", lambda a: a[:5], "does not fit"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(method: str, part: str, change: Any, message: str, tmp_path: Path) -> None:
    form = Form(4, 32, "biases" if method == "mlx" else "zeros")
    write(tmp_path, method, form, tensors=tensor_of(method, part, change, form))
    assert message in refused(tmp_path)


@pytest.mark.parametrize("method, part", [("gptq", "qzeros"), ("gptq", "scales"), ("awq", "qzeros"), ("mlx", "biases")])
def test_a_missing_tensor_is_named(method: str, part: str, tmp_path: Path) -> None:
    form = Form(4, 32, "biases" if method == "mlx" else "zeros")
    write(tmp_path, method, form, tensors={f"m.q_proj.{part}": None})
    assert f"m.q_proj.{part}" in refused(tmp_path)


@pytest.mark.parametrize("inputs", [{"num_bits": 8, "dynamic": False}, {"num_bits": 4, "dynamic": True}])
def test_activations_that_are_not_scaled_as_they_come_are_refused(inputs: dict[str, Any], tmp_path: Path) -> None:
    form = Form(8, 0, "middle")
    fields = METHODS["int-quantized"][1](form)["quantization_config"]
    fields["config_groups"]["group_0"]["input_activations"] = inputs
    write(tmp_path, "int-quantized", form, config=fields)
    assert "input_activations" in refused(tmp_path)


def test_words_that_no_code_leaves(tmp_path: Path) -> None:
    """compressed-tensors before 2026-05: ten codes of 3 bits in a word."""
    form = Form(3, 64, "middle")
    codes = random_codes(form).codes
    padded = np.zeros((N, -(-K // 10) * 10), np.uint8)
    padded[:, :K] = codes
    shifts = np.arange(10, dtype=np.uint32) * np.uint32(3)
    words = (padded.reshape(N, -1, 10).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32).view(np.int32)
    write(tmp_path, "compressed-tensors", form, tensors={"m.q_proj.weight_packed": words})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read_parts("m.q_proj.weight").codes, codes)


def test_groups_of_modules_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    form = Form(4, 32, "middle")
    fields = METHODS["compressed-tensors"][1](form)["quantization_config"]
    other = METHODS["compressed-tensors"][1](Form(8, 0, "middle"))["quantization_config"]["config_groups"]["group_0"]
    fields["config_groups"]["group_1"] = other
    codes = write(tmp_path, "compressed-tensors", form, config=fields)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read("m.q_proj.weight"), codes.values())


@pytest.mark.parametrize("block", [[32, 64], [64, 256], [48, 100]])
def test_fp8_blocks_are_exact_in_float32_and_rounded_when_kept(block: list[int], tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    weight = (draw.standard_normal((N, K)) * 100).astype(ml_dtypes.float8_e4m3fn)
    scales = draw.uniform(1e-4, 1e-3, (-(-N // block[0]), -(-K // block[1]))).astype(np.float32)
    tensors = {"m.q_proj.weight": weight, "m.q_proj.weight_scale_inv": scales}
    fields = {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": fields}))
    write_tensors(tmp_path / "model.safetensors", tensors)
    found = open_checkpoint(tmp_path)
    expected = weight.astype(np.float32) * scales[np.arange(N)[:, None] // block[0], np.arange(K) // block[1]]
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), expected)
    parts, groups = found.read_parts("m.q_proj.weight"), expected.reshape(N, -1, 32)
    kept = (parts.codes.reshape(groups.shape) - np.float32(128)) * parts.scales[:, :, None].astype(np.float32)
    steps = np.abs(groups).max(-1, keepdims=True) / 127
    assert found.info("m.q_proj.weight").dtype == "Q8_0" and not found.keeps_all
    assert (np.abs(kept - groups) <= steps * 0.6).all()
    weight[3, 5] = np.nan
    write_tensors(tmp_path / "model.safetensors", tensors)
    assert "not finite" in refused(tmp_path)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_sorted_columns(method: str, tmp_path: Path) -> None:
    """desc_act and actorder: parts have the columns of a group beside each other, numbers are in their own order."""
    form = Form(4, 64)
    columns = np.random.default_rng(1).permutation(K)
    codes = replace(random_codes(form), columns=columns)
    write(tmp_path, method, form, tensors=METHODS[method][0]("m.q_proj", codes, form))
    found = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), codes.values())
    order = found.columns("m.q_proj.weight")
    assert order is not None and (np.sort(order) == np.arange(K)).all()
    assert (np.sort(order.reshape(-1, 64)) == np.sort(columns.reshape(-1, 64))).all()
    np.testing.assert_array_equal(found.read_parts("m.q_proj.weight").codes, codes.codes[:, order])


def test_experts_have_orders_of_their_own(tmp_path: Path) -> None:
    form, names = Form(4, 64), ("m.q_proj.weight", "m.k_proj.weight")
    codes = replace(random_codes(form), columns=np.random.default_rng(1).permutation(K))
    write(tmp_path, "gptq", form, tensors=METHODS["gptq"][0]("m.k_proj", codes, form))
    found, device = open_checkpoint(tmp_path), load_target("cpu")
    experts = Weight("experts", (2, N, K), "float32", "scheme", tuple((name,) for name in names))
    (kept,) = keep([experts], found, device, kept_formats(device))
    orders = np.frombuffer(kept.columns, np.int32).reshape(2, K)
    np.testing.assert_array_equal(orders, [np.arange(K), found.columns("m.k_proj.weight")])
    joined = Weight("joined", (2 * N, K), "float32", "scheme", (names,))
    with pytest.raises(CheckpointError, match="the columns of joined are sorted in several ways"):
        keep([joined], found, device, kept_formats(device))


def test_an_order_that_nothing_set(tmp_path: Path) -> None:
    """compressed-tensors leaves -1 in weight_g_idx where no order was found; one of them is damage."""
    form, index = Form(4, 32), np.full(K, -1, np.int32)
    codes = write(tmp_path, "compressed-tensors", form, tensors={"m.q_proj.weight_g_idx": index})
    found = open_checkpoint(tmp_path)
    assert found.columns("m.q_proj.weight") is None
    np.testing.assert_array_equal(found.read("m.q_proj.weight"), codes.values())
    index[7] = 0
    write(tmp_path, "compressed-tensors", form, tensors={"m.q_proj.weight_g_idx": index})
    assert "out of range" in refused(tmp_path)


def test_bits_of_single_modules(tmp_path: Path) -> None:
    """`dynamic` of GPTQ shows in the shapes; MLX says it by path."""
    codes = write(tmp_path, "gptq", Form(8, 64), config={"bits": 4, "group_size": 32, "dynamic": {"m": {"bits": 8}}})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read_parts("m.q_proj.weight").codes, codes.codes)
    path = {"m.q_proj": {"bits": 6, "group_size": 64}, "m.norm": False}
    codes = write(tmp_path, "mlx", Form(6, 64, "biases"), config={"bits": 4, "group_size": 32, **path})
    np.testing.assert_array_equal(open_checkpoint(tmp_path).read_parts("m.q_proj.weight").codes, codes.codes)


def test_a_tensor_beside_its_codes_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "gptq", Form(4, 32), tensors={"m.q_proj.weight": numbers(N, K)})
    assert "stored twice" in refused(tmp_path)
