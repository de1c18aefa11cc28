"""Builds a checkpoint's draft head into a model, and describes it for the manifest."""

from __future__ import annotations

from mlcpipe.bundle import AssistantInfo, EagleInfo
from mlcpipe.checkpoint.draft_heads import AssistantHead, DraftHead, EagleHead, MedusaHeads, OwnHead
from mlcpipe.models.gemma4_text import build_assistant
from mlcpipe.models.llama import DEFAULTS
from mlcpipe.nn import assistant, draft_head, eagle, medusa
from mlcpipe.nn.base_config import read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import build_from
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.layer_head import LayerHead


def build_draft_head(head: DraftHead, model: CausalLM) -> draft_head.DraftHead | None:
    """The head for a model, None for one of its checkpoint's that the family does not read.

    Raises ConfigError for unsupported fields of its configuration.
    """
    facts = model.facts
    if isinstance(head, OwnHead):
        return model.own_head
    if isinstance(head, MedusaHeads):
        return medusa.MedusaHeads(facts.hidden_size, facts.vocab_size, head.heads, head.blocks)
    if isinstance(head, AssistantHead):
        known = head.clusters
        clusters = None if known is None else assistant.Clusters(known, head.centroids, head.chosen)
        return build_from(head.config, lambda config: build_assistant(config, model, clusters))
    assert isinstance(head, EagleHead)
    config = {name: value for name, value in head.config.items() if name not in ("architectures", "layer_types")}
    base = build_from(config | {"vocab_size": facts.vocab_size}, lambda fields: read_base(fields, DEFAULTS))
    return eagle.EagleHead(
        base, head.layers, facts.hidden_size, head.vocab, head.places,
        norm_before_residual=head.norm_before_residual, embeds=head.embeds,
    )  # fmt: skip


def eagle_info(model: LanguageModel) -> EagleInfo | None:
    """The shape of a model's draft head of one layer, if it has one."""
    head = model.draft_head if isinstance(model, CausalLM) else None
    if not isinstance(head, LayerHead):
        return None
    (state,) = head.states(model)
    return EagleInfo(hidden_size=head.hidden_size, page_bytes=state.unit_bytes, kept=head.kept_size(model))


def assistant_info(model: LanguageModel) -> AssistantInfo | None:
    """The shape of a model's assistant, if it has one."""
    head = model.draft_head if isinstance(model, CausalLM) else None
    return AssistantInfo(width=head.width) if isinstance(head, assistant.AssistantHead) else None
