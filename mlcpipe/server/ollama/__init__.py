"""Ollama's API (its docs/api.md): `/api/chat`, `/api/generate`, `/api/embed` and the paths about models."""

from mlcpipe.server.ollama import answering, embed, files, models

ROUTERS = (models.router, files.router, answering.router)
EMBEDDING_ROUTERS = (models.router, files.router, embed.router)
