"""8-bit codes, one float32 scale per row (output channel): 8 bits per weight plus 32 per row.

Error: |w - w'| <= 0.50002 s with s the row's stored scale, max|w| / 127, if not subnormal. Rows are padded to a
multiple of 32 columns.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q8f32_0", model_dtype="float32", bits=8, group_size=0, codes_per_word=4)
