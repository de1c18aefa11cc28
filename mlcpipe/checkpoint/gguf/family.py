"""How a family of models is stored in GGUF: what the files of `mlcpipe/models` say as `GGUF`.

Keys and tensor names are llama.cpp's (gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.ropes import linear_or_yarn, llama3
from mlcpipe.checkpoint.safetensors_reader import TensorInfo

Tensors = Mapping[str, TensorInfo]
Config = dict[str, Any]
Complete = Callable[[Metadata, str, Tensors, Config], None]

MAX_EXPERTS = 4096
ATTENTION = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    "attn_output": "self_attn.o_proj",
}
MLP = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
PRE_NORM = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
EXPERTS = {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}


@dataclass(frozen=True)
class GgufFamily:
    """A `model_type` as the architecture `arch`.

    names        of a block's tensors, by llama.cpp's
    experts      a pattern with the expert's number for each stacked tensor
    complete     adds fields to config.json
    applies      whether a file is of this family and not of one without, where several share an architecture
    interleaved  rows of q and k are in pairs, as llama.cpp rotates them
    norm_offset  was added to the weights of norms
    """

    arch: str
    complete: Complete
    names: Mapping[str, str] = field(default_factory=lambda: PRE_NORM)
    experts: Mapping[str, str] = field(default_factory=dict)
    applies: Callable[[Metadata], bool] | None = None
    interleaved: bool = False
    norm_offset: float = 0.0


def full_rope(metadata: Metadata, arch: str, tensors: Tensors, config: Config) -> None:
    """Rope over whole heads, scaled as the file says."""
    rotated = metadata.integer(f"{arch}.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise metadata.error(f"{arch}.rope.dimension_count", f"{config['head_dim']}, the size of a head", rotated)
    if (table := linear_or_yarn(metadata, arch)) is not None:
        config["rope_scaling"] = table
    if "rope_freqs.weight" in tensors:
        if table is not None:
            raise metadata.error(f"{arch}.rope.scaling.type", "none beside rope_freqs.weight")
        config["rope_scaling"] = llama3(tensors["rope_freqs.weight"], config["rope_theta"], rotated)


def read_experts(metadata: Metadata, arch: str, config: Config) -> None:
    """How many experts there are and each token uses."""
    count, used = (metadata.integer(f"{arch}.{key}") for key in ("expert_count", "expert_used_count"))
    if not 0 < used <= count <= MAX_EXPERTS:
        raise metadata.error(f"{arch}.expert_count", f"{used} to {MAX_EXPERTS}", count)
    config["num_experts"], config["num_experts_per_tok"] = count, used
