"""Ollama's API (its docs/api.md): `/api/chat`, `/api/generate`, `/api/embed` and the paths about models."""

from mlcpipe.server.ollama import answering, embed, models

ROUTERS = (models.router, answering.router)
EMBEDDING_ROUTERS = (models.router, embed.router)
