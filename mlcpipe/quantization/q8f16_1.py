"""8-bit codes, one float16 scale per 32 elements: 8.5 bits per weight.

Error: |w - w'| <= 0.594 s + max(2^-11 |w|, 2^-25) with s the group's stored scale, max|w| / 127; for
s >= 2^-14 (subnormal scales: see `groups.error_bound`); |w| > 65504 is refused. Of the 0.594,
0.094 comes from MLC's float16 sum w/s + 127.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q8f16_1", model_dtype="float16", bits=8, group_size=32, codes_per_word=4)
