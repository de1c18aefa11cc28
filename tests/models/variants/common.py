"""Fields that variants of several families have."""

from __future__ import annotations

from typing import Any

SHORT = [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0]
LONG = [1.0, 1.3, 1.7, 2.2, 3.0, 4.5, 7.0, 12.0]
WINDOWED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FULL_BETWEEN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 1.2}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A rope dictionary of this type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}
