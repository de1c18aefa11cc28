"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention with norms before blocks, and DeepSeek V3's mixtures.

The layer that drafts is dense and attends as the first one; its tensors' names and sizes are those of vLLM's
`exaone_moe_mtp.py`.

Models: K-EXAONE 236B-A23B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.exaone4 import DEFAULT_PATTERN, hybrid_windows
from mlcpipe.models.glm4_moe import complete_gguf, drafts_itself, grouped_routing
from mlcpipe.models.glm4_moe_lite import dense_after, sparse_where_listed
from mlcpipe.models.qwen3_5_text import MTP
from mlcpipe.nn.base_config import Defaults, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import SLIDES, layer_kinds
from mlcpipe.nn.decoder import decoder
from mlcpipe.nn.gguf import EXPERTS, MOE, PRE_NORM, GgufFamily, GgufFile, read_drafts, read_windows
from mlcpipe.nn.moe import expert_counts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec

DEFAULTS = Defaults(positions=2048, num_kv_heads=32, norm=NormSpec(eps=1e-5), intermediate_size=16384)
NAMES = CheckpointNames(
    unused=("mtp.",),
    top=MTP,
    layer={
        "mlp.gate.e_score_correction_bias": "mlp.e_score_correction_bias",
        "mlp.shared_expert": "mlp.shared_experts",
    },
)
# What published files say and no model of the family does otherwise.
FIXED: Mapping[str, list[Any]] = {
    "attention_bias": [None, False],
    "mlp_bias": [None, False],
    "scoring_func": [None, "sigmoid"],
    "topk_method": [None, "noaux_tc"],
}


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a K-EXAONE config.json. Raises ConfigError for unsupported fields."""
    base = read_base(config, DEFAULTS, **FIXED)
    fields = base.fields
    windows, rotated = hybrid_windows(base)
    routing = grouped_routing(fields, *expert_counts(fields, 64, 8), normalize=True, scale=2.5)
    shared = fields.integer("num_shared_experts", 1, low=0, high=4096)
    mlp = sparse_where_listed(base, routing, dense=1, shared=shared, width=1024)
    specs = base.attentions(windows, norm="head")
    slides = layer_kinds(fields, 1, SLIDES, name="mtp_layer_types")
    as_first = slides is None or slides[0] == (windows[0] is not None)
    drafts = specs[0] if drafts_itself(base) and rotated[0] and as_first else None
    return decoder(base, specs, dense_after(base, mlp), rotated=rotated, drafts=drafts)


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    read_drafts(file, config)
    complete_gguf(file, config)
    config["num_shared_experts"] = config.pop("n_shared_experts")
    read_windows(file, config, DEFAULT_PATTERN)


GGUF = GgufFamily("exaone-moe", _complete_gguf, {**PRE_NORM, **MOE}, EXPERTS)
