"""Answers of Dream and LLaDA as their authors' programs write them, over transformers backbones whose tokens all see
each other.

The loops are Dream's `_sample` (generation_utils.py of its files) and LLaDA's `generate` (ML-GSAI/LLaDA, generate.py)
in numpy. Random numbers are mlcpipe's, by step and position, the mask itself is not drawn, of equal measures the first
counts, and tokens after one that ends the answer are cut.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mlcpipe.runtime.random_numbers import Uniforms
from tests.models import tiny
from tests.models.denoised import MASK, SEED, logits

DREAM = tiny.TinyCase("qwen2", "default")
LLADA = tiny.TinyCase("llama", "default")
_STEP = 1 << 40  # random numbers of a step
_ALL = 1 << 20  # tokens that see each other
_LLADA_FIELDS = {
    "hidden_size": "d_model", "intermediate_size": "mlp_hidden_size", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "hidden_act": "activation_type",
    "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
    "rms_norm_eps": "rms_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
_LLADA_NAMES = (
    ("model.layers", "model.transformer.blocks"), ("model.embed_tokens", "model.transformer.wte"),
    ("model.norm", "model.transformer.ln_f"), ("lm_head", "model.transformer.ff_out"), ("self_attn.o_proj", "attn_out"),
    ("self_attn.", ""), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"),
    ("mlp.gate_proj", "ff_proj"), ("mlp.up_proj", "up_proj"), ("mlp.down_proj", "ff_out"),
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Settings of an answer."""

    remasking: str
    tokens: int = 24
    steps: int = 24
    block: int | None = None
    temperature: float = 0.0
    alg_temp: float | None = None
    seed: int = 0


def write_dream(folder: Path) -> Path:
    """A tiny Dream checkpoint: the weights of a tiny Qwen 2."""
    tiny.write_tiny(DREAM, folder, seed=SEED)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "model_type": "Dream", "architectures": ["DreamModel"]}
    path.write_text(json.dumps({**config, "mask_token_id": MASK}))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }} w5 w6")
    return folder


def write_llada(folder: Path) -> Path:
    """A tiny LLaDA checkpoint: the weights of a tiny Llama, by the names of its authors' program."""
    tiny.write_tiny(LLADA, folder, seed=SEED)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    made = {published: config[name] for name, published in _LLADA_FIELDS.items()}
    made |= {"model_type": "llada", "architectures": ["LLaDAModelLM"], "mask_token_id": MASK, "include_bias": False}
    made |= {"block_type": "llama", "rope": True, "layer_norm_type": "rms", "embedding_size": config["vocab_size"]}
    made |= {"rope_theta": config["rope_parameters"]["rope_theta"], "eos_token_id": config["eos_token_id"]}
    path.write_text(json.dumps(made))
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        for own, published in _LLADA_NAMES:
            name = name.replace(own, published)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    return folder


def all_logits(case: tiny.TinyCase, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Logits f32[n, V] of a text whose tokens all see each other."""
    return logits(tokens, _ALL, case)


def dream(prompt: Sequence[int], how: Asked, never: Sequence[int] = ()) -> list[int]:
    """The tokens of Dream's answer, without those that are `never` drawn."""
    x = [*prompt, *[MASK] * how.tokens]
    times = torch.linspace(1, 1e-3, how.steps + 1)
    order = Uniforms(how.seed, 1)
    for i in range(how.steps):
        masked = [place for place, token in enumerate(x) if token == MASK]
        if not masked:
            break
        rows = _allowed(all_logits(DREAM, x)[[place - 1 for place in masked]])
        rows[:, list(never)] -= 100
        t, s, last = times[i], times[i + 1], i == how.steps - 1
        drawn = [_sampled(row, how, i * _STEP + place) for row, place in zip(rows, masked)]
        if how.remasking == "origin":
            part = torch.tensor(1.0) if last else 1 - s / t
            chosen = [j for j, place in enumerate(masked) if bool(torch.tensor(order.at(i * _STEP + place)) < part)]
        else:
            count = len(masked) if last else int(torch.tensor(len(masked)) * (1 - s / t))
            keys = np.array([_measure(probabilities, token, how.remasking) for token, probabilities in drawn])
            if how.alg_temp:
                numbers = np.array([order.at(i * _STEP + place) for place in masked])
                keys = keys / how.alg_temp - np.log(-np.log(numbers))
            chosen = [int(j) for j in np.argsort(-keys, kind="stable")[:count]]
        for j in chosen:
            x[masked[j]] = drawn[j][0]
    return x[len(prompt) :]


def llada(prompt: Sequence[int], how: Asked) -> list[int]:
    """The tokens of LLaDA's answer."""
    x = [*prompt, *[MASK] * how.tokens]
    block = how.block or how.tokens
    blocks = how.tokens // block
    steps, order = how.steps // blocks, Uniforms(how.seed, 1)
    for number in range(blocks):
        begin = len(prompt) + number * block
        for i in range(steps):
            masked = [place for place in range(begin, begin + block) if x[place] == MASK]
            count = block // steps + (i < block % steps)
            step = (number * steps + i) * _STEP
            rows = _allowed(all_logits(LLADA, x)[masked])
            drawn = [_sampled(row, how, step + place)[0] for row, place in zip(rows, masked)]
            if how.remasking == "random":
                keys = np.array([order.at(step + place) for place in masked])
            else:
                keys = np.array([_softmax(row)[token] for row, token in zip(rows, drawn)])
            for j in np.argsort(-keys, kind="stable")[:count]:
                x[masked[j]] = drawn[j]
    return x[len(prompt) :]


def _allowed(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    wide[:, tiny.TOKENS :] = wide[:, MASK] = -np.inf
    return wide


def _softmax(row: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp((row - row.max()) / temperature)
    found: NDArray[np.float64] = weights / weights.sum()
    return found


def _sampled(row: NDArray[np.float64], how: Asked, number: int) -> tuple[int, NDArray[np.float64]]:
    """A token, and the probabilities that it was drawn with."""
    probabilities = _softmax(row, how.temperature or 1.0)
    if not how.temperature:
        return int(row.argmax()), probabilities
    uniform = Uniforms(how.seed).at(number)
    return int(np.searchsorted(np.cumsum(probabilities), uniform, side="right")), probabilities


def _measure(probabilities: NDArray[np.float64], token: int, remasking: str) -> float:
    """Confidence as Dream's `sample_tokens` has it."""
    if remasking == "entropy":
        return float((probabilities * np.log(probabilities + 1e-10)).sum())
    if remasking == "topk_margin":
        second, first = np.sort(probabilities)[-2:]
        return float(first - second)
    return float(probabilities[token])
