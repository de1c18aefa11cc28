"""Facts of a model's attention, for every target.

`attention/pages.py` of the CPU's and the GPU's folder has the layout of pages in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tir_schedules.op import Op
from tir_schedules.step_layout import ITEM_BITS as ITEM_BITS
from tir_schedules.step_layout import PAGE as PAGE
from tir_schedules.step_layout import QUANTIZED as QUANTIZED

_FLAGS = ("all_slide", "sinks", "latent", "queries_only", "picked_rows", "ahead")
BIAS_MARGIN = 64  # keys of a block
_LEAST_GROUP = 16  # dimensions of q4 that share a scale and are rotated together, at least


@dataclass(frozen=True)
class Heads:
    """Static facts of a model's attention. `dtype` is how K and V are kept, `activation_dtype` that of queries.

    q8: int8 codes c with one float16 scale s for each group of 32 dimensions of a token's K or V in a head (all of
    them, where head_dim is no multiple of 32), x ~ c s, s = max|x| / 127. Then |x - c s| <= 0.004 max|x| + 4e-6 for
    max|x| <= 8e6, the second term for scales that are subnormal in float16.

    q4: codes -8 to 7 with one float16 scale of either sign for each `scale_dims` dimensions, x ~ c s; the number of
    largest magnitude is -8 s (as ggml's Q4_0 has it). |x - c s| <= 0.126 max|x| + 3e-7 for max|x| <= 5e5. Two codes are
    in a byte, the first one below: of K those of dimensions 2i and 2i + 1, of V those of i and i + scale_dims / 2 of a
    group. q, k, and v are rotated by `rotated_dims` before, and outputs after (Ashkboos et al. 2024, "QuaRot").

    `value_dim`: dimensions of V and of outputs, 0 where they are `head_dim`; in rows of qkv V is padded to head_dim.
    `latent`: V is the first `value_dim` dimensions of K, and stored with it (multi-head latent attention, DeepSeek-V2,
    Liu et al. 2024); rows of qkv have no V. Dimensions that share a scale, or are rotated, are all in V or none is.
    `sinks`: each query head has a logit of a key whose value is 0. `page_group`: of the pages of this layer.
    `queries_only`: rows have neither K nor V, as they attend to what another layer keeps. `picked_rows`: they are only
    some rows of the step, which an argument says. `distances`: scores get biases, an argument f32[num_heads, n] whose
    columns `biases_of_distances` lists (encoders on CPUs). `ahead`: a row sees as many keys as the step says, those
    after its own among them (text by diffusion, on CPUs).
    For TVM's cache: `sliding_window` is that of the layers which have one, `all_slide` says that every layer does.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    softcap: float = 0.0
    sliding_window: int = 0
    all_slide: bool = False
    activation_dtype: str = "float32"
    sinks: bool = False
    page_group: int = 0
    value_dim: int = 0
    latent: bool = False
    queries_only: bool = False
    picked_rows: bool = False
    distances: int = 0
    ahead: bool = False

    @property
    def v_dim(self) -> int:
        """Dimensions of V and of an output in a head."""
        return self.value_dim or self.head_dim

    @property
    def row_heads(self) -> int:
        """Heads of a row of q, k and v."""
        return self.num_heads + (0 if self.queries_only else 1 if self.latent else 2) * self.num_kv_heads

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale_dims(self) -> int:
        """Neighbouring dimensions that share a scale; all of them where there are none."""
        if self.dtype not in QUANTIZED:
            return self.head_dim
        shared = math.gcd(self.head_dim, self.v_dim)
        return shared if self.dtype == "q8" and shared % 32 and not self.latent else math.gcd(shared, 32)

    @property
    def scale_groups(self) -> int:
        """Scales of one token's K in a head; 0 where there are none."""
        return self.head_dim // self.scale_dims if self.dtype in QUANTIZED else 0

    @property
    def v_scale_groups(self) -> int:
        """Scales of one token's V in a head."""
        return self.v_dim // self.scale_dims if self.dtype in QUANTIZED else 0

    @property
    def packed(self) -> int:
        """Numbers of K or V in a stored element."""
        return 2 if self.dtype == "q4" else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of a stored element."""
        return ITEM_BITS[self.dtype] * self.packed // 8

    @property
    def rotated_dims(self) -> int:
        """Neighbouring dimensions that a Hadamard matrix mixes; 0 where heads are kept as they are."""
        shared = math.gcd(self.head_dim, self.v_dim)
        return shared & -shared if self.dtype == "q4" else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of a head in a page."""
        dims = self.head_dim + (0 if self.latent else self.v_dim)
        groups = self.scale_groups + (0 if self.latent else self.v_scale_groups)
        return PAGE * (dims * ITEM_BITS[self.dtype] // 8 + 2 * groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def parts(self) -> tuple[tuple[str, str, tuple[int, ...], int], ...]:
        """The parts of a KV head in a page, in order: (name, dtype, shape, axis of the tokens)."""
        dtype = "int8" if self.dtype in QUANTIZED else self.dtype
        k = ("keys", dtype, (self.head_dim // self.packed, PAGE), 1)
        v = ("values", dtype, (PAGE, self.v_dim // self.packed), 0)
        scales = [("keys", self.scale_groups), ("values", self.v_scale_groups)] if self.scale_groups else []
        found = (k, v, *((name, "float16", (groups, PAGE), 1) for name, groups in scales))
        return tuple(part for part in found if part[0] == "keys") if self.latent else found

    @property
    def workspace(self) -> tuple[int, ...]:
        """Sizes of the f32 vectors that `attend_few` gets after its output, to compute in."""
        return ()

    @property
    def facts(self) -> dict[str, int | float | str]:
        """The facts in tags of the cache's functions; `heads_of` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(Heads)}
        if self.activation_dtype == "float32":
            del values["activation_dtype"]
        for name in (*_FLAGS[1:], "page_group", "value_dim", "distances"):
            if not values[name]:
                del values[name]
        return {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}


def biases_of_distances(distances: int) -> NDArray[np.int32]:
    """The distance of a key from a query whose bias each column has; the last ones are of keys that no query sees."""
    return np.arange(-distances, distances + BIAS_MARGIN, dtype=np.int32)


def has_q4(*dims: int) -> bool:
    """Whether heads whose K and V have so many dimensions can be kept as q4."""
    return math.gcd(*dims) % _LEAST_GROUP == 0


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
    flags = {name: bool(values.get(name)) for name in _FLAGS}
    return {**values, **flags, "softcap": float(op.facts["softcap"])}


def is_bidirectional(op: Op) -> bool:
    """Whether rows see the keys after them, too."""
    return bool(op.facts.get("bidirectional"))


def sees_ahead(op: Op) -> bool:
    """Whether rows of a picture see each other, up to the step's `last_key`."""
    return bool(op.facts.get("ahead"))
