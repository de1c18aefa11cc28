"""The three decoder layers: norms before, after, or around attention and MLP.

`names`: the norm before attention, attention, the norm before the MLP, and the MLP; "" for none.
"""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.attention import Attention
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates


class PreNormLayer(nn.Module):
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)). Tensor names as in HF's Llama, or `names`."""

    NAMES = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(
        self,
        attention: nn.Module,
        mlp: nn.Module,
        hidden_size: int,
        eps: float,
        scale: float = 1.0,
        names: tuple[str, str, str, str] = NAMES,
    ) -> None:
        self.scale, self.names = scale, names
        for name, block in zip(names, (RMSNorm(hidden_size, eps), attention, RMSNorm(hidden_size, eps), mlp)):
            setattr(self, name, block)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        norm, attention, mlp_norm, mlp = (getattr(self, name) for name in self.names)
        x = op.add(x, scaled(attention(norm(x), kv, cos, sin), self.scale))
        return op.add(x, scaled(mlp(mlp_norm(x)), self.scale))


class PostNormLayer(nn.Module):
    """x += norm(attention(x)); x += norm(mlp(x)). Tensor names as in Hugging Face's OLMo 2."""

    names = ("", "self_attn", "", "mlp")

    def __init__(self, attention: Attention, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        x = op.add(x, self.post_attention_layernorm(self.self_attn(x, kv, cos, sin)))
        return op.add(x, self.post_feedforward_layernorm(self.mlp(x)))


class SandwichNormLayer(nn.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))). Tensor names as in Hugging Face's Gemma 2."""

    names = ("input_layernorm", "self_attn", "pre_feedforward_layernorm", "mlp")

    def __init__(self, attention: Attention, mlp: nn.Module, hidden_size: int, eps: float, offset: float) -> None:
        """`offset` is added to the weight of every norm."""
        self.input_layernorm = RMSNorm(hidden_size, eps, offset)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, offset)
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, eps, offset)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps, offset)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        attended = self.self_attn(self.input_layernorm(x), kv, cos, sin)
        x = op.add(x, self.post_attention_layernorm(attended))
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return op.add(x, self.post_feedforward_layernorm(fed))
