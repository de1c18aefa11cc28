"""Towers that turn pictures into rows beside a text's embeddings, one file each.

`processors` has the other half, without TVM: from a picture's pixels to the tower's patches.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlcpipe.nn.tower import Tower

# The `model_type` of the whole -> the file of its tower. Of other models that see the text is read alone.
_TOWERS: Mapping[str, str] = {
    "gemma3": "gemma3", "gemma4": "gemma4", "glm_ocr": "glm_ocr", "idefics3": "idefics3", "internvl": "internvl",
    "lfm2_vl": "lfm2_vl", "llava_onevision": "llava_onevision", "mistral3": "pixtral", "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_vl": "qwen2_vl", "smolvlm": "idefics3",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), "qwen3_vl"),
}  # fmt: skip
# Beginnings of the names of a tower's tensors, after `model.` -> those of its modules, the first that fits; the others
# are not read.
_SIGLIP = {
    "vision_tower.vision_model.head.": "", "vision_tower.head.": "", "vision_tower.vision_model.": "tower.model.",
    "vision_tower.": "tower.model.", "multi_modal_projector.": "tower.projector.",
}  # fmt: skip
_PLAIN = {"vision_tower.": "tower.model.", "multi_modal_projector.": "tower.projector."}
_QWEN = {
    "visual.merger.": "tower.projector.merger.",
    "visual.deepstack_merger_list.": "tower.projector.deepstack_merger_list.",
    "visual.": "tower.model.",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "gemma3": _SIGLIP,
    "gemma4": {
        "vision_tower.std_": "tower.projector.std_",
        "vision_tower.": "tower.model.",
        "embed_vision.": "tower.projector.",
    },
    "glm_ocr": {
        **{f"visual.{part}.": f"tower.projector.{part}." for part in ("post_layernorm", "downsample", "merger")},
        "visual.": "tower.model.",
    },
    "idefics3": {"vision_model.": "tower.model.", "connector.": "tower.projector."},
    "internvl": {"vision_tower.embeddings.mask_token": "", **_PLAIN},
    "lfm2_vl": _SIGLIP,
    "llava_onevision": {
        "vision_tower.vision_model.post_layernorm.": "",
        "vision_tower.post_layernorm.": "",
        "image_newline": "tower.projector.image_newline",
        **_SIGLIP,
    },
    "pixtral": _PLAIN,
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_vl"), _QWEN),
}
VIDEO_PROCESSOR = "video_processor"  # among the fields of pictures: those of videos alone
TURNED = ("projector.mm_input_projection_weight",)  # how the names of matrices [in, out] end


def towers() -> tuple[str, ...]:
    """The files of towers."""
    return tuple(sorted(set(_TOWERS.values())))


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether there is a tower for the whole's config.json."""
    return config.get("model_type") in _TOWERS


def tower_names(config: Mapping[str, Any]) -> Mapping[str, str]:
    """Beginnings of the names of the tensors of the whole's tower, after `model.` -> those of its modules; "": none."""
    return _NAMES[_TOWERS[config["model_type"]]]


def build_tower(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of the whole's config.json and preprocessor_config.json. Raises ConfigError for unsupported fields."""
    module = importlib.import_module(f"mlcpipe.vision.{_TOWERS[config['model_type']]}")
    tower: Tower = module.build(config, preprocessor)
    return tower
