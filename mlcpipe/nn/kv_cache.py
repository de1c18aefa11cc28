"""The paged KV cache (Kwon et al. 2023): TVM's runtime object, with kernels of our own for each target."""

from __future__ import annotations

import importlib
from typing import Any

from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend.nn import Object, Tensor

PAGE_SIZE = 16
# Layers with a window keep all pages: the kernels mask by position, so TVM's own window is out of reach.
_NEVER_SLIDES = 1 << 30
_MHA, _MHA_SLIDING = 0, 3
_ROPE_NONE = 0


class PagedKVCache(Object):  # type: ignore[misc]
    """The cache inside a model function; `spec` is the AttentionShape of its kernels."""

    spec: Any = None

    def attend(self, layer: int, qkv: Tensor, scale: float) -> Tensor:
        """Append k and v of qkv [m, heads + 2 kv_heads, D] and attend: -> [m, heads * D] in the dtype of qkv.

        TVM's cache sees the same bytes in its own dtype, heads and head dimension (`tir_schedules/cpu/kv_pages.py`).
        """
        m, spec, bb = qkv.shape[0], self.spec, relax.BlockBuilder.current()
        heads, dim, dtype = spec.cache_heads, spec.cache_head_dim, spec.cache_dtype
        same = dtype == qkv.dtype and dim == spec.head_dim
        rows = (m, heads + 2 * spec.cache_kv_heads, dim)
        seen = qkv._expr if same else bb.emit(relax.op.memory.view(qkv._expr, rows, dtype))
        call = relax.call_dps_packed(
            "vm.builtin.attention_kv_cache_attention_with_fused_qkv",
            [self._expr, relax.prim_value(layer), relax.prim_value(scale), seen],
            out_ty=relax.TensorType((m, heads, dim), dtype),
        )
        flat = (m, spec.num_heads * spec.head_dim)
        found = bb.emit(call)
        return Tensor(
            _expr=bb.emit(relax.op.reshape(found, flat) if same else relax.op.memory.view(found, flat, qkv.dtype))
        )

    def positions(self, rows: tirx.Expr) -> Tensor:
        """Positions i32[rows] in their sequences of the tokens of this forward."""
        call = relax.call_pure_packed(
            "vm.builtin.attention_kv_cache_get_query_positions", self._expr, ty_args=relax.TensorType((rows,), "int32")
        )
        return Tensor(_expr=relax.BlockBuilder.current().emit(call))


def create(kernels: str, spec: Any, windows: list[int | None], sizes: list[tirx.Var]) -> PagedKVCache:
    """Emit the creation of a cache: `sizes` are the five symbolic sizes of `create_tir_paged_kv_cache`.

    TVM's own window, the last of them, stays off.
    `kernels` names the folder of tir_schedules that has `attention.kv_cache_functions(spec, layers)`;
    `spec` is its AttentionShape; `windows[i]` is layer i's sliding window or None.
    """
    functions = importlib.import_module(f"tir_schedules.{kernels}.attention").kv_cache_functions(spec, len(windows))
    bb = relax.BlockBuilder.current()
    added = {name: bb.add_func(func, f"kv_cache_{name}") for name, func in functions.items()}

    def backend(name: str) -> relax.Tuple:
        return relax.Tuple([StringImm("tirx"), added[name]] if name in added else [])

    kinds = [_MHA if window is None else _MHA_SLIDING for window in windows]
    call = relax.call_pure_packed(
        "vm.builtin.paged_attention_kv_cache_create",
        relax.ShapeExpr([*sizes[:4], 0, _NEVER_SLIDES]),
        relax.ShapeExpr([0, len(windows)]),
        relax.prim_value(spec.cache_heads),
        relax.prim_value(spec.cache_kv_heads),
        relax.prim_value(spec.cache_head_dim),
        relax.prim_value(spec.cache_head_dim),
        relax.ShapeExpr(kinds),
        relax.prim_value(False),
        relax.prim_value(_ROPE_NONE),
        relax.prim_value(1),
        relax.prim_value(10000),
        relax.prim_value(0),
        relax.op.zeros((), spec.cache_dtype),
        added["append"],
        relax.prim_value(0),
        backend("prefill_chunk"),
        backend("prefill_cached"),
        backend("decode"),
        backend("prefill_cached_sliding"),
        backend("decode_sliding"),
        relax.Tuple([]),
        relax.Tuple([]),
        relax.Tuple([]),
        relax.Tuple([added["merge"]]),
        added["split"],
        added["copy_page"],
        added["read_back"],
        added["compact"],
        ty_args=relax.AnyType(),
    )
    return PagedKVCache(_expr=call, _name="paged_kv_cache")
