"""Facts of a model's attention, whatever the target.

`attention/pages.py` of the CPU's and the GPU's folder has the layout of pages in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tir_schedules.op import Op
from tir_schedules.step_layout import PAGE as PAGE

ITEM_BYTES = {"float32": 4, "float16": 2, "q8": 1}


@dataclass(frozen=True)
class Heads:
    """Static facts of a model's attention. `dtype` is how K and V are kept, `activation_dtype` that of q8's queries.

    q8: int8 codes c with one float16 scale s for each group of 32 dimensions of a token's K or V in a head (all of
    them, where head_dim is no multiple of 32), x ~ c s, s = max|x| / 127. Then |x - c s| <= 0.004 max|x| + 4e-6 for
    max|x| <= 8e6, the second term for scales that are subnormal in float16. `all_slide`: every layer has the window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    softcap: float = 0.0
    sliding_window: int = 0
    all_slide: bool = False
    activation_dtype: str = "float32"

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale_groups(self) -> int:
        """Scales of one token's K (or V) in a head; 0 where there are none."""
        return 0 if self.dtype != "q8" else max(1, self.head_dim // 32 if self.head_dim % 32 == 0 else 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in a head."""
        return self.head_dim * ITEM_BYTES[self.dtype] + 2 * self.scale_groups

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page."""
        return 2 * PAGE * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in one layer of the cache."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def workspace(self) -> tuple[int, ...]:
        """Sizes of the f32 vectors that `attend_few` gets after its output, to compute in."""
        return ()

    @property
    def facts(self) -> dict[str, int | float | str]:
        """What tags of the cache's functions say of it; `heads_of` reads it back."""
        values = {field.name: getattr(self, field.name) for field in fields(Heads)}
        if self.activation_dtype == "float32":
            del values["activation_dtype"]
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
    values = {field.name: op.facts[field.name] for field in fields(Heads) if field.name in op.facts}
    return {**values, "all_slide": bool(op.int("all_slide")), "softcap": float(op.facts["softcap"])}


def is_bidirectional(op: Op) -> bool:
    """Whether rows see the keys after them, too."""
    return bool(op.facts.get("bidirectional"))
