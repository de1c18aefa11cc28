"""3-bit codes, ten per word, one float16 scale per 40 elements: 3.6 bits per weight.

Error: |w - w'| <= 0.503 s + max(2^-11 |w|, 2^-25) with s the group's stored scale, max|w| / 3; for
s >= 2^-14 (subnormal scales: see `groups.error_bound`); |w| > 65504 is refused.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q3f16_1", model_dtype="float16", bits=3, group_size=40, codes_per_word=10)
