"""8-bit codes, one float32 scale per 32 elements: 9 bits per weight.

Error: |w - w'| <= 0.50002 s with s the group's stored scale, max|w| / 127, if not subnormal.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q8f32_1", model_dtype="float32", bits=8, group_size=32, codes_per_word=4)
