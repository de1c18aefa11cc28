"""What clients ask about a model without a request to it: the same of a loaded model and of a prepared one.

Clients ask this of all models in turn, and again and again. So it loads no model, and does not count as its use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlcpipe.runtime.text.reasoning import END
from mlcpipe.runtime.text.thinking import EFFORT, thinking_switch
from mlcpipe.server.completions import fill_in_ids
from mlcpipe.server.embedding_service import EmbeddingService
from mlcpipe.server.pooled_model import Model, ModelCard
from mlcpipe.server.service import Service
from mlcpipe.server.speech_service import SpeechService

if TYPE_CHECKING:
    from mlcpipe.runtime.sampling_params import SamplingParams
    from mlcpipe.runtime.text.tokenizer import Tokenizer
    from mlcpipe.server.model_pool import ModelPool


async def card_of(pool: ModelPool, model: Model) -> ModelCard:
    """The card of a model. Raises ApiError for a bundle that cannot be read."""
    service = model.service
    if service is None:
        card: ModelCard = await pool.apart(model.source.card)
        return card
    lengths = {"context_length": service.engine.context_length, "vocab_size": service.engine.vocab_size}
    about = {**service.facts.about, **lengths}
    if isinstance(service, EmbeddingService):
        return encoder_card(about, service.embedder.info.dimensions, service.tokenizer)
    if isinstance(service, SpeechService):
        return speech_card(about, service.tokenizer)
    assert isinstance(service, Service)
    return text_card(about, service.facts.defaults, service.tokenizer, sees=service.facts.vision is not None)


def encoder_card(about: Mapping[str, Any], dimensions: int, tokenizer: Tokenizer) -> ModelCard:
    """The card of a model that embeds texts or scores documents."""
    return ModelCard(about, None, dimensions, "", tokenizer.special_tokens, ("embedding",))


def speech_card(about: Mapping[str, Any], tokenizer: Tokenizer) -> ModelCard:
    """The card of a model that hears."""
    return ModelCard(about, None, None, "", tokenizer.special_tokens, ("transcription",))


def text_card(about: Mapping[str, Any], defaults: SamplingParams, tokenizer: Tokenizer, *, sees: bool) -> ModelCard:
    """The card of a model that writes text."""
    found, source = ["completion"], tokenizer.chat_templates.get("default")
    if source is not None:
        template = tokenizer.chat_template()
        if "tools" in template.variables or "tool_use" in tokenizer.chat_templates:
            found.append("tools")
        if END in source or EFFORT in template.variables or thinking_switch(template) is not None:
            found.append("thinking")
    found += ["vision"] if sees else []
    found += [] if fill_in_ids(tokenizer) is None else ["insert"]
    return ModelCard(about, defaults, None, source or "", tokenizer.special_tokens, tuple(found))
