"""`q4f16_k` with the logits matrix in 6 bits, as in GGUF's Q6_K: most of the loss of 4 bits comes from that matrix.

If its rows are a multiple of 32 but not of 256, that matrix has 8 bits (Q8_0). The name is not MLC-LLM's.
"""

from __future__ import annotations

from dataclasses import replace

from mlcpipe.quantization import q4f16_k

SCHEME = replace(q4f16_k.SCHEME, name="q4f16_m", output="Q6_K")
