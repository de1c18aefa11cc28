"""Tiny random models of the families that see, with what transformers makes of their pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import torch
import transformers
from PIL import Image

from mlcpipe.vision import build_tower
from mlcpipe.vision.processors import lfm2_vl
from tests.models import sight

TEXT = {
    "vocab_size": 304, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
VIT = {"hidden_size": 48, "intermediate_size": 68, "num_hidden_layers": 2, "num_attention_heads": 2}
_BUFFERS = {"put_min": -1.5, "put_max": 1.5, "std_bias": 0.5, "std_scale": 0.7}  # ends of their names
COLORS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.4]}


@dataclass(frozen=True)
class SeeingFamily:
    """A whole's config.json and preprocessor_config.json, and its tokens of pictures, from 257 on.

    `mark` is what chat templates write for a picture. `processed` gives the inputs of transformers' model for a
    rendered prompt and its pictures. `spread` is the deviation of random weights, small enough that layers do not let
    roundings grow. `names` are those of published tensors, where transformers has others.
    """

    config: Mapping[str, Any]
    preprocessor: Mapping[str, Any]
    special: Sequence[str]
    mark: str
    processed: Callable[[Path, str, list[Any]], Mapping[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    spread: float = 0.15

    @property
    def template(self) -> str:
        return sight.TEMPLATE.replace("<image>", self.mark).replace("<end_of_utterance>", "<end>")

    def write(self, folder: Path) -> Any:
        """Write the checkpoint -> the model of transformers, whose weights' deviation lets its logits differ."""
        folder.mkdir(parents=True)
        sight.write_tokenizer(folder, self.template, self.special)
        fields = deepcopy(dict(self.config))
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn(parameter.shape) * self.spread + (parameter.dim() == 1))
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter *= 0.5  # or Gemma 4's scores, which are not scaled, let roundings grow
            for name, buffer in model.named_buffers():
                for end, value in _BUFFERS.items():
                    if name.endswith(end):
                        buffer.copy_(value * (1 + 0.1 * torch.rand(buffer.shape)))
        model.save_pretrained(folder)
        if self.names:
            _rename(folder / "model.safetensors", self.names)
        (folder / "preprocessor_config.json").write_text(json.dumps(dict(self.preprocessor)))
        return model


