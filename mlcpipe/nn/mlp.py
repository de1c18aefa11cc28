"""The gated feed-forward block (Shazeer 2020: SwiGLU, GeGLU)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.linear import Linear

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": op.silu,
    "swish": op.silu,
    "gelu": op.gelu,
    "gelu_pytorch_tanh": lambda x: op.gelu(x, approximate="tanh"),
    "gelu_python_tanh": lambda x: op.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: op.gelu(x, approximate="tanh"),
    "relu": op.relu,
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
    """down(act(gate(x)) * up(x)): x [m, hidden] -> [m, hidden]. `names` are those of gate, up and down."""

    NAMES = ("gate_proj", "up_proj", "down_proj")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        bias: bool = False,
        names: tuple[str, str, str] = NAMES,
    ) -> None:
        self.act, self.names = activation(act), names
        *inner, down = names
        for name in inner:
            setattr(self, name, Linear(hidden_size, intermediate_size, bias))
        setattr(self, down, Linear(intermediate_size, hidden_size, bias))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(op.multiply(self.act(gate(x)), up(x)))


class FusedGatedMLP(nn.Module):
    """GatedMLP with gate and up in one matrix, gate rows first: x [m, hidden] -> [m, hidden]."""

    names = ("gate_up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int, act: str) -> None:
        self.act = activation(act)
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return self.down_proj(gated(self.act, self.gate_up_proj(x)))
