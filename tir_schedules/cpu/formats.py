"""Block formats of GGUF that the kernels read; other kernels than a matmul's read a part of them."""

from __future__ import annotations

KEPT = frozenset({"Q4_0", "Q8_0"})
