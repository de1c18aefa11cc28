"""The three decoder layers: norms before, after, or around attention and MLP."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.attention import Attention
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates


class PreNormLayer(nn.Module):
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)). Tensor names as in HF's Llama, except `mlp_name`."""

    def __init__(
        self,
        attention: Attention,
        mlp: nn.Module,
        hidden_size: int,
        eps: float,
        mlp_name: str = "mlp",
        scale: float = 1.0,
    ) -> None:
        self.scale = scale
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp_name = mlp_name
        setattr(self, mlp_name, mlp)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        x = op.add(x, scaled(self.self_attn(self.input_layernorm(x), kv, cos, sin), self.scale))
        return op.add(x, scaled(getattr(self, self.mlp_name)(self.post_attention_layernorm(x)), self.scale))


class PostNormLayer(nn.Module):
    """x += norm(attention(x)); x += norm(mlp(x)). Tensor names as in Hugging Face's OLMo 2."""

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
