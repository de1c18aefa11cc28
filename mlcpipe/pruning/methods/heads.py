"""Removes KV heads and the query heads that read them; output matrices compensate for them by least squares."""

from __future__ import annotations

from collections.abc import Iterator

from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.pruning.units import Units, remove_units
from mlcpipe.pruning.work import PrunedTensor, Work

GRAM, UNITS = True, "KV heads"


def allowed(model: CausalLM) -> list[int]:
    """Possible numbers of KV heads; transformers requires a llama's hidden size to be a multiple of its query heads."""
    facts, of = model.facts, model.attentions()[0]
    group, divided = of.num_heads // of.num_kv_heads, facts.model_type == "llama"
    return [n for n in range(1, of.num_kv_heads + 1) if not divided or facts.hidden_size % (n * group) == 0]


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    of = work.model.attentions()[0]
    group = of.num_heads // of.num_kv_heads
    sizes = {"num_attention_heads": work.keep * group, "num_key_value_heads": work.keep, "head_dim": of.head_dim}
    work.config.update(sizes)
    rows = {"q": group * of.head_dim, "k": of.head_dim, "v": of.head_dim}
    producers = {f"self_attn.{of}_proj.{part}": n for of, n in rows.items() for part in ("weight", "bias")}
    units = Units(of.num_kv_heads, group * of.head_dim, "self_attn.o_proj.weight", producers)
    return remove_units(work, units)
