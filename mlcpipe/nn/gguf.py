"""How a family of models is stored in GGUF: the type of `GGUF` in the files of `mlcpipe/models`.

Keys and tensor names are llama.cpp's (gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import ConfigError

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
PLAIN_MLP = {f"ffn_{x}": f"mlp.{x}_proj" for x in ("up", "down")}
FUSED = {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
MOE = {
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}
LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    **{f"attn_q_{x}": f"self_attn.q_{x}_proj" for x in "ab"},
    **{f"attn_{x}_a_norm": f"self_attn.{x}_a_layernorm" for x in ("q", "kv")},
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    **{f"attn_{x}_b": f"self_attn.{x}_b_proj" for x in ("kv", "k", "v")},
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
EXPERTS = {f"ffn_{x}_exps": f"mlp.experts.{{}}.{x}_proj" for x in ("gate", "up", "down")}
SCAN = {
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_in": "mamba.in_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
CHANNEL_SCAN = {
    **{name: SCAN[name] for name in ("ssm_a", "ssm_d", "ssm_conv1d", "ssm_in", "ssm_out")},
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    **{f"ssm_{x}_norm": f"mamba.{x}_layernorm" for x in ("dt", "b", "c")},
}


class GgufFile(Protocol):
    """Metadata by keys without the architecture, and names of tensors. Raises ConfigError that names the key."""

    def __contains__(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""

    def rows(self, tensor: str) -> int:
        """The first extent of a tensor, 0 if there is none."""

    def vector(self, tensor: str, count: int) -> NDArray[np.float32]:
        """The `count` numbers of a tensor, f32[count]."""

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer."""

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """An array of `count` numbers."""

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type."""

    def error(self, key: str, expected: object, found: object = None) -> ConfigError:
        """An error about a key."""


@dataclass(frozen=True)
class GgufFamily:
    """A `model_type` as the architecture `arch`, or one of those of `also`, which differ outside the text model.

    complete     adds fields to config.json, which has those of all families and `rope_scaling`
    names        llama.cpp's tensor name -> Hugging Face's, both without the prefix that all families share; in one with
                 "{}" each row of the tensor has its number there
    names_of     names that depend on the file, in place of `names`
    numbers      key of metadata, without the architecture, that has a number of each layer -> the tensor that
                 Hugging Face has for it, or the value that it must have
    experts      a pattern with the expert's number for each stacked tensor
    applies      whether a file is of this family, where several share an architecture
    rope         "full" rotates whole heads, "partial" a part of each, scaled as the file says; "longrope" has tensors
                 of factors; of "proportional" heads a part has angles, as a tensor of divisors says
    interleaved  rows of q and k are in pairs, as llama.cpp rotates them
    grouped      rows of attn_qkv are those of q, of k and of v, which the checkpoint has by KV head
    norm_offset  added to the weights of norms in the file
    last_offset  added to those of the norm after the last layer, by default the same
    folded       tensors of layers whose numbers `complete` reads, as no tensor of the checkpoint has them
    by_layer     MLPs' widths and numbers of heads may be listed by layer; `complete` reads them
    latent       attention is latent: its keys and values have the sizes that `read_latent` reads
    some_attend  the number of KV heads is listed by layer, 0 for layers without attention; `complete` reads it
    """

    arch: str
    complete: Callable[[GgufFile, dict[str, Any]], None] | None = None
    names: Mapping[str, str] = field(default_factory=lambda: PRE_NORM)
    experts: Mapping[str, str] = field(default_factory=dict)
    applies: Callable[[GgufFile], bool] | None = None
    rope: Literal["full", "partial", "longrope", "proportional"] = "full"
    interleaved: bool = False
    grouped: bool = False
    norm_offset: float = 0.0
    last_offset: float | None = None
    folded: tuple[str, ...] = ()
    some_attend: bool = False
    by_layer: bool = False
    latent: bool = False
    also: tuple[str, ...] = ()
    names_of: Callable[[GgufFile], Mapping[str, str]] | None = None
    numbers: Mapping[str, str | float] = field(default_factory=dict)


def by_layer(file: GgufFile, key: str, layers: int) -> list[int]:
    """The positive integers of all layers, which the file lists or has as one."""
    if not 1 <= layers <= 1024:
        raise file.error("block_count", "1 to 1024", layers)
    if isinstance(stated := file.get(key), int):
        return [stated] * layers
    numbers = file.numbers(key, layers)
    if numbers.dtype.kind not in "iu" or numbers.min(initial=1) < 1:
        raise file.error(key, "positive integers")
    found: list[int] = numbers.tolist()
    return found


def read_experts(file: GgufFile, config: dict[str, Any], score: Literal["softmax", "sigmoid"] = "softmax") -> None:
    """Read the number of experts, of those that a token uses, and their width. The family's router has that `score`."""
    known = (2,) if score == "sigmoid" else (1, 3)  # 3: softmax of the chosen ones
    if file.integer("expert_gating_func", known[0]) not in known:
        raise file.error("expert_gating_func", f"{known[0]}, {score}")
    count, used = file.integer("expert_count"), file.integer("expert_used_count")
    if not 0 < used <= count <= MAX_EXPERTS:
        raise file.error("expert_count", f"{used} to {MAX_EXPERTS}", count)
    config["num_experts"], config["num_experts_per_tok"] = count, used
    config["moe_intermediate_size"] = file.integer("expert_feed_forward_length", config["intermediate_size"])


