"""Block formats of GGUF that the kernels read; those for experts read only the ones without planes and minima."""

from __future__ import annotations

KEPT = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"})
