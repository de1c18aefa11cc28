"""A GGUF file of every family stands for the checkpoint that it was made of: configuration, tensors and logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are made by torch")
pytest.importorskip("transformers", reason="the checkpoints are transformers models")
gguf = pytest.importorskip("gguf", reason="the files are written by the gguf package")

import mlcpipe
from mlcpipe.bundle import read_manifest
from mlcpipe.checkpoint import TensorInfo, open_checkpoint
from mlcpipe.checkpoint.gguf.families import family_of, numbers_of_layers, renamed
from mlcpipe.checkpoint.gguf.header import read_header
from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.compiler.job import stored_weights
from mlcpipe.errors import ConfigError, TargetError
from mlcpipe.models import build_model, gguf_families
from mlcpipe.nn.language_model import blocks_of
from mlcpipe.nn.mamba import Mamba
from mlcpipe.nn.mamba2 import Mamba2
from mlcpipe.quantization.native_formats import native_scheme
from mlcpipe.quantization.recipe import load_recipe
from mlcpipe.targets import load_target
from tests.conftest import EXACT, QUICK
from tests.models import kept, tiny
from tests.models.variants import VARIANTS
from tests.unit.checkpoint.gguf_files import write_gguf

Q8_0 = gguf.GGMLQuantizationType.Q8_0
BLOCK = "model.layers.0.block_sparse_moe.experts"
_OTHERS = {
    "falcon": ("new",),
    "gemma4_text": ("experts",),
    "llama": ("llama3_tied", "linear_bias", "yarn"),
    "phi3": ("longrope", "longrope_partial", "partial_window"),
    "qwen3": ("tied",),
    "stablelm": ("parallel",),
    "starcoder2": ("window",),
    "mixtral": ("window",),
}
CASES = [tiny.TinyCase(name, "default", kept.FIELDS.get(name, {})) for name in gguf_families()]
for family, names in _OTHERS.items():
    CASES += [case for case in tiny.family_cases(family) if case.variant in names]
assert all(name in VARIANTS[family] for family, names in _OTHERS.items() for name in names)


def facts_of(config: Mapping[str, Any]) -> Any:
    """A model's facts and those of its layers, with numbers in float32, as GGUF has them."""
    model = build_model(config)
    scans = [block.spec for block in blocks_of(model.model, (Mamba, Mamba2))]
    return _rounded([asdict(facts) for facts in (model.facts, *model.attentions(), *scans)])


def _rounded(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return np.float32(value) if isinstance(value, float) else value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_file_stands_for_its_checkpoint(case: tiny.TinyCase, tmp_path: Path) -> None:
    source = open_checkpoint(tiny.write_tiny(case, tmp_path / "source", seed=kept.SEED))
    found = open_checkpoint(write_gguf(source, tmp_path / "model.gguf"))
    assert facts_of(found.config) == facts_of(source.config)
    tied = bool(source.config.get("tie_word_embeddings"))
    unused = ("act_fn.beta", "act_fn.eps", *(["lm_head.weight"] if tied else []))
    expected = [name for name in source.tensors if not name.endswith(unused)]
    assert list(found.tensors) == expected
    for name in expected:
        # Norms that are stored with 1 added are rounded, and decays that are stored as numbers.
        offset = gguf_families()[case.model_type].norm_offset and name.endswith("norm.weight")
        rounded = 1e-6 if offset or name.endswith("A_log") else 0.0
        value = np.squeeze(source.read(name))
        np.testing.assert_allclose(found.read(name).reshape(value.shape), value, rtol=0, atol=rounded, err_msg=name)


@pytest.mark.full
def test_value_heads_in_turn_for_each_key_head(tmp_path: Path) -> None:
    """As llama.cpp has those of gated delta nets."""
    case = tiny.TinyCase("qwen3_5_text", "default")
    source, tokens = open_checkpoint(tiny.write_tiny(case, tmp_path / "source")), tiny.prompt_tokens(case, 20)
    file = write_gguf(source, tmp_path / "model.gguf")
    mlcpipe.compile(file, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    found = mlcpipe.Engine(tmp_path / "bundle").logits(tokens)
    np.testing.assert_allclose(found, tiny.reference_logits(case, tokens), rtol=0, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.everything), True])
