"""Mamba-2 (Dao & Gu 2024): a sequence keeps a matrix of each head, which decays; each token adds an outer product."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import Part, State
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.gguf import GgufFile
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.norm import rms_norm
from mlcpipe.nn.rows import columns
from mlcpipe.nn.short_conv import Convolution
from mlcpipe.nn.step_states import StepStates
from tir_schedules.ssm_shape import SsmShape


@dataclass(frozen=True)
class Mamba2Spec:
    """Static facts of a Mamba-2 block: `heads` of `head_dim` channels with `state_size` numbers each.

    groups   of heads that share B and C, and of channels that a norm is over
    taps     of the convolution of x, B and C, with a bias if `conv_bias`
    bias     of the first projection, `out_bias` of the last one
    norm     of the output: "after" the gate, "before" it, or "" for none; `eps` is its epsilon
    scales   of z, x, B, C and dt as the projection makes them
    """

    hidden_size: int
    heads: int
    head_dim: int
    state_size: int
    groups: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    norm: Literal["after", "before", ""] = "after"
    eps: float = 1e-5
    scales: tuple[float, ...] = ()

    @property
    def inner(self) -> int:
        """Channels of x, z and the output."""
        return self.heads * self.head_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of z, x, B, C and dt, which the projection makes in this order."""
        shared = self.groups * self.state_size
        return self.inner, self.inner, shared, shared, self.heads


