"""Reads GGUF, the format of llama.cpp: a strict reader of its own, which trusts nothing in the file."""

from __future__ import annotations

from mlcpipe.checkpoint.gguf.checkpoint import GgufCheckpoint, open_gguf
from mlcpipe.checkpoint.gguf.header import is_gguf
from mlcpipe.checkpoint.gguf.shards import shard_names

SUFFIX = ".gguf"

__all__ = ["SUFFIX", "GgufCheckpoint", "is_gguf", "open_gguf", "shard_names"]
