"""Logits: in one pass, in chunks, step by step, and of every quantization against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mlcpipe
from mlcpipe import Engine
from mlcpipe.bundle import Manifest
from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.recipe import recipe_text
from mlcpipe.quantization.scheme import load_scheme, scheme_names
from mlcpipe.support.defaults import SEARCH
from tests.conftest import QUICK, UNOPTIMIZED, exact_target

if TYPE_CHECKING:
    from tests.conftest import Bundles

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 256, 100)]
Array = NDArray[np.float32]


def test_one_pass_is_step_by_step(tiny: Engine) -> None:
    rows = tiny.logits(TOKENS)
    assert rows.dtype == np.float32 and rows.shape == (100, tiny.vocab_size)
    for prefill in (1, 2, 17, 99, 100):
        steps = tiny.logits_stepwise(TOKENS, prefill_tokens=prefill)
        np.testing.assert_allclose(steps, rows[prefill - 1 :], rtol=0, atol=1e-4)


def test_a_pass_leaves_nothing_behind(tiny: Engine) -> None:
    first = tiny.logits(TOKENS)
    tiny.generate(TOKENS[:30], max_tokens=5, ignore_eos=True)
    np.testing.assert_array_equal(tiny.logits(TOKENS), first)


def test_chunks_of_a_prompt_are_one_pass(tiny: Engine, tiny_bundles: Bundles, tmp_path: Path) -> None:
    """A user's own target file with a smaller chunk: 100 tokens are 4 chunks instead of one."""
    target = tmp_path / "small.toml"
    target.write_text(f'base = "cpu-native"\n{UNOPTIMIZED}[limits]\nmax_prefill_chunk = 32\n')
    bundle = mlcpipe.compile(
        tiny_bundles.checkpoint, target=str(target), quantization="q0f32", output=tmp_path / "bundle"
    )
    engine = Engine(bundle)
    assert (engine.manifest.model.prefill_chunk, tiny.manifest.model.prefill_chunk) == (32, 256)
    assert engine.manifest.target.name == "small"
    expected = tiny.logits(TOKENS)
    np.testing.assert_allclose(engine.logits(TOKENS), expected, rtol=0, atol=1e-4)
    steps = engine.logits_stepwise(TOKENS, prefill_tokens=70)
    np.testing.assert_allclose(steps, expected[69:], rtol=0, atol=1e-4)


def dequantized(checkpoint: Path, manifest: Manifest, folder: Path) -> Path:
    """The checkpoint with the numbers that the bundle stands for, in float32, by `Scheme.unpack`.

    Which tensors are quantized is what the manifest says; the others are rounded to the dtype that is stored.
    """
    from safetensors.numpy import save_file

    source = open_checkpoint(checkpoint)
    tensors: dict[str, Array] = {}
    for param in manifest.params:
        for name in param.sources:
            w = source.read(name)
            if param.name.endswith("q_weight"):
                scheme = SCHEMES.get(param.scheme) or load_scheme(param.scheme)
                tensors[name] = unpack(scheme, pack(scheme, w, method=SEARCH), w.shape[1])
            elif not param.name.endswith(("q_scale", "q_sub")):
                tensors[name] = w.astype(param.dtype).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"torch_dtype": "float32", "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_float_activations(checkpoint: Path, quantization: str, folder: Path) -> Engine:
    """The checkpoint compiled with activations in float32, where the default may take them in int8."""
    target = exact_target(folder)
    bundle = mlcpipe.compile(checkpoint, target=target, quantization=quantization, output=folder / "bundle")
    return Engine(bundle, threads=2)


