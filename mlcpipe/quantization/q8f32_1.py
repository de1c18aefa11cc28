"""8-bit codes, a float32 scale for 32 elements: 9 bits a weight.

Error: |w - w'| <= 0.50002 s with s the group's stored scale, max|w| / 127, if not subnormal.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q8f32_1", model_dtype="float32", bits=8, group_size=32, codes_per_word=4)
