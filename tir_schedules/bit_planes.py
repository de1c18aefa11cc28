"""Codes in bit planes, as `quantization/native_formats.py` orders them. This module does not import TVM."""

# Of codes of so many bits, the lowest first.
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
