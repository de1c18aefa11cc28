"""Multi-head attention with grouped KV heads; keys and values are kept in pages."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn import definitions
from mlcpipe.nn.alibi import with_slopes, without_slopes
from mlcpipe.nn.attention_spec import AttentionBlock, AttentionSpec
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.mlp import softplus
from mlcpipe.nn.norm import layer_norm, norm_weight, rms_norm
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates


class Attention(AttentionBlock):
    """o(attend(rope(norm(q)), rope(norm(k)), v)), and what else `spec` says: x [m, hidden] -> [m, hidden]."""

    def __init__(self, spec: AttentionSpec, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self._add_projections()
        self.o_proj = Linear(spec.num_heads * spec.value_size, spec.hidden_size, spec.o_bias)
        if spec.sinks:
            self.sinks = Float32((spec.num_heads,))
        if spec.norm:
            sizes = (spec.num_heads, spec.num_kv_heads)
            self.q_norm, self.k_norm = (
                spec.norm_of(count * spec.head_dim) if spec.norm == "all" else HeadNorm(spec, count) for count in sizes
            )
            if self.reads_another:
                del self.k_norm
        if spec.gate in ("element", "head"):
            self.gate_proj = Linear(spec.hidden_size, spec.num_heads if spec.gate == "head" else spec.q_size)
        if spec.sub_norm:
            self.sub_norm = spec.norm_of(spec.q_size)

    @property
    def reads_another(self) -> bool:
        """Whether the keys and values are those of another layer."""
        return self.spec.reads is not None

    def states(self, model: LanguageModel) -> list[State]:
        """The states of the layer."""
        if self.reads_another:
            return []
        return [model.attention_state(self.spec, f"layers.{self.layer}.attention", self.layer)]

    def _add_projections(self) -> None:
        spec = self.spec
        k, bias = spec.input_size or spec.hidden_size, spec.qkv_bias
        orders = [_halves(count, spec) for count in (spec.num_heads, spec.num_kv_heads)]
        if spec.fused:
            self.qkv_proj = Linear(k, spec.q_size + 2 * spec.kv_size, bias, order=_order_of_fused(spec, *orders))
            return
        if spec.gate == "query":
            self.q_proj = Linear(k, 2 * spec.q_size, bias, order=_queries_first(spec))
        else:
            self.q_proj = Linear(k, spec.q_size, bias, order=orders[0])
        if self.reads_another:
            return
        self.k_proj = Linear(k, spec.kv_size, bias, order=orders[1])
        if not spec.keys_as_values:
            self.v_proj = Linear(k, spec.num_kv_heads * spec.value_size, bias)

    def _project(self, x: Tensor) -> list[Tensor]:
        """x [m, hidden] -> q [m, q_size], with its gate twice as wide, k and v [m, kv_size], or q alone."""
        spec = self.spec
        if self.reads_another:
            return [self.q_proj(x)]
        if not spec.fused:
            q, k = self.q_proj(x), self.k_proj(x)
            return [q, k, k if spec.keys_as_values else self.v_proj(x)]
        return list(op.split(self.qkv_proj(x), [spec.q_size, spec.q_size + spec.kv_size], axis=1))

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, input], cos and sin f32[m, rotary_dim / 2] -> [m, hidden]."""
        spec, m = self.spec, x.shape[0]
        parts, gate = self._project(x), None
        if spec.gate == "query":
            parts[0], gate = op.split(parts[0], [spec.q_size], axis=1)
        elif spec.gate:
            gate = self.gate_proj(x)
        parts = self._heads(parts, m)
        if spec.growth:
            parts[0] = grown(parts[0], kv.positions(m), *spec.growth)
        if spec.slopes:
            q, k, v = parts
            parts = list(with_slopes(q, k, v, kv.positions(m), spec.slopes, spec.score_scale))
        kv_heads = 0 if self.reads_another else spec.num_kv_heads
        func = definitions.apply_rope(spec.num_heads, kv_heads, spec.head_dim, 2 * int(cos.shape[1]), x.dtype, x.dtype)
        out = Tensor.placeholder((m, spec.num_heads + 2 * kv_heads, spec.head_dim), x.dtype)
        qkv = op.tensor_ir_op(func, "rope", [*parts, cos, sin], out)
        if spec.norm_after and spec.norm_of.weight:
            weights = [self.q_norm.weight, self.k_norm.weight]
            qkv = op.tensor_expr_op(_with_weights, "with_weights", [qkv, *weights, spec.num_heads, spec.num_kv_heads])
        y = kv.attend(self.layer, spec, qkv, self.sinks if spec.sinks else None)
        y = without_slopes(y, spec.num_heads) if spec.slopes else y
        if gate is not None:
            y = gated_heads(y, gate, spec.head_dim if spec.gate == "head" else 1, spec.gate_act)
        return self.o_proj(self.sub_norm(y) if spec.sub_norm else y)

    def _heads(self, parts: list[Tensor], m: tirx.Expr) -> list[Tensor]:
        """q [m, q_size], k and v [m, kv_size], or q alone -> the same as heads [m, heads, size], normalized."""
        spec, norms = self.spec, []
        if spec.norm:
            norms = [self.q_norm] if self.reads_another else [self.q_norm, self.k_norm]
        if spec.norm == "all":
            parts[:2] = [norm(part) for norm, part in zip(norms, parts)]
        parts = [_clipped(one, spec.clip) for one in parts]
        sizes = (spec.size, spec.size, spec.value_size)
        parts = [op.reshape(one, (m, int(one.shape[1]) // size, size)) for one, size in zip(parts, sizes)]
        if spec.norm in ("head", "each"):
            parts[:2] = [norm(part) for norm, part in zip(norms, parts)]
        if spec.value_norm:
            parts[2:] = [rms_norm(part, spec.norm_of.eps, None) for part in parts[2:]]
        parts[2:] = [scaled(part, spec.value_scale) for part in parts[2:]]
        if spec.value_size < spec.size:
            parts[2:] = [op.tensor_expr_op(_padded, "padded", [part, spec.size]) for part in parts[2:]]
        return parts


class HeadNorm(nn.Module):
    """The norm of q or k as `spec` says; with `norm_after` its weights are applied after RoPE.

    RoPE keeps a head's mean square, so that the norm may come before it.
    """

    def __init__(self, spec: AttentionSpec, heads: int) -> None:
        of, self.spec = spec.norm_of, spec
        sets = heads if spec.norm == "each" else 1
        self.weight = norm_weight(sets * spec.head_dim, of.offset) if of.weight else None
        self.bias = nn.Parameter((sets * spec.head_dim,)) if of.bias else None
        for vector in (self.weight, self.bias):
            if vector is not None and (order := _halves(sets, spec)) is not None:
                vector.attrs["order"] = order

    def forward(self, x: Tensor) -> Tensor:
        """x [m, heads, D] -> the same shape."""
        (m, heads, dim), of = x.shape, self.spec.norm_of
        apart = self.spec.norm_after or self.spec.norm == "each"
        weight, bias = (None, None) if apart else (self.weight, self.bias)
        rows = op.reshape(x, (m * heads, dim))
        rows = rms_norm(rows, of.eps, weight) if of.kind == "rms" else layer_norm(rows, of.eps, weight, bias)
        y = op.reshape(rows, (m, heads, dim))
        if self.spec.norm != "each" or self.weight is None:
            return y
        weight = self.weight if self.weight.dtype == x.dtype else op.astype(self.weight, x.dtype)
        return op.multiply(y, op.reshape(weight, (1, heads, dim)))


def _with_weights(qkv: te.Tensor, q_weight: te.Tensor, k_weight: te.Tensor, heads: int, kv_heads: int) -> te.Tensor:
    """qkv [m, heads + 2 kv_heads, D], q and k times a weight [D] each."""

    def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
        value, (of_q, of_k) = qkv[i, h, d], (one[d].astype(qkv.dtype) for one in (q_weight, k_weight))
        rest = tirx.if_then_else(h < heads + kv_heads, value * of_k, value)
        return tirx.if_then_else(h < heads, value * of_q, rest)

    return te.compute(qkv.shape, element, name="with_weights")


def _padded(v: te.Tensor, size: int) -> te.Tensor:
    """v [m, heads, d], with zeros up to `size` dimensions."""
    (m, heads, d), zero = v.shape, tirx.const(0.0, v.dtype)
    last = int(d) - 1
    return te.compute(
        (m, heads, size),
        lambda i, h, j: tirx.if_then_else(j <= last, v[i, h, tirx.min(j, last)], zero),
        name="padded",
    )


def _clipped(x: Tensor, bound: float) -> Tensor:
    """x within +- bound; 0 is none."""
    if not bound:
        return x
    low, high = (Tensor.from_scalar(sign * bound, x.dtype) for sign in (-1, 1))
    return op.maximum(op.minimum(x, high), low)


def gated_heads(y: Tensor, gate: Tensor, width: int, act: Literal["sigmoid", "softplus"] = "sigmoid") -> Tensor:
    """y [m, n] times the sigmoid, or another function, of the gate [m, n / width]."""
    function = tirx.sigmoid if act == "sigmoid" else softplus

    def product(a: te.Tensor, gate: te.Tensor) -> te.Tensor:
        return te.compute(
            a.shape,
            lambda i, j: (a[i, j].astype("float32") * function(gate[i, j // width].astype("float32"))).astype(a.dtype),
            name="gated_heads",
        )

    return op.tensor_expr_op(product, "gated_heads", [y, gate])


def grown(q: Tensor, positions: Tensor, beta: float, length: int, first: int) -> Tensor:
    """q [m, heads, D] times 1 + beta * log(1 + floor((position + first) / length))."""

    def product(x: te.Tensor, at: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, h: tirx.Var, d: tirx.Var) -> tirx.PrimExpr:
            steps = tirx.floordiv(at[i] + first, length).astype("float32") + tirx.const(1.0, "float32")
            factor = tirx.const(1.0, "float32") + tirx.const(beta, "float32") * tirx.log(steps)
            return (x[i, h, d].astype("float32") * factor).astype(x.dtype)

        return te.compute(x.shape, element, name="grown")

    return op.tensor_expr_op(product, "grown", [q, positions])


def _halves(heads: int, spec: AttentionSpec) -> NDArray[np.int32] | None:
    """The rows of `heads` heads in the order of halves, (j, j + d / 2), of interleaved ones; None if they are."""
    d = spec.interleaved
    if not d:
        return None
    rows = np.arange(heads * spec.head_dim, dtype=np.int32).reshape(heads, spec.head_dim)
    rows[:, :d] = rows[:, :d].reshape(heads, d // 2, 2).swapaxes(1, 2).reshape(heads, d)
    return rows.reshape(-1)


def _queries_first(spec: AttentionSpec) -> NDArray[np.int32]:
    """The rows of all heads' queries, then those of their gates, of a matrix that has both head by head."""
    rows = np.arange(2 * spec.q_size, dtype=np.int32).reshape(spec.num_heads, 2, spec.size)
    return np.concatenate([rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)])


def _order_of_fused(spec: AttentionSpec, *halves: NDArray[np.int32] | None) -> NDArray[Any] | None:
    """The rows of q, of k and of v in the checkpoint's one matrix; None if that is their order."""
    if spec.fused == "parts" and halves[0] is None:
        return None
    rows = np.arange(spec.q_size + 2 * spec.kv_size, dtype=np.int32)
    q, k, v = np.split(rows, [spec.q_size, spec.q_size + spec.kv_size])
    if spec.fused == "groups":
        group = spec.q_size // spec.num_kv_heads
        parts = rows.reshape(spec.num_kv_heads, -1)
        q, k, v = (part.reshape(-1) for part in np.split(parts, [group, group + spec.size], axis=1))
    q, k = (part if order is None else part[order] for part, order in zip((q, k), halves))
    return np.concatenate([q, k, v])
