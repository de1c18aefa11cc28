"""Dream (Ye et al. 2025): Qwen 2 whose tokens all see each other, which denoises whole answers.

Models: Dream 7B Base and Instruct, Dream-Coder 7B, DiffuCoder 7B. Logits are those of the next token, as Qwen's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.bundle.model_info import Order
from mlcpipe.models import qwen2
from mlcpipe.models.diffusion.llada import whole_answer
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields

CONTEXT = 2048  # tokens that it was trained with; files state those of Qwen
ORDERS: tuple[Order, ...] = ("entropy", "origin", "maskgit_plus", "topk_margin")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Dream config.json. Raises ConfigError for unsupported fields."""
    model = qwen2.build(config)
    return whole_answer(model, Fields(config), mask=151666, orders=ORDERS, shifted=True, context=CONTEXT)
