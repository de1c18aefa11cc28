"""RWKV-7 "Goose" (Peng et al. 2025): a recurrence over matrices in every layer, which mixes each row with the last.

Models: RWKV7 World and G1, 0.1B to 2.9B, in the format of flash-linear-attention (hub organization fla-hub).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlcpipe.errors import ConfigError
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import no_rope
from mlcpipe.nn.rwkv7 import FirstValues, RwkvLayer, RwkvSpec

DEFAULTS = Defaults(
    positions=2048,
    norm=NormSpec("layer", 1e-5, bias=True),
    act="sqrelu",
    expansion=4,
    names={"rms_norm_eps": "norm_eps", "num_attention_heads": "num_heads"},
)
NAMES = CheckpointNames(
    top={"embed_tokens": "embeddings", "embedding_norm": "layers.0.pre_norm"},
    layer={f"attn.{x}_lora.{one}": f"attn.{x}_lora.lora.{at}" for x in "wavg" for one, at in (("a", 0), ("b", 2))},
)
MAX_DIM = 128  # of a head, whose columns kernels hold in registers
FIXED: Mapping[str, list[Any]] = {
    "hidden_act": [None, "sqrelu"],
    "attn": [None],  # layers that attend
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "layer_types": [None],
    "sliding_window": [None],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for an RWKV-7 config.json. Raises ConfigError for unsupported fields.

    The number of heads follows from their size, whatever files say: those of flash-linear-attention's converter are
    wrong.
    """
    stated = Fields(config)
    hidden, dim = stated.integer("hidden_size", 2048), stated.integer("head_dim", 64, high=MAX_DIM)
    if hidden % dim:
        raise ConfigError("field head_dim", where=stated.where, expected=f"a divisor of {hidden}", found=dim)
    base = read_base({**dict(config.items()), "num_heads": hidden // dim}, DEFAULTS, **FIXED)
    fields, count = base.fields, base.num_layers
    fields.refuse(
        num_attention_heads=[None, base.num_heads],
        value_dim=[None, hidden, [hidden] * count],
        **({} if fields.get("intermediate_size") else {"hidden_ratio": [None, 4, 4.0]}),
    )
    base.rope()  # nothing is rotated, but what files say of it must make sense
    base = replace(base, norm=replace(base.norm, bias=fields.flag("norm_bias", True)))
    low_ranks = {"decay": 64, "a": 64, "v": 16, "gate": 128}
    of = [fields.integer(f"{name}_low_rank_dim", rank, high=hidden) for name, rank in low_ranks.items()]
    spec = RwkvSpec(hidden, base.num_heads, base.intermediate_size, (of[0], of[1], of[2], of[3]), base.norm)
    return CausalLM(
        base.facts([no_rope(dim)]),
        [RwkvLayer(spec, i) for i in range(count)],
        base.norm,
        embedding_norm=base.norm if fields.flag("norm_first", True) else None,
        streams=FirstValues(hidden),
    )
