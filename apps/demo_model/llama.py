"""A llama for training on a CPU: transformers' `LlamaForCausalLM` with fewer passes over memory.

Weights are a flat mapping with Hugging Face's names, float32; activations and products are bfloat16. Norm
weights are folded into the matrices that follow them; q, k and v are one product, gate and up another. With
autocast on the original, casts and norms take longer than the matrix products: this is three times as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; multiples of 64, as kernels like them."""

    vocabulary: int
    positions: int
    hidden: int = 256
    inner: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    eps: float = 1e-5
    theta: float = 10000.0

    def config(self) -> dict[str, object]:
        """`config.json` as transformers reads it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "dtype": "float16",
            "eos_token_id": 2,
            "head_dim": self.head,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": 0,
            "rms_norm_eps": self.eps,
            "rope_scaling": None,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
            "use_cache": True,
            "vocab_size": self.vocabulary,
        }


def initial_weights(shape: Shape, seed: int) -> Weights:
    """Normal weights of deviation 0.02, less for those that write to the residual stream (GPT-2's rule)."""
    generator = torch.Generator().manual_seed(seed)
    wide, narrow = shape.heads * shape.head, shape.kv_heads * shape.head
    small = 0.02 / math.sqrt(2 * shape.layers)

    def normal(rows: int, columns: int, deviation: float = 0.02) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * deviation

    weights = {"model.embed_tokens.weight": normal(shape.vocabulary, shape.hidden)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[layer + "self_attn.q_proj.weight"] = normal(wide, shape.hidden)
        weights[layer + "self_attn.k_proj.weight"] = normal(narrow, shape.hidden)
        weights[layer + "self_attn.v_proj.weight"] = normal(narrow, shape.hidden)
        weights[layer + "self_attn.o_proj.weight"] = normal(shape.hidden, wide, small)
        weights[layer + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
        weights[layer + "mlp.gate_proj.weight"] = normal(shape.inner, shape.hidden)
        weights[layer + "mlp.up_proj.weight"] = normal(shape.inner, shape.hidden)
        weights[layer + "mlp.down_proj.weight"] = normal(shape.hidden, shape.inner, small)
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    return {name: tensor.requires_grad_() for name, tensor in weights.items()}


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    """f32[N, K] as group quantization to 4 bits (32 a group, as q4f16_1) would read it back.

    Gradients pass straight through (Bengio et al. 2013, arXiv:1308.3432), so that the weights settle where
    rounding changes little.
    """
    groups = weight.detach().reshape(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-8)
    rounded = ((groups / scale).round() * scale).reshape(weight.shape)
    return weight + (rounded - weight.detach())


def _unit(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without its weight: bf16[..., d] -> the same."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return x * torch.rsqrt(norm.square() / x.shape[-1] + eps).to(x.dtype)


def rotation(shape: Shape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of RoPE's angles, bf16[length, 1, head] (Su et al. 2021, arXiv:2104.09864)."""
    frequencies = shape.theta ** (-torch.arange(0, shape.head, 2) / shape.head)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)[:, None, :]
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of q bf16[B, H, T, d] to k and v bf16[B, H', T, d] -> [B, H, T, d]."""
    batch, heads, length, _ = q.shape
    if length > 128:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # In short rows the gradient of the fused kernel takes many times as long as that of products and a softmax.
    grouped = (batch, k.shape[1], heads // k.shape[1] * length, -1)
    scores = q.reshape(grouped) @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.full((length, length), -math.inf, dtype=q.dtype).triu(1).repeat(heads // k.shape[1], 1)
    return (torch.softmax(scores + later, -1) @ v).view(q.shape)


def forward(weights: Weights, shape: Shape, ids: torch.Tensor) -> torch.Tensor:
    """ids i64[B, T] -> hidden states before the last norm's weight, bf16[B, T, hidden]."""
    return run(weights, shape, F.embedding(ids, weights["model.embed_tokens.weight"].bfloat16()))


def run(weights: Weights, shape: Shape, x: torch.Tensor) -> torch.Tensor:
    """Embedded tokens bf16[B, T, hidden] -> what `forward` returns for them."""
    batch, length, _ = x.shape
    cos, sin = rotation(shape, length)
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        norm = weights[layer + "input_layernorm.weight"]
        joined = torch.cat([weights[f"{layer}self_attn.{n}_proj.weight"] for n in "qkv"]) * norm
        qkv = F.linear(_unit(x, shape.eps), joined.bfloat16()).view(batch, length, sum(sizes), shape.head)
        turned = _rotate(qkv[:, :, : sizes[0] + sizes[1]], cos, sin)
        q, k = turned.transpose(1, 2).split(sizes[:2], 1)
        v = qkv[:, :, -sizes[2] :].transpose(1, 2)
        mixed = _attend(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        x = x + F.linear(mixed, weights[layer + "self_attn.o_proj.weight"].bfloat16())
        norm = weights[layer + "post_attention_layernorm.weight"]
        joined = torch.cat([weights[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up")]) * norm
        gate, up = F.linear(_unit(x, shape.eps), joined.bfloat16()).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, weights[layer + "mlp.down_proj.weight"].bfloat16())
    return _unit(x, shape.eps)


def logits(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Scores of the vocabulary, f32[N, V], for hidden states bf16[N, hidden] of `forward`."""
    output = weights["model.embed_tokens.weight"] * weights["model.norm.weight"]
    return F.linear(hidden, output.bfloat16()).float()
