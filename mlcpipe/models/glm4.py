"""GLM-4-0414 (Z.ai 2025): GLM with norms also after attention and MLP.

Models: GLM-4-9B-0414, GLM-4-32B-0414, GLM-Z1; the text of GLM-OCR.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.models.glm import GGUF_NAMES, build_of
from mlcpipe.models.qwen2 import complete_gguf
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder_layer import LayerForm
from mlcpipe.nn.gguf import GgufFamily, GgufFile, read_drafts

FORM = LayerForm(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a GLM-4-0414 config.json. Raises ConfigError for unsupported fields."""
    return build_of(config, FORM)


_POST_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Of texts that see, llama.cpp's conversion has the rows of q and k in halves: its m-rope rotates them so."""
    complete_gguf(file, config)
    read_drafts(file, config)
    config["rope_interleave"] = file.get("rope.dimension_sections") is None


GGUF = GgufFamily("glm4", _complete_gguf, {**GGUF_NAMES, **_POST_NORMS}, rope="partial")
