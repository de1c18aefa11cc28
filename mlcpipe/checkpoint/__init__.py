"""Reads untrusted checkpoints: every file is checked, and a broken one raises a one-line error."""

from __future__ import annotations

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.hub import resolve
from mlcpipe.checkpoint.open import open_checkpoint
from mlcpipe.checkpoint.safetensors_reader import TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint", "resolve"]
