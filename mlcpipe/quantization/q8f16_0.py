"""8-bit codes, one float16 scale per row (output channel): 8 bits per weight plus 16 per row.

Error: |w - w'| <= 0.594 s + max(2^-11 |w|, 2^-25) with s the row's stored scale, max|w| / 127; for
s >= 2^-14 (subnormal scales: see `groups.error_bound`); |w| > 65504 is refused. Of the 0.594,
0.094 comes from MLC's float16 sum w/s + 127. Rows are padded to a multiple of 32 columns.

The name is not MLC-LLM's: its only per-row scheme, `q8f16_ft`, has the layout of CUTLASS kernels.
"""

from __future__ import annotations

from mlcpipe.quantization.scheme import Scheme

SCHEME = Scheme(name="q8f16_0", model_dtype="float16", bits=8, group_size=0, codes_per_word=4)
