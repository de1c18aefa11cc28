"""Zamba 2 (Zyphra 2024): Mamba-2 in every layer; some first use one of a few shared blocks of attention and MLP.

Models: Zamba2 1.2B, 2.7B, 7B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import BaseConfig, Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_kinds
from mlcpipe.nn.decoder_layer import MIXER_ALONE, DecoderLayer
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mamba2 import Mamba2, read_mamba2
from mlcpipe.nn.mlp import FusedGatedMLP
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import no_rope
from mlcpipe.nn.shared_block import Adapted, FirstInput, share
from mlcpipe.nn.step_states import StepStates

DEFAULTS = Defaults(positions=4096, norm=NormSpec(eps=1e-5), tied=True, act="gelu", expansion=4)
_SHARED = "shared_transformer"
NAMES = CheckpointNames(
    top={"norm": "final_layernorm"},
    layer={
        **{f"{_SHARED}.self_attn.{x}_proj.linear": f"{_SHARED}.self_attn.{x}_proj" for x in "qkv"},
        f"{_SHARED}.feed_forward.gate_up_proj.linear": f"{_SHARED}.feed_forward.gate_up_proj",
        **{
            f"{_SHARED}.{of}_proj.adapters.{{}}.{matrix}": f"{_SHARED}.{to}_adapter_list.{{}}.{at}"
            for of, to in (
                ("feed_forward.gate_up", "feed_forward.gate_up_proj"),
                *((f"self_attn.{x}", f"self_attn.linear_{x}") for x in "qkv"),
            )
            for at, matrix in enumerate("ab")
        },
    },
)
FORM = replace(MIXER_ALONE, before_mixer="input_layernorm")
LAYERS, USUAL = 54, (6, 12, 18, 24, 30, 36, 42, 47, 51)  # of a file that does not say which are hybrid
KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}
SCAN: Mapping[str, tuple[str, int | bool]] = {
    "heads": ("n_mamba_heads", 8),
    "state_size": ("mamba_d_state", 64),
    "groups": ("mamba_ngroups", 1),
    "taps": ("mamba_d_conv", 4),
    "bias": ("add_bias_linear", False),
    "out_bias": ("add_bias_linear", False),
}
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "use_conv_bias": [None, True],
    "use_long_context": [None, False],
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "sliding_window": [None],
    "residual_in_fp32": [None, False],
    "tie_word_embeddings": [None, True],  # transformers shares no blocks in other models
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Zamba 2 config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields, hidden, count = base.fields, base.hidden_size, base.num_layers
    base = replace(base, head_dim=2 * hidden // base.num_heads)
    fields.refuse(**dict.fromkeys(("attention_head_dim", "head_dim"), [None, base.head_dim]))
    hybrid = _hybrid(fields, count)
    inner = fields.integer("mamba_expand", 2, high=64) * hidden
    scan = read_mamba2(fields, hidden, inner, "mamba_headdim", SCAN, eps=1e-5)
    uses, blocks = sum(hybrid), fields.integer("num_mem_blocks", 1, high=64)
    layers: list[nn.Module] = []
    shared: list[SharedBlock] = []
    for index in range(count):
        scans = ScanLayer(Mamba2(scan, index), None, hidden, base.norm, FORM, mixer_name="mamba")
        if not hybrid[index]:
            layers.append(scans)
            continue
        use = len(shared)
        shared.append(SharedBlock(base, index, range(use % blocks, uses, blocks), uses))
        if use >= blocks:
            share(shared[use], shared[use % blocks], use)
        layers.append(HybridLayer(shared[use], hidden, scans, unused=(f"{_SHARED}.",) if use >= blocks else ()))
    rope = base.rope()
    if not fields.flag("use_mem_rope", False):
        rope = no_rope(base.head_dim)
    return CausalLM(base.facts([rope]), layers, base.norm, per_layer=FirstInput())


def _hybrid(fields: Fields, count: int) -> list[bool]:
    """Whether each layer uses a shared block."""
    several = [layer_kinds(fields, count, KINDS, name=name) for name in ("layers_block_type", "layer_types")]
    if stated := [one for one in several if one is not None]:
        return stated[0]
    if count != LAYERS:
        raise ConfigError("field layers_block_type", where=fields.where, expected=f"{count} kinds", found="none")
    return [i in USUAL for i in range(count)]


class ScanLayer(DecoderLayer):
    """A layer that scans its input alone."""

    def forward(
        self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor, first: Tensor | None = None
    ) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return super().forward(x, kv, cos, sin)


class SharedBlock(nn.Module):
    """mlp(norm(attention(norm([x; first])))), nothing added to anything; adapters are those of `uses` of `count`."""

    def __init__(self, base: BaseConfig, layer: int, uses: range, count: int) -> None:
        fields, hidden = base.fields, base.hidden_size
        spec = base.attention(input_size=2 * hidden, scale=(base.head_dim / 2) ** -0.5)
        bias, rank = fields.flag("add_bias_linear", False), fields.integer("adapter_rank", 128)
        self.input_layernorm, self.pre_ff_layernorm = base.norm(2 * hidden), base.norm(hidden)
        self.self_attn = Attention(spec, layer)
        self.feed_forward = FusedGatedMLP(hidden, base.intermediate_size, base.act, bias)
        if fields.flag("use_shared_attention_adapter", False):
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self.self_attn, name, Adapted(getattr(self.self_attn, name), rank, uses, count))
        self.feed_forward.gate_up_proj = Adapted(self.feed_forward.gate_up_proj, rank, uses, count)

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor, first: Tensor) -> Tensor:
        """x and first [m, hidden] -> [m, hidden]."""
        both = self.input_layernorm(op.concat([x, first], dim=1))
        return self.feed_forward(self.pre_ff_layernorm(self.self_attn(both, kv, cos, sin)))


class HybridLayer(nn.Module):
    """x + mamba(norm(x + linear(shared(x, first)))). `unused`: what files may have of a block that another has."""

    def __init__(self, shared: SharedBlock, hidden_size: int, scans: ScanLayer, unused: tuple[str, ...]) -> None:
        self.shared_transformer, self.linear, self.mamba_decoder = shared, Linear(hidden_size, hidden_size), scans
        self.unused = unused

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor, first: Tensor) -> Tensor:
        """x and first, the input of the first layer, [m, hidden] -> [m, hidden]."""
        scans = self.mamba_decoder
        added = op.add(x, self.linear(self.shared_transformer(x, kv, cos, sin, first)))
        return op.add(x, scans.mamba(scans.input_layernorm(added), kv, cos, sin))