def test_rows_of_delta_nets_by_key_head_or_by_part(apart: bool, tmp_path: Path) -> None:
    """As llama.cpp's converter wrote Qwen 3 Next first, and later."""
    case = tiny.TinyCase("qwen3_next", "default")
    source, tokens = open_checkpoint(tiny.write_tiny(case, tmp_path / "source")), tiny.prompt_tokens(case, 20)
    file = write_gguf(source, tmp_path / "model.gguf", apart=apart)
    assert any(name.endswith("in_proj_z.weight") for name in open_checkpoint(file).tensors) == apart
    mlcpipe.compile(file, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    found = mlcpipe.Engine(tmp_path / "bundle").logits(tokens)
    np.testing.assert_allclose(found, tiny.reference_logits(case, tokens), rtol=0, atol=1e-4)


def test_gate_and_up_of_experts_in_one_tensor(tmp_path: Path) -> None:
    case = tiny.TinyCase("mixtral", "default")
    source = open_checkpoint(tiny.write_tiny(case, tmp_path / "source", seed=kept.SEED))
    kind = gguf.GGMLQuantizationType.Q8_0
    one, two = (open_checkpoint(write_gguf(source, tmp_path / f"{fused}.gguf", kind, fused=fused)) for fused in (1, 0))
    assert list(one.tensors) == list(two.tensors) and len(one.weight_files) == 1
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), two.read(name), err_msg=name)
    odd = replace(one.info(f"{BLOCK}.0.w1.weight"), name="blk.0.ffn_gate_up_exps.weight", shape=(4, 3, 64))
    with pytest.raises(ConfigError, match="ffn_gate_up_exps.* has the wrong shape; expected .4, n, k., n even"):
        list(renamed({odd.name: odd}, gguf_families()["mixtral"], one.config))


@pytest.mark.parametrize("model_type", ["phi", "glm"])
def test_q_k_and_v_in_one_tensor(model_type: str, tmp_path: Path) -> None:
    source = open_checkpoint(tiny.write_tiny(tiny.TinyCase(model_type, "default"), tmp_path / "source", seed=kept.SEED))
    files = [write_gguf(source, tmp_path / f"{joined}.gguf", Q8_0, joined=joined) for joined in (True, False)]
    found, expected = map(open_checkpoint, files)
    assert list(found.tensors) == list(expected.tensors)
    for name in found.tensors:
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)


@pytest.mark.fast_cases("llama-Q4_0")
@pytest.mark.full_cases(
    "llama-F16", "gpt_oss-MXFP4", "llama-IQ4_XS", "mixtral-Q4_K+Q3_K",
)  # fmt: skip
@pytest.mark.parametrize("model_type, kind", [*kept.CASES, *kept.MIXED, *kept.SLOTS])
def test_kept_weights_have_the_logits_of_dequantized_ones(model_type: str, kind: str, tmp_path: Path) -> None:
    """Activations in float32: sums of the same products in another order."""
    target = tmp_path / "exact.toml"
    target.write_text(EXACT)
    case, file = kept.kept_file(model_type, kind, tmp_path)
    tokens = tiny.prompt_tokens(case, 20)
    logits, manifest = [], None
    for quantization in ("q0f32", "keep"):
        bundle = tmp_path / str(quantization)
        mlcpipe.compile(file, target=str(target), quantization=quantization, kv_cache_dtype="f32", output=bundle)
        logits.append(mlcpipe.Engine(bundle).logits(tokens))
        manifest = read_manifest(bundle)
    assert manifest is not None and manifest.quantization == "keep"
    halves = any("k_b_proj" in param.name for param in manifest.params)  # in float16, of exact numbers
    bound = (2e-4 if halves else 2e-5) * float(np.abs(logits[0]).max())
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=bound)
    matrices = {
        param.scheme
        for param in manifest.params
        if param.scheme and not re.search(r"\.(gate|router|k_b_proj)\.", param.name)
    }
    assert matrices == {"q0f16" if name == "F16" else name for name in kind.split("+")}


