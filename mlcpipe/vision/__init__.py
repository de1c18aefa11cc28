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
    "idefics3": "idefics3",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_vl": "qwen2_vl",
    "smolvlm": "idefics3",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"), "qwen3_vl"),
}
# Beginnings of the names of a tower's tensors, after `model.` -> those of its modules. The first that fits counts.
NAMES: Mapping[str, str] = {
    "vision_model.": "tower.model.",
    "connector.": "tower.projector.",
    "visual.merger.": "tower.projector.merger.",
    "visual.deepstack_merger_list.": "tower.projector.deepstack_merger_list.",
    "visual.": "tower.model.",
}


def has_tower(config: Mapping[str, Any]) -> bool:
    """Whether there is a tower for the whole's config.json."""
    return config.get("model_type") in _TOWERS


def build_tower(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of the whole's config.json and preprocessor_config.json. Raises ConfigError for unsupported fields."""
    module = importlib.import_module(f"mlcpipe.vision.{_TOWERS[config['model_type']]}")
    tower: Tower = module.build(config, preprocessor)
    return tower
