"""Text by diffusion as its authors' program writes it, over a transformers backbone whose mask is given as blocks.

The loop is SDAR's `block_diffusion_generate` (JetAstra/SDAR, generate.py) in numpy, and with an editing threshold that of
LLaDA 2.1 (`generate` of its modeling_llada2_moe.py, `eos_early_stop`), with three differences, all of which mlcpipe has
on purpose: places that are decided are never overwritten (where a step's share exceeds the masks that are
left, the program's `topk` also takes decided ones), the mask itself is not drawn, and random numbers are mlcpipe's.
Every step is a pass over all tokens: finished blocks see nothing after them, so this equals a cache of their keys.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from mlcpipe.runtime.random_numbers import Uniforms
from mlcpipe.runtime.serving.canvas import Canvas, Denoising
from tests.models import tiny

CASE = tiny.TinyCase("qwen3", "default")
EXPERTS = tiny.TinyCase("glm4_moe", "default", {"use_qk_norm": True})  # the layers of LLaDA 2
SEED = 0
MASK = tiny.TOKENS - 1
CONTEXT = 128


@dataclass(frozen=True)
class How:
    """Settings of an answer."""

    block: int = 4
    steps: int = 4
    threshold: float = 0.85
    temperature: float = 0.0
    seed: int = 0
    editing: float | None = None
    post_steps: int = 16


def write_sdar(folder: Path) -> Path:
    """A tiny SDAR checkpoint: the weights of a tiny Qwen 3."""
    tiny.write_tiny(CASE, folder, seed=SEED)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "sdar", "architectures": ["SDARForCausalLM"], "block_size": 4, "mask_token_id": MASK}
    path.write_text(json.dumps(config))
    return folder


def write_llada2(folder: Path) -> Path:
    """A tiny LLaDA 2 checkpoint: the weights of a tiny GLM 4 MoE, by the names of its authors' program."""
    tiny.write_tiny(EXPERTS, folder, seed=SEED)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    renamed = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {renamed.get(name, name): value for name, value in config.items() if not name.startswith("num_nextn")}
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    config |= {"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"], "mask_token_id": MASK}
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for prefix in [name.removesuffix("q_proj.weight") for name in tensors if name.endswith("q_proj.weight")]:
        parts = [tensors.pop(f"{prefix}{one}_proj.weight") for one in "qkv"]
        tensors[f"{prefix}query_key_value.weight"] = np.concatenate(parts)
    save_file({_llada2_name(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def _llada2_name(name: str) -> str:
    for own, published in (
        ("self_attn.o_proj", "attention.dense"),
        ("self_attn.q_norm", "attention.query_layernorm"),
        ("self_attn.k_norm", "attention.key_layernorm"),
        ("self_attn.", "attention."),
        ("e_score_correction_bias", "expert_bias"),
        ("embed_tokens", "word_embeddings"),
    ):
        name = name.replace(own, published)
    return name


@cache
def _backbone(case: tiny.TinyCase) -> Any:
    return tiny.build_model(case, SEED)


def logits(tokens: Sequence[int], block: int, case: tiny.TinyCase = CASE) -> NDArray[np.float32]:
    """Logits f32[n, V] of the backbone whose tokens see their whole block and all before it."""
    positions = np.arange(len(tokens))
    sees = positions[None, :] < ((positions // block + 1) * block)[:, None]
    mask = torch.tensor(np.where(sees, 0.0, -np.inf)[None, None], dtype=torch.float32)
    with torch.no_grad():
        found = _backbone(case)(torch.tensor([list(tokens)]), attention_mask=mask, use_cache=False)
    numbers: NDArray[np.float32] = found.logits[0].numpy()
    return numbers


def generate(prompt: Sequence[int], count: int, how: How, stop: int = -1, case: tiny.TinyCase = CASE) -> list[int]:
    """The answer's tokens, to the end of the block with the last, or with `stop`, in it; cut there."""
    text, end = list(prompt), len(prompt) + count
    uniforms = Uniforms(how.seed)
    while len(text) < end and stop not in text[len(prompt) :]:
        begin = len(text) // how.block * how.block
        own = range(len(text), begin + how.block)
        text += [MASK] * len(own)
        post_steps = 0
        for step in itertools.count():
            masked = [place for place in own if text[place] == MASK]
            post_steps += not masked
            if not masked and (how.editing is None or post_steps > how.post_steps):
                break
            asked = masked if how.editing is None else [*own]
            rows = logits(text, how.block, case)[asked]
            rows[:, tiny.TOKENS :] = rows[:, MASK] = -np.inf
            drawn = {place: _draw(row, how, place, step, uniforms) for row, place in zip(rows, asked)}
            share = how.block // how.steps + (step < how.block % how.steps)
            confidence = np.array([drawn[place][1] for place in masked])
            sure = np.flatnonzero(confidence > how.threshold)
            kept = sure if len(sure) >= share else np.argsort(-confidence, kind="stable")[:share]
            decided = [place for place in asked if place not in masked and drawn[place][0] != text[place]]
            edits = [place for place in decided if how.editing is not None and drawn[place][1] > how.editing]
            for place in (*(masked[one] for one in kept), *edits):
                text[place] = drawn[place][0]
            if not masked and not edits:
                break
    answer = text[len(prompt) : end]
    return answer[: answer.index(stop) + 1] if stop in answer else answer


def _draw(row: NDArray[np.float32], how: How, position: int, step: int, uniforms: Uniforms) -> tuple[int, float]:
    """A token, and its probability."""
    weights = np.exp((row - row.max()).astype(np.float64) / (how.temperature or 1.0))
    if not how.temperature:
        return int(row.argmax()), 1 / weights.sum()
    number = Canvas(Denoising(how.block, how.steps, how.threshold, MASK), [], step).number(position)
    token = int(np.searchsorted(np.cumsum(weights), uniforms.at(number) * weights.sum(), side="right"))
    return token, weights[token] / weights.sum()
