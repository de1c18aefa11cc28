"""Tiny random models that see as Qwen2-VL, Qwen3-VL and Qwen 3.5 do, with a chat template like theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models import sight, sight_videos

PREPROCESSOR = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.4], "size": {"shortest_edge": 256, "longest_edge": 4096},
}  # fmt: skip
SPECIAL = ("<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO = 258, 300
TEXT = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
VISION = {"depth": 3, "num_heads": 2, "patch_size": 4}
TABLE = {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64, "num_position_embeddings": 25}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 16},
    ),
    "qwen3_vl": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}, "head_dim": 32},
        {**TABLE, "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_5": (
        {
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25
            },
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 32,
        },
        TABLE,
    ),
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write(folder: Path, model_type: str) -> Any:
    """Write the checkpoint -> the model of transformers, whose weights' deviation lets its logits differ."""
    folder.mkdir(parents=True, exist_ok=True)
    sight.write_tokenizer(folder, TEMPLATE, SPECIAL)
    text, vision = KINDS[model_type]
    config = transformers.AutoConfig.for_model(
        model_type, text_config={**TEXT, **text}, vision_config={**VISION, **vision}, image_token_id=IMAGE,
        video_token_id=VIDEO, vision_start_token_id=259, vision_end_token_id=260,
    )  # fmt: skip
    torch.manual_seed(0)
    deviation = 0.1 if model_type == "qwen3_5" else 0.15  # delta nets make more of rounding
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * deviation + (parameter.dim() == 1))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(sight_videos.PREPROCESSOR))
    if model_type == "qwen3_5":
        _add_head(folder, model.model.language_model.layers[1].state_dict())
    return model


def _add_head(folder: Path, layer: dict[str, Any]) -> None:
    """The layer that published files of Qwen 3.5 have to draft tokens; it does not change what a model writes."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    norms = {f"mtp.{name}.weight": torch.ones(64) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head = {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in layer.items()}
    file = folder / "model.safetensors"
    save_file({**load_file(file), **norms, **head, "mtp.fc.weight": torch.randn(64, 128) * 0.1}, file)
