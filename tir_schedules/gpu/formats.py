"""Block formats of GGUF that the kernels read: none yet."""

from __future__ import annotations

KEPT: frozenset[str] = frozenset()
