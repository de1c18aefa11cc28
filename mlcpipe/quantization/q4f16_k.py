"""4-bit codes with a scale and a minimum for each group of 32, as GGUF's Q4_K has them: 4.625 bits per weight.

Matrices whose rows are not whole blocks of 256 are stored as in q4f16_1. The name is not MLC-LLM's.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme("q4f16_k", model_dtype="float16", bits=4, group_size=32, codes_per_word=8, blocks="Q4_K")
