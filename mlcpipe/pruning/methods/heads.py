"""Removes KV heads and the query heads that read them; output matrices compensate for them by least squares."""

from __future__ import annotations

from collections.abc import Iterator

from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.pruning.units import Units, remove_units
from mlcpipe.pruning.work import PrunedTensor, Work

GRAM, UNITS = True, "KV heads"


def allowed(model: CausalLM) -> list[int]:
    """Possible numbers of KV heads; transformers requires a llama's hidden size to be a multiple of its query heads."""
    facts = model.facts
    group, divided = facts.num_heads // facts.num_kv_heads, facts.model_type == "llama"
    return [n for n in range(1, facts.num_kv_heads + 1) if not divided or facts.hidden_size % (n * group) == 0]


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    facts = work.model.facts
    group = facts.num_heads // facts.num_kv_heads
    sizes = {"num_attention_heads": work.keep * group, "num_key_value_heads": work.keep, "head_dim": facts.head_dim}
    work.config.update(sizes)
    rows = {"q": group * facts.head_dim, "k": facts.head_dim, "v": facts.head_dim}
    producers = {f"self_attn.{of}_proj.{part}": n for of, n in rows.items() for part in ("weight", "bias")}
    units = Units(facts.num_kv_heads, group * facts.head_dim, "self_attn.o_proj.weight", producers)
    return remove_units(work, units)
