"""`q4f16_k` with the matrix of the logits in 6 bits, as GGUF's Q6_K has them: most of what 4 bits lose is lost there.

Where 256 does not divide its rows, but 32 does, that matrix has 8 bits (Q8_0). The name is not MLC-LLM's.
"""

from __future__ import annotations

from dataclasses import replace

from mlcpipe.quantization import q4f16_k

SCHEME = replace(q4f16_k.SCHEME, name="q4f16_m", output="Q6_K")
