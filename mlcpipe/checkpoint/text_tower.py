"""The text model inside a model of pictures or sound: what config.json nests is laid open, the other towers left out.

Published files have the text model's fields in `text_config` (those of Qwen2-VL beside `vision_config`) and its tensors
after a prefix of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mlcpipe.checkpoint.checkpoint import Checkpoint, PictureTower, read_preprocessor
from mlcpipe.checkpoint.flat_convolutions import as_modules_have_it
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import ConfigError
from mlcpipe.support.json_files import shown
from mlcpipe.vision import has_tower, tower_names

NESTED, PICTURES = "text_config", "vision_config"
# What config.json calls the text model -> the family with the same layers.
_FAMILIES: Mapping[str, str] = {
    "gemma4_unified_text": "gemma4_text",
    "glm_ocr_text": "glm4",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}
# The models whose text is read, and its family if `text_config` does not say it. Others are refused.
TOWERS: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm_ocr": "glm_ocr_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "muse_glimmer": "muse_glimmer_text",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "smolvlm": "llama",
}
_SEES_ALL = ("paligemma",)  # in whose prompts a token attends to those after it, too
# Defaults of transformers' classes, which nested configurations leave out.
_SIZES: Mapping[str, Mapping[str, int | float]] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    "gemma3n_text": {
        "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
    },
    "gemma4_text": {
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8,
    },
    "gemma4_unified_text": {
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "max_position_embeddings": 262144, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "glm_ocr_text": {
        "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
        "attention_bias": False,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "muse_glimmer_text": {
        "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
        "num_attention_heads": 32,
    },
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip
_DERIVED_HEADS = ("glm_ocr_text",)  # of the hidden size by the number of heads, where the family has a fixed size
_PREFIXES = ("model.language_model.", "language_model.model.", "model.text_model.")
_HEAD = "lm_head."
_TOWERS = (
    "visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.", "image_newline",
    "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.", "vision_adapter.", "vision_projection.",
)  # fmt: skip
_OF_THE_WHOLE = ("quantization_config", "quantization", "eos_token_id", "bos_token_id")
_TIED = "tie_word_embeddings"  # the whole decides


def text_tower(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint of the text model alone; the same one where there is no other.

    Raises ConfigError for a `text_config` that is no object, or none of a model that should have one.
    """
    config = text_config(checkpoint.config)
    if config is checkpoint.config:
        return checkpoint
    tensors = {one.name: one for one in map(_renamed, checkpoint.tensors.values()) if one is not None}
    if tensors and not any(name.startswith(_HEAD) for name in tensors):
        config = {**config, _TIED: True}
    pictures = _pictures(checkpoint)
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    return replace(checkpoint, config=config, tensors=ordered, pictures=pictures)


def with_pictures(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the tensors of its tower."""
    tower = checkpoint.pictures
    if tower is None:
        return checkpoint
    return replace(checkpoint, tensors=MappingProxyType({**checkpoint.tensors, **tower.tensors}))


def _pictures(whole: Checkpoint) -> PictureTower | None:
    """The tower, if there is one for the family, and files of a processor."""
    preprocessor = read_preprocessor(whole.path) if has_tower(whole.config) else None
    if preprocessor is None:
        return None
    tensors, names = {}, tower_names(whole.config)
    for name, tensor in whole.tensors.items():
        name = name.removeprefix("model.")
        prefix = next((one for one in names if name.startswith(one)), None)
        if prefix is not None and names[prefix]:
            own = names[prefix] + name.removeprefix(prefix)
            tensors[own] = as_modules_have_it(replace(tensor, name=own))
    return PictureTower(whole.config, preprocessor, MappingProxyType(tensors))


def text_family(model_type: str) -> str:
    """The family of the text in one of TOWERS, if its `text_config` does not say it."""
    return _FAMILIES.get(TOWERS[model_type], TOWERS[model_type])


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model; the same object where it is not inside one of TOWERS."""
    whole, nested = str(config.get("model_type")), config.get(NESTED)
    if whole in _SEES_ALL:
        raise ConfigError(
            f"model_type {whole} is not supported", where="config.json", found="tokens that attend to all of a prompt",
            expected="a model whose tokens attend to those before them", next_step="take one that sees, such as gemma3",
        )  # fmt: skip
    if whole not in TOWERS or (nested is None and PICTURES not in config):
        return config
    if nested is None:
        nested = {name: value for name, value in config.items() if not name.endswith(("_config", "_token_id"))}
        nested.pop("architectures", None)
        nested.pop("model_type")
    if not isinstance(nested, dict):
        raise ConfigError(NESTED, where="config.json", expected="an object", found=shown(nested))
    own = nested.get("model_type") or TOWERS[whole]
    family = _FAMILIES.get(str(own), own)
    outer = {name: config[name] for name in _OF_THE_WHOLE if name in config}
    sizes = _SIZES.get(str(own)) or _SIZES.get(str(family), {})
    found = {**sizes, **outer, **nested, "model_type": family}
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if own in _DERIVED_HEADS and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        found.setdefault("head_dim", hidden // heads)
    found.pop("architectures", None)  # of the text model's class, which may be a base class
    found |= {_TIED: config[_TIED]} if _TIED in config else {}
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(found.get(name), dict):
            found[name] = _of_text(found[name])
    return found


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """A rope dictionary without sections for pictures: text has three equal positions (Qwen2-VL, Wang et al. 2024)."""
    plain = {name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")}
    for name in ("type", "rope_type"):
        if plain.get(name) == "mrope":
            plain[name] = "default"
    return plain


def _renamed(tensor: TensorInfo) -> TensorInfo | None:
    """A tensor under the name that the text model alone has for it; None for one of another tower."""
    name = tensor.name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return replace(tensor, name=f"model.{name.removeprefix(prefix)}")
    if name.startswith(f"language_model.{_HEAD}"):
        return replace(tensor, name=name.removeprefix("language_model."))
    return None if name.removeprefix("model.").startswith(_TOWERS) else tensor
