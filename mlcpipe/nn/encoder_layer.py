"""The layer of bidirectional encoders: attention within a text and a feed-forward block, with layer norms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import definitions
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mlp import activation, gated
from mlcpipe.nn.norm import LayerNorm, RMSNorm
from mlcpipe.nn.step_states import StepStates

Rotation = tuple[Tensor, Tensor]  # cos and sin f32[m, head_dim / 2]


@dataclass(frozen=True)
class EncoderSpec:
    """Static facts of a layer, and the checkpoint's names of its parts, relative to the layer.

    `gated`: act(gate) * up, else act; `up_first`: the checkpoint's one matrix of both has the rows of up first. Without
    `up_bias` only the last matrix of the MLP has a bias, if `mlp_bias`. Tensors of several names are joined along their
    rows. Without `quantize` matrices stay in the model's dtype. `rms`: of the norms. `out_bias`: of
    attention's output, also without `attention_bias`. `head_norms`: RMS norms of each head of q and of k, before RoPE.
    `layer_scale`: vectors that multiply what attention and the MLP add, in layers with norms before.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    act: str
    eps: float
    gated: bool = False
    attention_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = True
    up_bias: bool = True
    up_first: bool = False
    norm_bias: bool = True
    rms: bool = False
    head_norms: tuple[str, ...] = ()
    layer_scale: tuple[str, ...] = ()
    quantize: bool = True
    qkv: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    up: tuple[str, ...] = ()
    down: tuple[str, ...] = ()
    norms: tuple[str, str] = field(default=("", ""))


class AttendingLayer(nn.Module):
    """A layer with the facts of its attention."""

    attention: AttentionSpec


class EncoderLayer(AttendingLayer):
    """x = norm(x + attention(x)); x = norm(x + mlp(x)): norms after, as in BERT (Devlin et al. 2019)."""

    def __init__(self, spec: EncoderSpec, layer: int, window: int | None = None) -> None:
        self.spec, self.layer, hidden = spec, layer, spec.hidden_size
        self.attention = AttentionSpec(hidden, spec.num_heads, spec.num_heads, hidden // spec.num_heads, window=window)
        self.act = activation(spec.act)
        width = spec.intermediate_size * (2 if spec.gated else 1)
        kept: dict[str, Any] = {"quantize": spec.quantize}
        self.qkv = named(Linear(hidden, 3 * hidden, spec.attention_bias, **kept), *spec.qkv)
        self.out = named(Linear(hidden, hidden, spec.attention_bias or spec.out_bias, **kept), *spec.out)
        order = np.roll(np.arange(width, dtype=np.int32), spec.intermediate_size) if spec.up_first else None
        self.up = named(Linear(hidden, width, spec.mlp_bias and spec.up_bias, order=order, **kept), *spec.up)
        self.down = named(Linear(spec.intermediate_size, hidden, spec.mlp_bias, **kept), *spec.down)
        self.attention_norm, self.mlp_norm = (named(_norm(spec), name) for name in spec.norms)
        self.q_norm, self.k_norm = (
            named(RMSNorm(hidden // spec.num_heads, spec.eps), name) if name else None
            for name in spec.head_norms or ("", "")
        )
        self.attention_scale, self.mlp_scale = (_Scale(hidden, name) for name in spec.layer_scale or ("", ""))

    def forward(self, x: Tensor, kv: StepStates, rotation: Rotation | None) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        _, x = _of_sum(self.attention_norm, x, self.attend(x, kv, rotation))
        return _of_sum(self.mlp_norm, x, self.feed(x))[1]

    def attend(self, x: Tensor, kv: StepStates, rotation: Rotation | None) -> Tensor:
        """out(attention(rope(q, k), v)), without rope if `rotation` is None: [m, hidden] -> [m, hidden]."""
        heads, hidden, m = self.spec.num_heads, self.spec.hidden_size, x.shape[0]
        dim = hidden // heads
        qkv = self.qkv(x)
        if rotation is None:
            joined = op.reshape(qkv, (m, 3 * heads, dim))
        else:
            parts = [op.reshape(part, (m, heads, dim)) for part in op.split(qkv, 3, axis=1)]
            norms = (self.q_norm, self.k_norm, None)
            parts = [part if norm is None else norm(part) for norm, part in zip(norms, parts)]
            func = definitions.apply_rope(heads, heads, dim, dim, x.dtype, x.dtype)
            out = Tensor.placeholder((m, 3 * heads, dim), x.dtype)
            joined = op.tensor_ir_op(func, "rope", [*parts, *rotation], out)
        return self.out(kv.attend(self.layer, self.attention, joined))

    def feed(self, x: Tensor) -> Tensor:
        """[m, hidden] -> [m, hidden]."""
        up = self.up(x)
        return self.down(gated(self.act, up) if self.spec.gated else self.act(up))


class PreNormEncoderLayer(EncoderLayer):
    """x += attention(norm(x)); x += mlp(norm(x)).

    Without `first_norm` the first layer's input is normalized already (Warner et al. 2024).
    """

    def __init__(self, spec: EncoderSpec, layer: int, window: int | None = None, *, first_norm: bool = False) -> None:
        super().__init__(spec, layer, window)
        if layer == 0 and not first_norm:
            self.attention_norm = None

    def forward(self, x: Tensor, kv: StepStates, rotation: Rotation | None) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x, normed = _of_sum(self.mlp_norm, x, self.attention_scale(self.attend(normed, kv, rotation)))
        return op.add(x, self.mlp_scale(self.feed(normed)))


def _norm(spec: EncoderSpec) -> LayerNorm | RMSNorm:
    return RMSNorm(spec.hidden_size, spec.eps) if spec.rms else LayerNorm(spec.hidden_size, spec.eps, spec.norm_bias)


def _of_sum(norm: LayerNorm | RMSNorm, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a + b, and its norm."""
    if isinstance(norm, LayerNorm):
        return norm.of_sum(a, b)
    total = op.add(a, b)
    return total, norm(total)


class _Scale(nn.Module):
    """The checkpoint's vector of this name times x, x itself without one."""

    def __init__(self, size: int, name: str) -> None:
        self.weight = nn.Parameter((size,)) if name else None
        if self.weight is not None:
            self.weight.attrs["sources"] = [[name]]

    def forward(self, x: Tensor) -> Tensor:
        """[m, size] -> [m, size]."""
        return x if self.weight is None else op.multiply(x, self.weight)


def named(part: nn.Module, *names: str) -> nn.Module:
    """Set the sources of the part's weight and bias: the checkpoint's tensors of these names, joined along axis 0."""
    for kind in ("weight", "bias"):
        parameter = getattr(part, kind, None)
        if parameter is not None:
            parameter.attrs["sources"] = [[f"{name}.{kind}" for name in names]]
    return part
