"""4-bit codes, one float16 scale per 32 elements: 4.5 bits per weight. MLC's default.

Error: |w - w'| <= 0.5059 s + max(2^-11 |w|, 2^-25) with s the group's stored scale, max|w| / 7; for
s >= 2^-14 (subnormal scales: see `groups.error_bound`); |w| > 65504 is refused.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q4f16_1", model_dtype="float16", bits=4, group_size=32, codes_per_word=8)
