"""Names of models: Ollama's have a tag."""

from __future__ import annotations

import math

from fastapi import Request

from mlcpipe.server.leases import pool_of
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.ollama.bodies import LATEST, KeptBody


def tagged(name: str) -> str:
    """The name as lists have it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def served(pool: ModelPool, name: str) -> str:
    """Our name of a model. Raises ApiError for one that is not served."""
    ours = name.removesuffix(LATEST) if name not in names(pool) else name
    pool.find(ours)
    return ours


def keep(request: Request, body: KeptBody, name: str) -> None:
    """Keep a model loaded for as long as a request says, or else as the server does. Raises ApiError."""
    pool, seconds = pool_of(request), body.keep_alive_s
    if seconds is None:
        seconds = pool.ttl_s
    pool.set_ttl(name, None if seconds is None or math.isinf(seconds) else seconds)


def names(pool: ModelPool) -> list[str]:
    """Our names of all models and adapters."""
    return [name for model in pool.models for name in model.own_names]
