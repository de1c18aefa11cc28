"""SDAR (Cheng et al. 2025): Qwen 3 whose tokens see their whole block, which is denoised, and all before it.

Models: SDAR 1.7B, 4B and 8B, with blocks of 4 to 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.bundle.model_info import MAX_BLOCK, MAX_POST_STEPS, DiffusionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.models import qwen3
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an SDAR config.json. Raises ConfigError for unsupported fields."""
    return denoising(qwen3.build(config), Fields(config), mask=151669, block=4, threshold=0.85)


def denoising(model: CausalLM, fields: Fields, *, mask: int, block: int, threshold: float) -> CausalLM:
    """A model that denoises blocks as its file says, or as the family's published program does.

    Raises ConfigError for blocks that no kernel has, and for layers whose keys depend on what comes after.
    """
    block = fields.integer(_stated(fields, "block_size", "block_length"), block, high=MAX_BLOCK)
    if MAX_BLOCK % block:
        expected = f"a divisor of {MAX_BLOCK}, such as 4, 16 or 32"
        raise ConfigError("field block_size", where=fields.where, expected=expected, found=block)
    if any(of.window for of in model.attentions()) or any(rope.depends_on_length for rope in model.facts.ropes):
        raise ConfigError(
            "layers of a model that denoises blocks", where=fields.where,
            expected="no window, and frequencies of RoPE that do not depend on the length", found="one of them",
        )  # fmt: skip
    info = DiffusionInfo(
        mask=fields.integer("mask_token_id", mask, low=0, high=model.facts.vocab_size - 1),
        block=block,
        steps=fields.integer(_stated(fields, "denoising_steps", "steps"), block, high=block),
        threshold=fields.number(_stated(fields, "confidence_threshold", "threshold"), threshold, low=1e-6, high=1.0),
        editing_threshold=fields.optional_number("editing_threshold", None, low=0.0, high=1.0),
        max_post_steps=fields.integer("max_post_steps", 16, low=0, high=MAX_POST_STEPS),
    )
    model.facts = replace(model.facts, diffusion=info)
    model.model.facts = model.facts
    return model


def _stated(fields: Fields, name: str, other: str) -> str:
    """Of two names of a field, the one that the file has."""
    return other if fields.get(name) is None and fields.get(other) is not None else name