def read_latent(file: GgufFile, config: dict[str, Any]) -> None:
    """Read the sizes of latent attention. Older files have those of whole heads where newer ones have cached ones."""
    heads, rotated = config["num_attention_heads"], config["head_dim"]
    key = file.integer("attention.key_length_mla", file.integer("attention.key_length"))
    if not rotated < key:
        raise file.error("attention.key_length", f"more than {rotated}, the dimensions that rope rotates", key)
    value = file.integer("attention.value_length", config["hidden_size"] // heads)
    config |= {
        "num_key_value_heads": heads,
        "q_lora_rank": file.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": file.integer("attention.value_length_mla", value),
    }
    table = config.get("rope_scaling") or {}
    if grown := table.get("mscale_all_dim"):  # llama.cpp keeps a tenth of it, and takes mscale for equal
        grown = float(f"{10 * grown:.6g}")
        config["rope_scaling"] = table | {"mscale": grown, "mscale_all_dim": grown}


def read_growth(file: GgufFile, config: dict[str, Any]) -> None:
    """Read by how much queries grow with their position (Ministral 3), and from which length of the rope's table on."""
    table = config.setdefault("rope_scaling", {"rope_type": "default"})
    length = table.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    if file.integer("attention.temperature_length", length) != length:
        raise file.error("attention.temperature_length", length)
    table["llama_4_scaling_beta"] = file.number("attention.temperature_scale", 0.0)


def read_drafts(file: GgufFile, config: dict[str, Any]) -> None:
    """Leave layers out that follow the last one to draft tokens; the number of blocks counts them."""
    drafts, blocks = file.integer("nextn_predict_layers", 0), config["num_hidden_layers"]
    if drafts >= blocks:
        raise file.error("nextn_predict_layers", f"less than {blocks}", drafts)
    config.update(num_hidden_layers=blocks - drafts, num_nextn_predict_layers=drafts)


def read_windows(file: GgufFile, config: dict[str, Any], period: int, window: int = 0) -> None:
    """Read the window, by default this one, and which layers slide: all but every `period`-th."""
    layers, window = config["num_hidden_layers"], file.integer("attention.sliding_window", window)
    stated = file.get("attention.sliding_window_pattern", period)
    if type(stated) is int and stated > 0:
        slides = [(i + 1) % stated != 0 for i in range(min(layers, 1024))]
    else:
        slides = file.numbers("attention.sliding_window_pattern", layers).astype(bool).tolist()
    config["sliding_window"] = window or None
    config["layer_types"] = [f"{'sliding' if slide and window else 'full'}_attention" for slide in slides]
