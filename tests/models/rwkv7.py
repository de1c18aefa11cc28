"""RWKV-7 as its authors publish it, for the tests: transformers has none. One row after the other, no cache.

Formulas: RWKV_x070_TMix_one and RWKV_x070_CMix_one of https://github.com/BlinkDL/RWKV-LM (RWKV-v7/rwkv_v7_numpy.py); names of
tensors and fields are those of flash-linear-attention (fla/models/rwkv7), whose converter makes the published files.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class RWKV7Config(PretrainedConfig):
    """Fields and defaults of fla/models/rwkv7/configuration_rwkv7.py."""

    model_type = "rwkv7"

    hidden_size: int = 2048
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    head_dim: int = 64
    num_heads: int = 32  # which its converter does not change
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16
    hidden_act: str = "sqrelu"
    max_position_embeddings: int = 2048
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = False
    vocab_size: int = 32000


class _LowRank(nn.Module):
    def __init__(self, size: int, rank: int, act: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(nn.Linear(size, rank, bias=False), act, nn.Linear(rank, size, bias=bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lora(x)
        return found


class _TimeMix(nn.Module):
    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()
        size, self.dim = config.hidden_size, config.head_dim
        self.heads = size // self.dim
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.full((1, 1, size), 0.5)))
        self.k_k, self.k_a = nn.Parameter(torch.full((size,), 0.7)), nn.Parameter(torch.ones(size))
        self.r_k = nn.Parameter(torch.zeros(self.heads, self.dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.w_lora = _LowRank(size, config.decay_low_rank_dim, nn.Tanh())
        self.a_lora = _LowRank(size, config.a_low_rank_dim, nn.Identity())
        if layer:
            self.v_lora = _LowRank(size, config.v_low_rank_dim, nn.Identity())
        self.g_lora = _LowRank(size, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = nn.GroupNorm(self.heads, size, eps=self.dim * config.norm_eps)

    def forward(self, x: torch.Tensor, first: list[torch.Tensor]) -> torch.Tensor:
        """x [n, hidden]; `first` has the first layer's values, which that layer adds."""
        before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        r, w, k, v, a, g = (x + (before - x) * getattr(self, f"x_{name}")[0] for name in "rwkvag")
        r, w, k, value = self.r_proj(r), self.w_lora(w), self.k_proj(k), self.v_proj(v)
        a, g = torch.sigmoid(self.a_lora(a)), self.g_lora(g)
        if first:
            value = value + (first[0] - value) * torch.sigmoid(self.v_lora(v))
        else:
            first.append(value)
        w = torch.exp(-torch.sigmoid(w) / torch.e**0.5)
        kk = F.normalize((k * self.k_k).view(len(x), self.heads, self.dim), dim=2)
        k = k * (1 + (a - 1) * self.k_a)
        r, w, k, v, a = (one.view(len(x), self.heads, self.dim) for one in (r, w, k, value, a))
        state, made = x.new_zeros(self.heads, self.dim, self.dim), []
        for t in range(len(x)):
            # S [heads, values, keys] = S diag(w) - S kk^T (kk a) + v^T k
            removed = state @ kk[t, ..., None]
            state = state * w[t, :, None] - removed * (kk[t] * a[t])[:, None] + v[t, ..., None] * k[t, :, None]
            made.append((state @ r[t, ..., None]).view(-1))
        y = self.g_norm(torch.stack(made)).view(v.shape) + (r * k * self.r_k).sum(dim=2, keepdim=True) * v
        found: torch.Tensor = self.o_proj(y.reshape(len(x), -1) * g)
        return found


class _ChannelMix(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        size = config.hidden_size
        width = config.intermediate_size or 4 * size
        self.x_k = nn.Parameter(torch.full((size,), 0.5))
        self.key, self.value = nn.Linear(size, width, bias=False), nn.Linear(width, size, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(rows[:1]), rows[:-1]])
        found: torch.Tensor = self.value(F.relu(self.key(rows + (before - rows) * self.x_k)) ** 2)
        return found


class _Layer(nn.Module):
    def __init__(self, config: RWKV7Config, layer: int) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)

        if config.norm_first and not layer:
            self.pre_norm = norm()
        self.attn_norm, self.ffn_norm = norm(), norm()
        self.attn, self.ffn = _TimeMix(config, layer), _ChannelMix(config)

    def forward(self, rows: torch.Tensor, first: list[torch.Tensor]) -> torch.Tensor:
        rows = self.pre_norm(rows) if hasattr(self, "pre_norm") else rows
        rows = rows + self.attn(self.attn_norm(rows), first)
        return rows + self.ffn(self.ffn_norm(rows))


class _Model(nn.Module):
    def __init__(self, config: RWKV7Config) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps, bias=config.norm_bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, first = self.embeddings(ids), list[torch.Tensor]()
        for layer in self.layers:
            rows = layer(rows, first)
        found: torch.Tensor = self.norm(rows)
        return found


class RWKV7ForCausalLM(PreTrainedModel, GenerationMixin):
    """The whole text is computed for each token."""

    config_class = RWKV7Config
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = _Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embeddings

    def _init_weights(self, module: nn.Module) -> None:
        """As the modules are made."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> CausalLMOutput:
        """input_ids i64[1, n] -> logits [1, n, vocab]."""
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids[0]))[None])


def register() -> None:
    """Have transformers know the family."""
    AutoConfig.register("rwkv7", RWKV7Config, exist_ok=True)
    AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)
