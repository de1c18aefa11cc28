"""The paged KV cache (Kwon et al. 2023): TVM's runtime object, with our own kernels."""

from __future__ import annotations

import importlib
from typing import Any

from tvm import relax, tirx
from tvm.ir import StringImm
from tvm.relax.frontend.nn import Object, Tensor, op

from mlcpipe.nn import definitions
from mlcpipe.nn.attention_spec import AttentionSpec

# Layers with a window keep all pages and mask by position, so TVM's own window must never apply.
_NEVER_SLIDES = 1 << 30
_MHA, _MHA_SLIDING = 0, 3
_ROPE_NONE = 0


class PagedKVCache(Object):  # type: ignore[misc]
    """The cache inside a model function; `spec` is the AttentionShape of its kernels."""

    spec: Any = None
    layout: Any = None  # of RoPE's positions: there is one of each row

    def attend(self, layer: int, of: AttentionSpec, qkv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Append k and v of qkv [m, heads + 2 kv_heads, D] and attend: -> [m, heads * D] in the dtype of qkv.

        `sinks` are f32[heads] if `of` says that heads have them. TVM's cache has no input for them: they are applied
        afterwards, with the sums of weights that our kernels write into additional heads.
        """
        m, spec, bb = qkv.shape[0], self.spec, relax.BlockBuilder.current()
        heads, room, dim = spec.num_heads, spec.sum_heads, spec.head_dim
        if room:
            func = definitions.make_room(heads, room, spec.num_kv_heads, dim, qkv.dtype)
            out = Tensor.placeholder((m, heads + room + 2 * spec.num_kv_heads, dim), qkv.dtype)
            qkv = op.tensor_ir_op(func, "make_room", [qkv], out)
        call = relax.call_dps_packed(
            "vm.builtin.attention_kv_cache_attention_with_fused_qkv",
            [self._expr, relax.prim_value(layer), relax.prim_value(of.score_scale), qkv._expr],
            out_ty=relax.TensorType((m, heads + room, dim), qkv.dtype),
        )
        attended = Tensor(_expr=bb.emit(call))
        if sinks is None:
            return op.reshape(attended, (m, heads * dim))
        func = definitions.count_sinks(heads, room, dim, qkv.dtype)
        out = Tensor.placeholder((m, heads * dim), qkv.dtype)
        return op.tensor_ir_op(func, "count_sinks", [attended, sinks], out)

    def positions(self, rows: tirx.Expr) -> Tensor:
        """Positions i32[rows] of this forward's tokens in their sequences."""
        call = relax.call_pure_packed(
            "vm.builtin.attention_kv_cache_get_query_positions", self._expr, ty_args=relax.TensorType((rows,), "int32")
        )
        return Tensor(_expr=relax.BlockBuilder.current().emit(call))

    def rope_positions(self, rows: tirx.Expr) -> Tensor:
        """As `positions`."""
        return self.positions(rows)

    def rope_lengths(self, rows: tirx.Expr) -> Tensor | None:
        """None: all rows are of one sequence, whose length follows from the highest position."""
        return None


def create(kernels: str, spec: Any, windows: list[int | None], sizes: list[tirx.Var]) -> PagedKVCache:
    """Emit a cache: `sizes` are the five symbolic sizes of `create_tir_paged_kv_cache`.

    TVM's own window, the last size, stays off.
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
        relax.prim_value(spec.num_heads + spec.sum_heads),
        relax.prim_value(spec.num_kv_heads),
        relax.prim_value(spec.head_dim),
        relax.prim_value(spec.head_dim),
        relax.ShapeExpr(kinds),
        relax.prim_value(False),
        relax.prim_value(_ROPE_NONE),
        relax.prim_value(1),
        relax.prim_value(10000),
        relax.prim_value(0),
        relax.op.zeros((), spec.dtype),
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
