"""Plain float32 weights.

Error: none.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q0f32", model_dtype="float32")