def test_experts_in_two_formats_are_stored_apart(tmp_path: Path) -> None:
    found = open_checkpoint(kept.kept_file("mixtral", "Q4_0+Q8_0", tmp_path)[1])
    target, plan, name = load_target("cpu"), load_recipe("keep"), BLOCK
    own = "model.layers.0.mlp.experts_gate_up"
    stored = {weight.name: weight for weight in stored_weights(found, target, plan)}
    gate, up = (stored[f"{own}.part{i}.weight"] for i in range(2))
    assert gate.shape == up.shape and (gate.scheme, up.scheme) == (native_scheme("Q4_0"), native_scheme("Q8_0"))
    assert gate.sources[1] == (f"{name}.1.w1.weight",) and up.sources[1] == (f"{name}.1.w3.weight",)
    odd = replace(found.info(f"{name}.1.w1.weight"), dtype="Q6_K")
    changed = replace(found, tensors={**found.tensors, odd.name: odd})
    with pytest.raises(
        TargetError, match=r"several formats; expected one; found Q4_0, Q6_K; add --quantization q4f16_1"
    ):
        stored_weights(changed, target, plan)


@pytest.mark.fast_cases("qwen2")
@pytest.mark.full_cases("gemma2", "mixtral")  # norms that are rounded, experts
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "mixtral"])
def test_logits_are_those_of_the_dequantized_checkpoint(model_type: str, tmp_path: Path) -> None:
    """Blocks of Q8_0, dequantized by the `gguf` package into safetensors, and the file itself, compiled in float32."""
    safetensors = pytest.importorskip("safetensors.numpy")
    kind = Q8_0
    case = tiny.TinyCase(model_type, "default", kept.FIELDS.get(model_type, {}))
    folder = tiny.write_tiny(case, tmp_path / "source", seed=kept.SEED)
    source = open_checkpoint(folder)
    file = write_gguf(source, tmp_path / "model.gguf", kind)
    values = {name: source.read(name) for name in source.tensors}
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in values.items()
    }
    safetensors.save_file(rounded, folder / "model.safetensors")
    tokens = tiny.prompt_tokens(case, 20)
    logits = []
    for checkpoint, bundle in ((folder, tmp_path / "expected"), (file, tmp_path / "found")):
        mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=bundle)
        logits.append(mlcpipe.Engine(bundle).logits(tokens))
    # The same weights and kernels; Gemma's norms alone are rounded.
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4 if model_type == "gemma2" else 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"beta": [0.5, 0.25]}, "xielu.beta in m.gguf; expected 0.5 in all layers; found 0.25"),
        ({"alpha_n": [0.1, float("nan")]}, "xielu.alpha_n in m.gguf; expected finite numbers"),
        ({"alpha_p": [0.1]}, "xielu.alpha_p in m.gguf; expected an array of 2 numbers"),
    ],
)
def test_numbers_of_layers_that_are_refused(numbers: dict[str, list[float]], message: str, tmp_path: Path) -> None:
    usual = {"alpha_n": [0.1, 0.2], "alpha_p": [0.1, 0.2], "beta": [0.5] * 2, "eps": [-1e-6] * 2}
    values = {f"xielu.{key}": np.array(one, np.float32) for key, one in {**usual, **numbers}.items()}
    config = {"num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=message):
        list(numbers_of_layers(Metadata(values, "m.gguf"), gguf_families()["apertus"], config, tmp_path))


def test_norms_of_heads_are_the_rows_of_a_matrix(tmp_path: Path) -> None:
    odd = TensorInfo("blk.0.attn_q_norm.weight", (16,), "float32", tmp_path, 0, 64)
    config = {"model_type": "stablelm", "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match=r"attn_q_norm.*at most 4096 rows.*found \[16\]"):
        list(renamed({odd.name: odd}, gguf_families()["stablelm"], config))


def test_factors_of_queries_that_differ_by_layer(tmp_path: Path) -> None:
    """Muse Glimmer's, which files have as the weights of norms."""
    source = tiny.write_tiny(tiny.TinyCase("muse_glimmer_text", "default"), tmp_path / "source", seed=kept.SEED)
    header = read_header(write_gguf(open_checkpoint(source), tmp_path / "model.gguf"))
    tensors = {one.name: one for one in header.tensors}
    of_keys, of_queries = (f"blk.1.attn_{x}_norm.weight" for x in "kq")
    assert family_of(header.metadata, tensors)[1]["qk_scale_factor"] == 3.87
    with pytest.raises(ConfigError, match=f"{of_keys}; expected 1 alone"):
        family_of(header.metadata, {**tensors, of_keys: tensors[of_queries]})
    with pytest.raises(ConfigError, match=f"no tensor {of_queries}.*expected 16 numbers"):
        family_of(header.metadata, {name: one for name, one in tensors.items() if name != of_queries})
