"""The text model inside models of pictures: its checkpoint is that of the text model alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.checkpoint.checkpoint import read_preprocessor
from mlcpipe.checkpoint.text_tower import text_config
from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model

TEXT = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VIT = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
}
SIGLIP = {**VIT, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
CLIP = {**SIGLIP, "model_type": "clip_vision_model"}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}}
IDS = {f"{name}_token_id": 250 + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
GEMMA = {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
GEMMA4 = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "full")]
# The whole's fields, and how published files name its text model's tensors where transformers 5 does otherwise.
WHOLES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, str]]] = {
    "gemma3": (
        {"text_config": {**TEXT, **GEMMA}, "vision_config": SIGLIP, "mm_tokens_per_image": 4},
        {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."},
    ),
    "gemma4": (
        {
            "text_config": {**TEXT, "num_hidden_layers": 6, "num_kv_shared_layers": 3, "layer_types": GEMMA4, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
            "vision_config": {**VIT, "patch_size": 4, "position_embedding_size": 16},
        },
        {},
    ),
    "internvl": (
        {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": {**VIT, "image_size": [32, 32], "patch_size": [8, 8]}},
        {},
    ),
    "llama4": (
        {"text_config": {**TEXT, "model_type": "llama4_text", "intermediate_size_mlp": 80, "num_local_experts": 2},
         "vision_config": {**VIT, "image_size": 32, "patch_size": 8, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}},
        {},
    ),
    "llava": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP},
        {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ),
    "mistral3": (
        {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": {**VIT, "model_type": "pixtral", "head_dim": 16, "image_size": 32, "patch_size": 4}},
        {},
    ),
    "llava_next": (
        {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": CLIP},
        {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    ),
    "qwen2_5_vl": (
        {"text_config": {**TEXT, **MROPE}, "vision_config": {**QWEN_VIT, "fullatt_block_indexes": [0]}, **IDS},
        {"model.language_model.": "model.", "model.visual.": "visual."},
    ),
    "qwen3_5": (
        {"text_config": {**TEXT, **DELTA, **MROPE}, "vision_config": {**QWEN_VIT, "num_position_embeddings": 16}, **IDS},
        {},
    ),
    "qwen3_vl": (
        {"text_config": {**TEXT, **MROPE}, "vision_config": {**QWEN_VIT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **IDS},
        {},
    ),
    "qwen3_vl_moe": (
        {"text_config": {**TEXT, **MROPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []},
         "vision_config": {**QWEN_VIT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}, **IDS},
        {},
    ),
    "smolvlm": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VIT, "image_size": 32, "patch_size": 8}, "scale_factor": 2},
        {},
    ),
}  # fmt: skip


def write_whole(model_type: str, folder: Path) -> Any:
    """A random model of pictures, saved with published names; its weights' deviation lets its logits differ."""
    from safetensors.torch import load_file, save_file

    fields, names = WHOLES[model_type]
    config = transformers.AutoConfig.for_model(model_type, **deepcopy(fields))  # which it completes in place
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.15 + (parameter.dim() == 1))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        prefix = next((one for one in names if name.startswith(one)), "")
        tensors[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, file)
    return model


@pytest.mark.parametrize("model_type", WHOLES)
@pytest.mark.full_cases("gemma3", "qwen3_vl", "mistral3", "qwen3_5")
def test_tower_is_the_text_models_checkpoint(model_type: str, tmp_path: Path) -> None:
    whole = write_whole(model_type, tmp_path / "whole")
    text = whole.config.get_text_config()
    found = open_checkpoint(tmp_path / "whole")
    family = transformers.AutoConfig.for_model(found.config["model_type"])
    fields = {*family.to_dict(), "per_layer_config"}
    known = {name: value for name, value in text.to_dict().items() if name in fields and name != "model_type"}
    known["tie_word_embeddings"] = whole.config.tie_word_embeddings
    alone = transformers.AutoModelForCausalLM.from_config(type(family)(**known))
    outer = whole.language_model if model_type == "llama4" else whole
    body = getattr(outer.model, "language_model", getattr(outer.model, "text_model", outer.model))
    alone.model.load_state_dict(body.state_dict())
    alone.lm_head.load_state_dict(outer.lm_head.state_dict())
    alone.save_pretrained(tmp_path / "alone")
    expected = open_checkpoint(tmp_path / "alone")
    assert list(found.tensors) == list(expected.tensors)
    for name in expected.tensors:
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)
    assert build_model(found.config).facts == build_model(expected.config).facts


