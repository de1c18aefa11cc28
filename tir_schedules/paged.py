"""Paged attention as TVM's cache calls it, whatever the target: facts of a model's attention, arguments of kernels.

The calling convention is that of `vm.builtin.paged_attention_kv_cache_create` (tvm/src/runtime/vm/paged_kv_cache.cc,
attn_backend.h). What an argument is in memory is the target's: `kv_pages.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as I

from tir_schedules.op import Op

Buffer = Any  # tvm.tirx.Buffer: indexing one gives an expression
Expr = Any  # tvm.tirx.PrimExpr, or an int
Argument = Any  # the target's Tensor, or a str: the dtype of a number

PAGE = 16  # tokens of a page


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


def window_of(op: Op) -> tuple[int, bool]:
    """The window that a function of the cache masks by (0: none), and whether TVM tells it of windows."""
    sliding = op.kind.endswith("_sliding")
    return op.int("sliding_window") if sliding or op.int("all_slide") else 0, sliding


@dataclass(frozen=True)
class Cached:
    """The arguments that say where the cached keys of each sequence are."""

    sliding_info: bool
    pages: Any
    indptr: Buffer
    indices: Buffer
    length: Buffer
    k_position: Buffer
    q_position: Buffer

    def keys(self, b: Expr) -> Expr:
        """Cached tokens of sequence b."""
        last = self.length[0, b] if self.sliding_info else self.length[b]
        count = self.indptr[b + 1] - self.indptr[b]
        return I.if_then_else(count > 0, (count - 1) * PAGE + last, 0)

    def page(self, b: Expr, i: Expr) -> Expr:
        """The page of tokens 16 i ... 16 i + 15 of sequence b."""
        return self.indices[self.indptr[b] + i]


def cached_arguments(
    pages: Argument, index: Callable[..., Argument], batch: Expr, queries: Expr, sliding_info: bool
) -> dict[str, Argument]:
    """Pages, page table, lengths and positions, in the order of `Cached`; index(dims...) is an argument of indices."""
    return {
        "pages": pages,
        "indptr": index(batch + 1),
        "indices": index(tirx.Var("used_pages", "int32")),
        "length": index(3, batch) if sliding_info else index(batch),
        "k_position": index(batch),
        "q_position": index(queries),
    }


def results(output: Argument, lse: Argument, causal: bool = False) -> Mapping[str, Argument]:
    """Outputs, and TVM's numbers at the end, of which only the last matters: positions are in the queries already."""
    numbers = {"rotary_mode": "int32", "rope_scale": "float32", "rope_theta": "float32", "sm_scale": "float32"}
    return {"output": output, "lse": lse} | ({"causal": "int32"} if causal else {}) | numbers