def _rename(file: Path, names: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        prefix = next((one for one in names if name.startswith(one)), "")
        tensors[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(tensors, file)


def tokenizer_of(checkpoint: Path, **named: str) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint, extra_special_tokens=named)


def _gemma3(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = tokenizer_of(
        checkpoint, boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    pictures = Gemma3ImageProcessorPil(**GEMMA3.preprocessor)
    processor = Gemma3Processor(pictures, tokenizer, chat_template=GEMMA3.template, image_seq_length=16)
    return dict(processor(text=[text], images=[[Image.fromarray(one) for one in images]], return_tensors="pt"))


GEMMA3 = SeeingFamily(
    {
        "model_type": "gemma3", "mm_tokens_per_image": 16, "boi_token_index": 257, "eoi_token_index": 258,
        "image_token_index": 259,
        "text_config": {**TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
                        "query_pre_attn_scalar": 16},
        "vision_config": {**VIT, "model_type": "siglip_vision_model", "image_size": 64, "patch_size": 8,
                          "vision_use_head": False},
    },
    {"size": {"height": 64, "width": 64}, "resample": 2, **COLORS},
    ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "<start_of_image>",
    _gemma3,
    {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.vision_model.",
     "model.multi_modal_projector.": "multi_modal_projector."},
)  # fmt: skip


def _mistral3(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    """What PixtralProcessor does, which asks for torchvision: its text, and the pixels of its processor with Pillow."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    pictures = PixtralImageProcessorPil(**{**MISTRAL3.preprocessor, "patch_size": {"height": 16, "width": 16}})
    found = pictures([Image.fromarray(one) for one in images], return_tensors="pt")
    parts = []
    for height, width in found["image_sizes"]:
        rows = "".join(["[IMG]" * (int(width) // 16) + "[IMG_BREAK]"] * (int(height) // 16))
        parts.append(rows.removesuffix("[IMG_BREAK]") + "[IMG_END]")
    return dict(tokenizer_of(checkpoint)(_filled(text, "[IMG]", parts), return_tensors="pt")) | dict(found)


def _filled(text: str, mark: str, parts: Sequence[str]) -> str:
    """The text with each mark replaced."""
    first, *others = text.split(mark)
    return first + "".join(part + rest for part, rest in zip(parts, others, strict=True))


MISTRAL3 = SeeingFamily(
    {
        "model_type": "mistral3", "image_token_index": 257, "spatial_merge_size": 2,
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VIT, "model_type": "pixtral", "hidden_size": 32, "image_size": 64, "patch_size": 8},
    },
    {"size": {"longest_edge": 64}, "resample": 3, **COLORS},
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "[IMG]",
    _mistral3,
    {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
     "model.vision_tower.": "vision_tower.", "model.multi_modal_projector.": "multi_modal_projector."},
)  # fmt: skip


def _internvl(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    pictures = GotOcr2ImageProcessorPil(**INTERNVL.preprocessor)
    found = pictures([Image.fromarray(one) for one in images], crop_to_patches=True, return_tensors="pt")
    parts = [f"<img>{'<IMG_CONTEXT>' * 4 * count}</img>" for count in found["num_patches"]]
    inputs = dict(tokenizer_of(checkpoint)(_filled(text, "<IMG_CONTEXT>", parts), return_tensors="pt"))
    return inputs | {"pixel_values": found["pixel_values"]}


INTERNVL = SeeingFamily(
    {
        "model_type": "internvl", "image_token_id": 257, "image_seq_length": 4,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VIT, "attention_bias": True, "image_size": [32, 32], "patch_size": [8, 8]},
    },
    {"size": {"height": 32, "width": 32}, "crop_to_patches": False, "max_patches": 4, "resample": 3, **COLORS},
    ("<IMG_CONTEXT>", "<img>", "</img>"),
    "<IMG_CONTEXT>",
    _internvl,
)  # fmt: skip


def _gemma4(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    found = Gemma4ImageProcessorPil(**GEMMA4.preprocessor)(
        [Image.fromarray(one) for one in images], return_tensors="pt"
    )
    parts = [f"<|image>{'<|image|>' * int(count)}<image|>" for count in found["num_soft_tokens_per_image"]]
    inputs = dict(tokenizer_of(checkpoint)(_filled(text, "<|image|>", parts), return_tensors="pt"))
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == 257).long()
    return inputs | {name: found[name] for name in ("pixel_values", "image_position_ids")}


_LAYERS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")]
_IDS = {f"{name}_token_id": 257 + at for at, name in enumerate(("image", "boi", "eoi"))}
_IDS |= {"video_token_id": 290, "boa_token_id": 291, "eoa_token_index": 292, "audio_token_id": 293}
GEMMA4 = SeeingFamily(
    {
        "model_type": "gemma4", **_IDS,
        "text_config": {**TEXT, "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _LAYERS,
                        "global_head_dim": 32, "hidden_size_per_layer_input": 8, "sliding_window": 32,
                        "vocab_size_per_layer_input": 304},
        "vision_config": {**VIT, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
                          "position_embedding_size": 512, "use_clipped_linears": True},
    },
    {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3, "resample": 3},
    ("<|image|>", "<|image>", "<image|>"),
    "<|image|>",
    _gemma4,
    spread=0.1,
)  # fmt: skip
GEMMA4_WINDOWS = replace(
    GEMMA4,
    config={
        **GEMMA4.config,
        "text_config": {**TEXT, "layer_types": _LAYERS[:2], "global_head_dim": 32, "hidden_size_per_layer_input": 0,
                        "num_kv_shared_layers": 0, "sliding_window": 80, "use_bidirectional_attention": "vision"},
        "vision_config": {**GEMMA4.config["vision_config"], "use_clipped_linears": False, "standardize": True},
    },
)  # fmt: skip


def _lfm2_vl(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    """The inputs of the model of transformers, whose processor needs torchvision: tests/unit/vision/test_lfm2_vl.py
    compares with it where that is installed, so the pixels and the texts here are those of mlcpipe.
    """
    info = build_tower(LFM2_VL.config, LFM2_VL.preprocessor).info
    made = [lfm2_vl.prepare(Image.fromarray(one), info) for one in images]
    pixels, masks, shapes = [], [], []
    for tile in (tile for picture in made for tile in picture.tiles):
        patches, places = (torch.from_numpy(one) for one in lfm2_vl.patches(tile, info))
        at = places.reshape(-1, 4)
        by_row = patches.reshape(len(at), -1)[torch.argsort(at[:, 0] * at[:, 3] + at[:, 1])]
        missing = info.rows * info.merged - len(at)
        pixels.append(torch.nn.functional.pad(by_row, (0, 0, 0, missing)))
        masks.append(torch.nn.functional.pad(torch.ones(len(at), dtype=torch.int32), (0, missing)))
        shapes.append(at[0, 2:].long())
    parts = ["".join(one if isinstance(one, str) else "<image>" * one for one in picture.layout) for picture in made]
    inputs = dict(tokenizer_of(checkpoint)(_filled(text, "<image>", parts), return_tensors="pt"))
    named = {"pixel_values": pixels, "pixel_attention_mask": masks, "spatial_shapes": shapes}
    return inputs | {name: torch.stack(tensors) for name, tensors in named.items()}


# Pictures of fewer patches than the table has places in a row, and of more.
LFM2_VL = SeeingFamily(
    {
        "model_type": "lfm2_vl", "image_token_id": 257, "downsample_factor": 2, "projector_hidden_size": 80,
        "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"],
                        "full_attn_idxs": None, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
        "vision_config": {**VIT, "model_type": "siglip2_vision_model", "num_patches": 36, "patch_size": 4,
                          "vision_use_head": False},
    },
    {"encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 32, "min_image_tokens": 8, "max_image_tokens": 16,
     "max_tiles": 4, "resample": 2, **COLORS},
    ("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
     *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 5) for c in range(1, 5))),
    "<image>",
    _lfm2_vl,
)  # fmt: skip


def _glm_ocr(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    """What Glm46VProcessor does, which asks for torchvision: its text, and the patches of its processor with Pillow."""
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    found = Glm46VImageProcessorPil(**GLM_OCR.preprocessor)(
        [Image.fromarray(one) for one in images], return_tensors="pt"
    )
    parts = ["<|image|>" * (int(grid.prod()) // 4) for grid in found["image_grid_thw"]]
    inputs = dict(tokenizer_of(checkpoint)(_filled(text, "<|image|>", parts), return_tensors="pt"))
    return inputs | dict(found) | {"mm_token_type_ids": (inputs["input_ids"] == 257).int()}


# As published, where a layer after the last one drafts tokens; transformers does not make it.
GLM_OCR = SeeingFamily(
    {
        "model_type": "glm_ocr", "image_token_id": 257, "image_start_token_id": 258, "image_end_token_id": 259,
        "video_token_id": 300, "video_start_token_id": 301, "video_end_token_id": 302,
        "text_config": {**TEXT, "num_nextn_predict_layers": 1,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {"hidden_size": 48, "intermediate_size": 68, "depth": 2, "num_heads": 2, "patch_size": 4,
                          "out_hidden_size": 64},
    },
    {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 512, "longest_edge": 8192},
     **COLORS},
    ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    "<|begin_of_image|><|image|><|end_of_image|>",
    _glm_ocr,
)  # fmt: skip


def _llava_onevision(checkpoint: Path, text: str, images: list[Any]) -> Mapping[str, Any]:
    """What LlavaOnevisionProcessor does, which asks for torchvision: its text, and the pixels of Pillow's processor."""
    from transformers.models.llava_onevision import processing_llava_onevision as processing
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    processor = LlavaOnevisionImageProcessorPil(**LLAVA_ONEVISION.preprocessor)
    found = processor([[Image.fromarray(one) for one in images]], return_tensors="pt")  # of one message
    whole = processing.LlavaOnevisionProcessor
    about = SimpleNamespace(
        num_image_tokens=16, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2"
    )
    about.image_processor, about.image_token = processor, "<image>"
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(about, name, MethodType(getattr(whole, name), about))
    parts = [whole.replace_image_token(about, found, i) for i in range(len(images))]
    return dict(tokenizer_of(checkpoint)(_filled(text, "<image>", parts), return_tensors="pt")) | dict(found)


_GRIDS = [[16 * r, 16 * c] for r in range(1, 4) for c in range(1, 4)]
LLAVA_ONEVISION = SeeingFamily(
    {
        "model_type": "llava_onevision", "image_token_index": 257, "video_token_index": 258,
        "image_grid_pinpoints": _GRIDS, "vision_aspect_ratio": "anyres_max_2",
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VIT, "model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4,
                          "vision_use_head": False},
    },
    {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": _GRIDS, "resample": 3, **COLORS},
    ("<image>", "<video>"),
    "<image>",
    _llava_onevision,
)  # fmt: skip

FAMILIES = {
    "gemma3": GEMMA3, "mistral3": MISTRAL3, "internvl": INTERNVL, "gemma4": GEMMA4, "gemma4-windows": GEMMA4_WINDOWS,
    "lfm2_vl": LFM2_VL, "glm_ocr": GLM_OCR, "llava_onevision": LLAVA_ONEVISION,
}  # fmt: skip
