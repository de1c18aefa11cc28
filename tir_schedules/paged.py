"""Facts of a model's attention, whatever the target.

`attention/pages.py` of the CPU's and the GPU's folder has the layout of pages in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tir_schedules.op import Op
from tir_schedules.step_layout import PAGE as PAGE


@dataclass(frozen=True)
class Heads:
    """Static facts of a model's attention. `dtype` is how K and V are kept.

    `all_slide`: every layer has the window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    softcap: float = 0.0
    sliding_window: int = 0
    all_slide: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def workspace(self) -> tuple[int, ...]:
        """Sizes of the f32 vectors that `attend_few` gets after its output, to compute in."""
        return ()

    @property
    def facts(self) -> dict[str, int | float | str]:
        """What tags of the cache's functions say of it; `heads_of` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(Heads)}
        return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}


# The functions of the cache that attend: a rule may make them again with other knobs.
ATTENTION = (
    "kv_cache_decode",
    "kv_cache_decode_sliding",
    "kv_cache_prefill_chunk",
    "kv_cache_prefill_cached",
    "kv_cache_prefill_cached_sliding",
)


def heads_of(op: Op) -> dict[str, Any]:
    """The fields of `Heads` that a function of the cache was made for."""
    values = {field.name: op.facts[field.name] for field in fields(Heads)}
    return {**values, "all_slide": bool(op.int("all_slide")), "softcap": float(op.facts["softcap"])}
