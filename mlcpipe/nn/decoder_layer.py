"""The decoder layer that most families share: norm before attention and before the MLP, residual after each."""

from __future__ import annotations

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.attention import Attention
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.norm import RMSNorm


class PreNormLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)). Tensor names as Hugging Face's Llama."""

    def __init__(self, attention: Attention, mlp: nn.Module, hidden_size: int, eps: float) -> None:
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, kv: PagedKVCache, cos: Tensor, sin: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        x = op.add(x, self.self_attn(self.input_layernorm(x), kv, cos, sin))
        return op.add(x, self.mlp(self.post_attention_layernorm(x)))
