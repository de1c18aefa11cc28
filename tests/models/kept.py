"""Small models as GGUF files in block formats, which kernels read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

from mlcpipe.checkpoint import open_checkpoint
from tests.models import tiny
from tests.unit.checkpoint.gguf_files import write_gguf

SEED = 3
K_QUANTS = (("llama", "Q4_K"), ("qwen2", "Q6_K"), ("qwen3", "Q5_K"), ("olmo2", "Q3_K"), ("phi3", "Q2_K"))
TABLES = (("llama", "IQ4_XS"), ("qwen2", "IQ3_S"), ("qwen3", "NVFP4"), ("llama", "TQ1_0"), ("olmo2", "IQ1_S"))
EXPERTS = (("mixtral", "Q4_0"), ("mixtral", "Q4_K"), ("qwen3_moe", "IQ4_NL"), ("qwen3_moe", "MXFP4"))
CASES = (
    ("llama", "Q4_0"),
    ("llama", "F16"),
    ("llama", "Q5_1"),
    ("qwen2", "Q8_0"),
    *EXPERTS,
    ("gpt_oss", "MXFP4"),
    *K_QUANTS,
    *TABLES,
)
SLOTS = (("lfm2", "Q4_0"), ("minicpm3", "Q8_0"))  # not for browsers
# Experts whose gate and up differ, as `--tensor-type` makes them.
MIXED = (("mixtral", "Q4_K+Q3_K"), ("qwen3_moe", "Q8_0+F16"), ("gpt_oss", "MXFP4+Q4_0"))
# What GGUF stores; the rest of a family's variants it cannot tell.
FIELDS: dict[str, dict[str, Any]] = {
    "bitnet": {"tie_word_embeddings": True},
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 48},
    "falcon": {"num_kv_heads": 1},
    "falcon_h1": {
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        **{f"{part}_{side}_multiplier": 1.0 for part in ("attention", "ssm") for side in ("in", "out")},
        **{f"{part}_multiplier": 1.0 for part in ("key", "lm_head", "embedding")},
        "mamba_n_groups": 2,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "qwen3_moe": {"norm_topk_prob": True},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "gemma3n_text": {"laurel_rank": 64, "altup_num_inputs": 4, "vocab_size_per_layer_input": 160},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), {"linear_num_value_heads": 2}),
    "laguna": {"moe_router_logit_softcapping": 0.0},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "afmoe": {"global_attn_every_n_layers": 4, "num_hidden_layers": 5},
    "llama4_text": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "mellum": {"mlp_layer_types": ["sparse"] * 3},
    "minicpm3": {"dim_model_base": 256, "v_head_dim": 16, "q_lora_rank": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mamba"]},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 5},
}
_WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows of whole super-blocks
_HEADS = {name: {"head_dim": 64} for name in ("llama", "qwen3", "mixtral")}  # where it is not hidden_size / 4


def kept_file(model_type: str, kind: str, folder: Path) -> tuple[tiny.TinyCase, Path]:
    """A small model of a family, and its GGUF file with all matrices in one format, but `Q4_K+Q3_K`: experts' up."""
    kinds = [gguf.GGMLQuantizationType[name] for name in kind.split("+")]
    elements = gguf.constants.GGML_QUANT_SIZES[kinds[0]][0]
    wide = {**_WIDE, **_HEADS.get(model_type, {})} if elements > 32 else {}
    case = tiny.TinyCase(model_type, "default", {**FIELDS.get(model_type, {}), **wide})
    source = open_checkpoint(tiny.write_tiny(case, folder / "source", seed=SEED))
    return case, write_gguf(source, folder / "model.gguf", kinds[0], up=kinds[-1])
