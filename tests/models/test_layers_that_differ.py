"""Layers of one model with other heads and windows, which no published family here has yet, against numpy."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import mlcpipe
from mlcpipe import Engine
from mlcpipe.compiler import export
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import build_from
from mlcpipe.nn.decoder import decoder
from mlcpipe.runtime.chat_file import SavedChat
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.prefix_pages import copy_prefix, restore_prefix
from tests.conftest import QUICK
from tests.models.stepping import Steps

Array = NDArray[Any]
# Query heads, KV heads, window (0: all) of each layer.
LAYERS = ((4, 2, 0), (2, 1, 24), (4, 4, 40), (2, 2, 0))
HIDDEN, DIM, INNER, VOCAB = 64, 16, 96, 300
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": len(LAYERS), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    base = read_base(config, Defaults(positions=2048))
    specs = [replace(base.attention(window=w or None), num_heads=q, num_kv_heads=kv) for q, kv, w in LAYERS]
    return decoder(base, specs)


def weights() -> dict[str, Array]:
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN)}
    for i, (q, kv, _) in enumerate(LAYERS):
        sizes = {"q": (q * DIM, HIDDEN), "k": (kv * DIM, HIDDEN), "v": (kv * DIM, HIDDEN), "o": (HIDDEN, q * DIM)}
        shapes |= {f"model.layers.{i}.self_attn.{name}_proj": shape for name, shape in sizes.items()}
        shapes |= {f"model.layers.{i}.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"model.layers.{i}.mlp.down_proj"] = HIDDEN, INNER
    names = [f"model.layers.{i}.{name}_layernorm" for i in range(len(LAYERS)) for name in ("input", "post_attention")]
    made = {f"{name}.weight": (draw.standard_normal(shape) * 0.2).astype("f4") for name, shape in shapes.items()}
    return made | {f"{name}.weight": np.ones(HIDDEN, "f4") for name in (*names, "model.norm")}


def reference(given: dict[str, Array], tokens: list[int]) -> Array:
    """Logits [n, VOCAB] in float64."""

    def times(x: Array, name: str) -> Array:
        return x @ given[f"{name}.weight"].astype("f8").T

    def norm(x: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    n, half = len(tokens), DIM // 2
    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None]

    def rope(x: Array) -> Array:
        turned = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([turned.real, turned.imag], -1)

    x, (i, j) = given["model.embed_tokens.weight"].astype("f8")[tokens], np.indices((n, n))
    for layer, (heads, kv, window) in enumerate(LAYERS):
        at, y = f"model.layers.{layer}", norm(x)
        q, k, v = (times(y, f"{at}.self_attn.{name}_proj").reshape(n, -1, DIM) for name in "qkv")
        k, v = (np.repeat(one, heads // kv, 1) for one in (rope(k), v))
        scores = np.einsum("ihd,jhd->hij", rope(q), k) / DIM**0.5
        scores = np.where((j <= i) & (i - j < (window or n)), scores, -np.inf)
        seen = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", seen / seen.sum(-1, keepdims=True), v).reshape(n, -1)
        x = x + times(mixed, f"{at}.self_attn.o_proj")
        gate, up = (times(norm(x), f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + times(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    return times(norm(x), "lm_head")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "build_model", lambda config: build_from(config, build))
        yield mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=checkpoint / "bundle")


def words(count: int) -> list[int]:
    found: list[int] = np.random.default_rng(1).integers(0, VOCAB, count).tolist()
    return found


def test_logits_are_those_of_numpy(bundle: Path) -> None:
    """Three groups of pages; of a prompt, and of decode."""
    engine, tokens = Engine(bundle), words(120)
    assert [state.window for state in engine.manifest.states] == [window for _, _, window in LAYERS]
    expected = reference(weights(), tokens)
    np.testing.assert_allclose(engine.logits(tokens), expected, atol=2e-4)
    np.testing.assert_allclose(engine.logits_stepwise(tokens, prefill_tokens=40), expected[39:], atol=2e-4)


def test_a_saved_prefix_has_the_windows(bundle: Path) -> None:
    """It has fewer pages of layers with a window, and an answer after it is the one that was computed whole."""
    loaded, prompt = load_bundle(bundle), words(120)
    one, other = Steps(loaded), Steps(loaded)
    first = one.submit(prompt, 20)
    one.run()
    (count, states) = _result(copy_prefix(one.core, prompt[:112], ""))
    assert count == 112 and [len(units) for units in states] == [7, 2, 3, 7]
    _result(restore_prefix(other.core, SavedChat(prompt[:112], 112, None, states), ""))
    again = other.submit(prompt, 20)
    other.run()
    assert again.cached == 112
    np.testing.assert_array_equal(other.logits[again.id], one.logits[first.id])


def test_a_saved_chat_has_the_windows(bundle: Path, tmp_path: Path) -> None:
    one, other = Engine(bundle), Engine(bundle)
    one.prefill(words(100))
    tokens = [one.decode(7) for _ in range(12)]
    one.save(tmp_path / "chat")
    size = (tmp_path / "chat").stat().st_size
    assert size < 112 * one.manifest.kv_bytes_per_token * 0.8, "pages that a window has left behind are not saved"
    other.load(tmp_path / "chat")
    assert [one.decode(token) for token in tokens] == [other.decode(token) for token in tokens]
    # Less of it than all lacks the windows of what follows: it is computed again.
    cached = [
        other.generate(
            tokens, sampling=mlcpipe.SamplingParams(temperature=0.0), max_tokens=1, ignore_eos=True
        ).stats.cached_tokens
        for tokens in ([*other.model.tokens, 1], words(100))
    ]
    assert cached == [124, 0]


def _result(work: Generator[None, None, Any]) -> Any:
    """What a generator returns."""
    try:
        while True:
            next(work)
    except StopIteration as done:
        return done.value
