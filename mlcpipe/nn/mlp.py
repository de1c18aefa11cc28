"""The feed-forward block, gated (Shazeer 2020: SwiGLU, GeGLU) or of two matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rows import scaled

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": op.silu,
    "swish": op.silu,
    "gelu": op.gelu,
    "gelu_pytorch_tanh": lambda x: op.gelu(x, approximate="tanh"),
    "gelu_python_tanh": lambda x: op.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: op.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: op.multiply(x, op.sigmoid(scaled(x, 1.702))),
    "relu": op.relu,
    **dict.fromkeys(("relu2", "sqrelu"), lambda x: op.square(op.relu(x))),
}


def activation(name: Any) -> Activation:
    """The activation with this Hugging Face name. Raises ConfigError if unknown."""
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError("unknown activation", where="config.json", expected=", ".join(ACTIVATIONS), found=repr(name))
    return ACTIVATIONS[name]


def gated(act: Activation, gate_up: Tensor) -> Tensor:
    """gate_up [m, 2 * width], gate columns then up columns -> act(gate) * up [m, width]."""
    gate, up = op.split(gate_up, 2, axis=1)
    return op.multiply(act(gate), up)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): x [m, hidden] -> [m, hidden]. `sub_norm`: a norm of what down multiplies.

    `scales` multiply what gate and down make.
    """

    inner = ("gate_proj", "up_proj")

    def __init__(
        self,
        hidden_size: int,
        width: int,
        act: str,
        bias: bool = False,
        sub_norm: NormSpec | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.act, self.scales = activation(act), scales
        self.gate_proj = Linear(hidden_size, width, bias)
        self.up_proj = Linear(hidden_size, width, bias)
        self.sub_norm = sub_norm(width) if sub_norm else None
        self.down_proj = Linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        of_gate, of_down = self.scales
        y = op.multiply(self.act(scaled(self.gate_proj(x), of_gate)), self.up_proj(x))
        return scaled(self.down_proj(self.sub_norm(y) if self.sub_norm else y), of_down)


class FusedGatedMLP(nn.Module):
    """GatedMLP with gate and up in one matrix, gate rows first: x [m, hidden] -> [m, hidden]."""

    inner = ("gate_up_proj",)

    def __init__(self, hidden_size: int, width: int, act: str, bias: bool = False) -> None:
        self.act = activation(act)
        self.gate_up_proj: nn.Module = Linear(hidden_size, 2 * width, bias)
        self.down_proj = Linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.down_proj(gated(self.act, self.gate_up_proj(x)))


class PlainMLP(nn.Module):
    """down(act(up(x))): x [m, hidden] -> [m, hidden]."""

    inner = ("up_proj",)

    def __init__(self, hidden_size: int, width: int, act: str, bias: bool = False) -> None:
        self.act_fn: Activation = XIELU() if act == "xielu" else activation(act)
        self.up_proj = Linear(hidden_size, width, bias)
        self.down_proj = Linear(width, hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class XIELU(nn.Module):
    """x > 0: p x^2 + x / 2, else n (expm1(min(x, -1e-6)) - x) + x / 2, with two learned numbers (Huang & Schlag 2024).

    p = softplus(alpha_p), n = 1 / 2 + softplus(alpha_n), in float32.
    """

    def __init__(self) -> None:
        self.alpha_p, self.alpha_n = Float32((1,)), Float32((1,))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, n] -> the same shape."""
        return op.tensor_expr_op(_xielu, "xielu", [x, self.alpha_p, self.alpha_n])


def softplus(value: tirx.PrimExpr) -> tirx.PrimExpr:
    """log(1 + exp(value)) in float32."""
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    return tirx.max(value, zero) + tirx.log(one + tirx.exp(-tirx.abs(value)))


def _xielu(x: te.Tensor, alpha_p: te.Tensor, alpha_n: te.Tensor) -> te.Tensor:
    one, half = tirx.const(1.0, "float32"), tirx.const(0.5, "float32")

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        value = x[i, j].astype("float32")
        positive = softplus(alpha_p[0]) * value * value
        small = tirx.exp(tirx.min(value, tirx.const(-1e-6, "float32"))) - one
        negative = (half + softplus(alpha_n[0])) * (small - value)
        return (tirx.if_then_else(value > 0, positive, negative) + half * value).astype(x.dtype)

    return te.compute(x.shape, element, name="xielu")