def test_sizes_that_the_file_leaves_out_are_those_of_transformers() -> None:
    """As in the published files of Gemma 3 and LLaVA."""
    for whole, text in (
        ("gemma3", "gemma3_text"),
        ("gemma3n", "gemma3n_text"),
        ("gemma4", "gemma4_text"),
        ("llava", "llama"),
        ("mistral3", "mistral"),
        ("muse_glimmer", "muse_glimmer_text"),
        ("internvl", "qwen2"),
    ):
        found = text_config({"model_type": whole, "text_config": {"model_type": text}, "vision_config": {}})
        defaults = transformers.AutoConfig.for_model(text)
        assert found == {
            "model_type": text,
            **{name: getattr(defaults, name) for name in found if name != "model_type"},
        }
    found = text_config({"model_type": "glm_ocr", "text_config": {}, "vision_config": {}})
    defaults = transformers.AutoConfig.for_model("glm_ocr_text")
    of_class = {"model_type": "glm4", "partial_rotary_factor": 1.0, "attention_bias": False, "head_dim": 64}
    assert defaults.hidden_size // defaults.num_attention_heads == 64
    assert found == of_class | {name: getattr(defaults, name) for name in found if name not in of_class}


def test_a_text_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"text_config in config.json; expected an object; found \[1\]"):
        text_config({"model_type": "gemma3", "text_config": [1]})


def test_models_that_read_texts_in_their_own_way_are_refused() -> None:
    config = {"model_type": "paligemma", "text_config": {**TEXT, "model_type": "gemma"}, "vision_config": SIGLIP}
    with pytest.raises(ConfigError, match="paligemma is not supported .*tokens that attend to all of a prompt"):
        text_config(config)


def test_pictures_are_made_ready_as_the_file_says_that_transformers_reads(tmp_path: Path) -> None:
    alone, whole = tmp_path / "preprocessor_config.json", tmp_path / "processor_config.json"
    assert read_preprocessor(tmp_path) is None
    alone.write_text('{"resample": 2}')
    whole.write_text('{"processor_class": "Gemma3Processor"}')
    assert read_preprocessor(tmp_path) == {"resample": 2}
    whole.write_text('{"image_processor": {"resample": 3}, "processor_class": "Gemma3Processor"}')
    dictionary, _ = transformers.image_processing_base.ImageProcessingMixin.get_image_processor_dict(str(tmp_path))
    assert read_preprocessor(tmp_path) == dictionary == {"resample": 3}
    alone.unlink()
    assert read_preprocessor(tmp_path) == {"resample": 3}
    whole.write_text('{"image_processor": [1]}')
    with pytest.raises(ConfigError, match=r"image_processor in processor_config.json; expected an object; found \[1\]"):
        read_preprocessor(tmp_path)


def test_code_of_its_own_whose_layers_are_llamas(tmp_path: Path) -> None:
    """As InternLM 3's config.json has them."""
    config = transformers.AutoConfig.for_model("llama", **TEXT)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file, of_llama = tmp_path / "config.json", open_checkpoint(tmp_path)
    own = {"model_type": "internlm3", "architectures": ["InternLM3ForCausalLM"], "bias": False, "qkv_bias": False}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"}}
    file.write_text(json.dumps({**of_llama.config, **own, **code}))
    found = open_checkpoint(tmp_path)
    assert build_model(found.config).facts == build_model(of_llama.config).facts
    file.write_text(json.dumps({**of_llama.config, **own, **code, "bias": True, "qkv_bias": True}))
    spec = build_model(open_checkpoint(tmp_path).config).attentions()[0]
    assert spec.qkv_bias and spec.o_bias
    file.write_text(json.dumps({**of_llama.config, **own, **code, "qkv_bias": True}))
    with pytest.raises(ConfigError, match="field qkv_bias is not supported"):
        open_checkpoint(tmp_path)
    file.write_text(json.dumps({**of_llama.config, **own, **code, "model_type": "internlm2"}))
    with pytest.raises(ConfigError, match="unknown architecture"):
        build_model(open_checkpoint(tmp_path).config)
