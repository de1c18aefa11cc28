"""Names of models: Ollama's have a tag."""

from __future__ import annotations

from mlcpipe.server.embedding_service import EmbeddingService
from mlcpipe.server.ollama.bodies import LATEST
from mlcpipe.server.service import Service


def tagged(name: str) -> str:
    """The name as lists have it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served(service: Service | EmbeddingService, name: str) -> str:
    """Our name of a model. Raises ApiError for one that is not served."""
    known = {*service.facts.names, *service.adapters}
    ours = name.removesuffix(LATEST) if name not in known else name
    service.check_model(ours)
    return ours


def names(service: Service | EmbeddingService) -> list[str]:
    """Our names of all models and adapters."""
    return [name for name in (*service.facts.names, *service.adapters) if name != "*"]
