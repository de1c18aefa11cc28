"""Plain float16 weights.

Error: |w - w'| <= max(2^-11 |w|, 2^-25); |w| > 65504 is refused.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q0f16", model_dtype="float16")
