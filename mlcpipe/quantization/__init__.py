"""Weight formats, one file per scheme (`q4f16_1.py`), found by name; numpy packs, TVM TE unpacks."""

from __future__ import annotations

from mlcpipe.quantization.layout import Layout, layout_names, load_layout
from mlcpipe.quantization.scheme import Scheme, load_scheme, scheme_names

__all__ = ["Layout", "Scheme", "layout_names", "load_layout", "load_scheme", "scheme_names"]