class Mamba2(nn.Module):
    """out(norm(y * silu(z))): z, x, B, C, dt = in(h), and y is the scan of silu(conv(x, B, C)). h is [m, hidden]."""

    def __init__(self, spec: Mamba2Spec, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self.in_proj = Linear(spec.hidden_size, sum(spec.parts), spec.bias)
        self.conv1d = Convolution(sum(spec.parts[1:4]), spec.taps, layer, spec.conv_bias, "silu")
        self.A_log, self.dt_bias, self.D = (Float32((spec.heads,)) for _ in range(3))
        self.norm = GatedNorm(spec) if spec.norm else None
        self.out_proj = Linear(spec.inner, spec.hidden_size, spec.out_bias)

    def states(self, model: LanguageModel) -> list[State]:
        """The inputs of the convolution, and the matrices of the heads."""
        shape = self._shape("float32")
        numbers = Part(name="numbers", dtype="float32", shape=(shape.blocks, shape.state_size, shape.lanes))
        scan = State(name=self._state, kind="slot", parts=(numbers,), dtype="float32", layers=(self.layer,))
        return [*self.conv1d.states(model), scan]

    @property
    def _state(self) -> str:
        return f"layers.{self.layer}.scan"

    def _shape(self, dtype: str) -> SsmShape:
        of = self.spec
        return SsmShape(of.heads, of.head_dim, of.state_size, of.groups, sum(of.parts), dtype)

    def forward(self, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]; a scan knows the order of tokens without `cos` and `sin`."""
        spec, projected = self.spec, self.in_proj(x)
        if spec.scales:
            factors = np.repeat(np.array(spec.scales, x.dtype), spec.parts)
            projected = op.multiply(projected, Tensor.from_const(factors))
        xbc = self.conv1d(columns(projected, spec.inner, sum(spec.parts[1:4]), x.dtype), kv)
        func = importlib.import_module(f"tir_schedules.{kv.kernels}.ssm_scan").ssm_scan(self._shape(x.dtype))
        out = Tensor.placeholder((x.shape[0], spec.inner), x.dtype)
        inputs = [xbc, projected, self.A_log, self.dt_bias, self.D]
        (y,) = kv.update(self._state, func, "ssm_scan", inputs, [out])
        return self.out_proj(gated(y, projected) if self.norm is None else self.norm(y, projected))


class GatedNorm(nn.Module):
    """weight * norm(y * silu(z)), or with `spec.norm` "before": weight * norm(y) * silu(z); norm is RMS over groups."""

    def __init__(self, spec: Mamba2Spec) -> None:
        self.spec = spec
        self.weight = nn.Parameter((spec.inner,))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y [m, inner], of z [m, inner or more] the first columns -> [m, inner]."""
        if self.spec.norm == "before":
            return gated(self._normed(y), z)
        return self._normed(gated(y, z))

    def _normed(self, y: Tensor) -> Tensor:
        groups, (m, inner) = self.spec.groups, y.shape
        if groups == 1:
            return rms_norm(y, self.spec.eps, self.weight)
        rows = rms_norm(op.reshape(y, (m * groups, inner // groups)), self.spec.eps, None)
        weight = self.weight if self.weight.dtype == y.dtype else op.astype(self.weight, y.dtype)
        return op.multiply(op.reshape(rows, (m, inner)), weight)


def gated(y: Tensor, z: Tensor, begin: int = 0, act: Literal["silu", "sigmoid"] = "silu") -> Tensor:
    """y [m, n] times `act` of n columns of z from `begin` on, in float32."""

    def product(a: te.Tensor, gate: te.Tensor) -> te.Tensor:
        def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
            g = gate[i, begin + j].astype("float32")
            factor = g * tirx.sigmoid(g) if act == "silu" else tirx.sigmoid(g)
            return (a[i, j].astype("float32") * factor).astype(a.dtype)

        return te.compute(a.shape, element, name="gated_scan")

    return op.tensor_expr_op(product, "gated_scan", [y, z])


# dt has no bounds; transformers 5 writes infinity as an object.
UNBOUNDED = (None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
# What config.json calls the sizes, with the default of transformers, and the flags: in families like Bamba.
NAMES: Mapping[str, tuple[str, int | bool]] = {
    "heads": ("mamba_n_heads", 128),
    "state_size": ("mamba_d_state", 256),
    "groups": ("mamba_n_groups", 1),
    "taps": ("mamba_d_conv", 4),
    "conv_bias": ("mamba_conv_bias", True),
    "bias": ("mamba_proj_bias", False),
    "out_bias": ("mamba_proj_bias", False),
}

_BOUNDS: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("heads", "groups"), {"high": 1 << 16}),
    "state_size": {"high": 1024},
    "taps": {"low": 2, "high": 64},
}


def read_mamba2(
    fields: Fields,
    hidden_size: int,
    inner: int,
    head_dim: str = "mamba_d_head",
    names: Mapping[str, tuple[str, int | bool]] = NAMES,
    **options: Any,
) -> Mamba2Spec:
    """The facts of blocks with `inner` channels, by the names of their fields; `options` are others of Mamba2Spec.

    Raises ConfigError for sizes that do not fit together, and for bounds of dt, which no published model has.
    """
    fields.refuse(time_step_limit=UNBOUNDED)
    found: dict[str, Any] = {
        field: fields.flag(name, default)
        if isinstance(default, bool)
        else fields.integer(name, default, **_BOUNDS[field])
        for field, (name, default) in names.items()
    }
    heads, groups = found["heads"], found["groups"]
    if inner % heads or heads % groups or fields.get(head_dim, "auto") not in ("auto", inner // heads):
        raise ConfigError(
            f"fields {names['heads'][0]}, {head_dim} and {names['groups'][0]}", where=fields.where,
            expected=f"heads of {inner} channels, in groups", found=f"{heads}, {fields.get(head_dim)!r} and {groups}",
        )  # fmt: skip
    return Mamba2Spec(hidden_size=hidden_size, head_dim=inner // heads, **found | options)


def read_gguf(file: GgufFile, config: dict[str, Any], names: Mapping[str, tuple[str, int | bool]] = NAMES) -> int:
    """Read the sizes of the blocks, by the fields' names -> their channels; a flag is whether a tensor is there."""
    keys = {"heads": "time_step_rank", "state_size": "state_size", "groups": "group_count", "taps": "conv_kernel"}
    config.update({names[field][0]: file.integer(f"ssm.{key}") for field, key in keys.items()})
    parts = {"conv_bias": "ssm_conv1d", "bias": "ssm_in", "out_bias": "ssm_out"}
    layers = range(min(config["num_hidden_layers"], 1024))
    config.update(
        {names[field][0]: any(f"blk.{i}.{part}.bias" in file for i in layers) for field, part in parts.items()}
    )
    return file.integer("ssm.inner_size")