def transformers_logits(folder: Path, tokens: list[int], *, half: bool) -> Any:
    """Logits in float32; with `half` keys and values are rounded to float16."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def rounded(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        return eager_attention_forward(module, q, k.half().float(), v.half().float(), mask, **options)

    transformers.AttentionInterface.register("mlcpipe_half", rounded)
    ALL_MASK_ATTENTION_FUNCTIONS.register("mlcpipe_half", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="mlcpipe_half" if half else "eager", local_files_only=True
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


def compare(found: Array, expected: Array, *, half: bool) -> None:
    """Within float32's rounding.

    With `half` another order of sums flips a rounding here and there: seen are 2.6e-3 at most and 1.2e-4 in the mean,
    where attention without these roundings is 8e-3 and 7e-4 off (x86-64, AVX-512, 2026-11). In a second chunk the
    attention to the chunk and that to the cache are rounded before they are merged: 4.4e-3 and 1.5e-4.
    """
    error = np.abs(found - expected)
    assert error.max() < (8e-3 if half else 1e-4)
    assert error.mean() < (3e-4 if half else 1e-5)
    assert np.abs(expected).max() > 3  # so that the bounds mean something


@pytest.mark.parametrize("quantization", scheme_names())
@pytest.mark.fast_cases("q4f16_1", "q0f32")
@pytest.mark.full_cases(*(name for name in scheme_names() if not name.startswith("q8f32")))  # q8f16 with other scales
def test_every_quantization_computes_what_its_weights_say(
    tiny_bundles: Bundles, quantization: str, tmp_path: Path
) -> None:
    """Activations are float32; with float16 schemes the KV cache is float16."""
    engine = with_float_activations(tiny_bundles.checkpoint, quantization, tmp_path)
    reference = dequantized(tiny_bundles.checkpoint, engine.manifest, tmp_path / "checkpoint")
    half = engine.manifest.model.kv_dtype == "float16"
    expected = transformers_logits(reference, TOKENS, half=half)
    compare(engine.logits(TOKENS), expected, half=half)
    compare(engine.logits_stepwise(TOKENS, prefill_tokens=60), expected[59:], half=half)


@pytest.mark.full
def test_a_recipe_computes_what_its_weights_say(tiny_bundles: Bundles, tmp_path: Path) -> None:
    """Matrices of one input in three schemes, and blocks beside MLC's groups."""
    recipe = tmp_path / "recipe.toml"
    tensors = {"*.v_proj.weight": "q8f16_1", "*.k_proj.weight": "Q5_0", "*.o_proj.weight": "q3f16_1",
               "*.1.mlp.up_proj.weight": "q0f16", "model.embed_tokens.weight": "Q8_0"}  # fmt: skip
    recipe.write_text(recipe_text("q4f16_1", tensors.items()))
    engine = with_float_activations(tiny_bundles.checkpoint, str(recipe), tmp_path)
    assert {param.scheme for param in engine.manifest.params if param.scheme} == {*tensors.values(), "q4f16_1"}
    reference = dequantized(tiny_bundles.checkpoint, engine.manifest, tmp_path / "checkpoint")
    expected = transformers_logits(reference, TOKENS, half=True)
    compare(engine.logits(TOKENS), expected, half=True)
    compare(engine.logits_stepwise(TOKENS, prefill_tokens=60), expected[59:], half=True)


@pytest.mark.full
@pytest.mark.parametrize(
    "quantization", [*(pytest.param(one, marks=pytest.mark.everything) for one in ("q4f16_1", "q4f16_k")), "q4f16_m"]
)
def test_the_demo_model_over_two_chunks(demo_bundles: Bundles, quantization: str, tmp_path: Path) -> None:
    demo = with_float_activations(demo_bundles.checkpoint, quantization, tmp_path)
    tokens = [int(token) for token in np.random.default_rng(4).integers(3, demo.vocab_size, 600)]
    assert demo.manifest.model.prefill_chunk < len(tokens)
    reference = dequantized(demo_bundles.checkpoint, demo.manifest, tmp_path / "checkpoint")
    compare(demo.logits(tokens), transformers_logits(reference, tokens, half=True), half=True)


@pytest.mark.parametrize("kv_cache_dtype", ["f32", "f16", "q8", "q4"])
@pytest.mark.fast_cases("q8")
def test_the_kv_cache_dtype_is_what_was_asked_for(tiny_bundles: Bundles, kv_cache_dtype: str, tmp_path: Path) -> None:
    """Logits within a bound of those with a float32 cache, in a pass, in chunks and step by step; and its bytes."""
    options = {"target": QUICK, "quantization": "q0f32", "kv_cache_dtype": kv_cache_dtype}
    bundle = mlcpipe.compile(tiny_bundles.checkpoint, output=tmp_path / "bundle", **options)
    engine, exact = Engine(bundle), Engine(tiny_bundles["q0f32"])
    model, config = engine.manifest.model, json.loads((bundle / "config.json").read_text())
    assert model.kv_dtype == {"f32": "float32", "f16": "float16"}.get(kv_cache_dtype, kv_cache_dtype)
    dim = config["hidden_size"] // config["num_attention_heads"]
    numbers = 2 * model.num_layers * config["num_key_value_heads"] * dim
    scales = 2 * numbers // dim * (dim // 32 if dim % 32 == 0 else 1)
    nbytes = {"f32": 4 * numbers, "f16": 2 * numbers, "q8": numbers + scales, "q4": numbers // 2 + scales}
    assert engine.manifest.kv_bytes_per_token == nbytes[kv_cache_dtype]
    expected = exact.logits(TOKENS)
    limit = {"f32": 5e-5, "f16": 2e-2, "q8": 2e-1, "q4": 2}[kv_cache_dtype]
    rows = engine.logits(TOKENS)
    assert np.abs(rows - expected).max() < limit
    # A token sees the same keys in every chunk, so that chunks change no more than the order of sums.
    steps = engine.logits_stepwise(TOKENS, prefill_tokens=60)
    assert np.abs(steps - rows[59:]).max() < limit / 2


def test_an_unknown_kv_cache_dtype_is_refused(tiny_bundles: Bundles, tmp_path: Path) -> None:
    with pytest.raises(mlcpipe.errors.ConfigError, match="KV cache dtype.*auto, f32, f16, q8, q4.*q5"):
        mlcpipe.compile(tiny_bundles.checkpoint, kv_cache_dtype="q5", output=tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
