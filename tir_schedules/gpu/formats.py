"""Weight formats that the kernels read, those for experts too: block formats of GGUF, and kinds of integers."""

from __future__ import annotations

KEPT = frozenset(
    ("Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "TQ1_0", "TQ2_0",
     "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
     "NF4", "BNB_FP4", "int", "uint", "affine", "fp")
)  # fmt: skip
