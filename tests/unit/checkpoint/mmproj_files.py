"""Models that see as two GGUF files, as llama.cpp's conversion/ writes them, by the `gguf` package and its names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mlcpipe.checkpoint import open_checkpoint
from tests.unit.checkpoint.gguf_files import F32, quantized, write_gguf

Arrays = Iterator[tuple[str, NDArray[Any]]]
F16 = gguf.GGMLQuantizationType.F16
KINDS = gguf.VisionProjectorType
_EDGES = (".weight", ".bias", *(f".{side}put_{end}" for side in ("in", "out") for end in ("min", "max")))


def write_pair(folder: Path, out: Path, kind: gguf.GGMLQuantizationType = F32, **keys: Any) -> Path:
    """The checkpoint in `folder` as out/model.gguf, in float32, and out/mmproj-model.gguf with matrices in `kind`.

    `keys` are more keys of the latter, or others in place of those that it has. Returns the former.
    """
    out.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    table = config["text_config"].get("rope_parameters") or {}

    def sections(writer: gguf.GGUFWriter) -> None:
        if stated := table.get("mrope_section"):
            writer.add_rope_dimension_sections([*stated, 0])

    source = open_checkpoint(folder)
    tensors = {name: tensor for name, tensor in source.tensors.items() if not name.startswith("mtp.")}
    text: Any = replace(source, tensors=tensors, draft_head=None)
    text = _InHalves(text) if config["model_type"] == "glm_ocr" else text
    write_gguf(text, out / "model.gguf", pre="gpt-2", more=sections)
    write_mmproj(folder, out / "mmproj-model.gguf", kind, **keys)
    return out / "model.gguf"


class _InHalves:
    """A checkpoint whose q and k have the rows of a head in halves, as llama.cpp's m-rope rotates them."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def read(self, name: str) -> NDArray[np.float32]:
        """As of the checkpoint."""
        values = self._of.read(name)
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return values
        pairs = values.reshape(-1, self._of.config["head_dim"] // 2, 2, values.shape[1])
        return pairs.swapaxes(1, 2).reshape(values.shape)


def write_mmproj(folder: Path, path: Path, kind: gguf.GGMLQuantizationType = F32, **keys: Any) -> Path:
    """The tower of the checkpoint in `folder`. `keys` are as in `write_pair`, with `__` for a dot."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    processor = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    vision, model_type = dict(config["vision_config"]), config["model_type"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    _ADD[model_type](writer, config, vision, processor)
    for name, add in (
        ("image_size", writer.add_vision_image_size),
        ("patch_size", writer.add_vision_patch_size),
        ("hidden_size", writer.add_vision_embedding_length),
        ("intermediate_size", writer.add_vision_feed_forward_length),
    ):
        add(vision[name][0] if isinstance(vision[name], list) else vision[name])
    writer.add_vision_block_count(vision.get("num_hidden_layers", vision.get("depth")))
    writer.add_vision_head_count(vision.get("num_attention_heads", vision.get("num_heads")))
    writer.add_vision_image_mean(processor.get("image_mean", [0.0, 0.0, 0.0]))
    writer.add_vision_image_std(processor.get("image_std", [1.0, 1.0, 1.0]))
    for key, value in keys.items():
        full = f"clip.vision.{key.replace('__', '.')}"
        writer.kv_data[0].pop(full, None)
        if value is not None:
            writer.add_key_value(full, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
    arrays = load_file(folder / "model.safetensors").items()
    for name, values in _TENSORS.get(model_type, _plain)(arrays, config):
        own = name if name.startswith(("v.", "mm.")) else names.get_name(name, try_suffixes=_EDGES)
        assert own is not None, name
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim > 1 and kind != F32 and "position_embd" not in own:
            stored = F16 if values.ndim > 2 or "input_projection" in own else kind
            writer.add_tensor(own, quantized(values, stored), raw_dtype=stored)
        else:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _siglip(projector: str, writer: gguf.GGUFWriter, vision: Mapping[str, Any]) -> None:
    writer.add_clip_projector_type(projector)
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_use_gelu(True)


def _add_gemma3(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    _siglip(KINDS.GEMMA3, writer, vision)
    side = vision["image_size"] // vision["patch_size"]
    writer.add_vision_projector_scale_factor(side // int(config["mm_tokens_per_image"] ** 0.5))


def _add_smolvlm(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    _siglip(KINDS.IDEFICS3, writer, vision)
    writer.add_vision_projector_scale_factor(config["scale_factor"])
    writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])


def _add_mistral3(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    writer.add_clip_projector_type(KINDS.PIXTRAL)
    writer.add_vision_attention_layernorm_eps(1e-5)
    (writer.add_vision_use_silu if vision["hidden_act"] == "silu" else writer.add_vision_use_gelu)(True)
    writer.add_vision_spatial_merge_size(config["spatial_merge_size"])


def _add_internvl(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    _siglip(KINDS.INTERNVL, writer, vision)
    writer.add_vision_projector_scale_factor(int(1 / config["downsample_ratio"]))
    writer.add_vision_preproc_max_tiles(processor["max_patches"])


def _add_gemma4(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    vision["image_size"] = 224
    writer.add_clip_vision_projector_type(KINDS.GEMMA4V)
    writer.add_vision_attention_layernorm_eps(1e-6)


def _add_lfm2(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    vision["image_size"] = 256
    _siglip(KINDS.LFM2, writer, vision)
    writer.add_vision_projector_scale_factor(config["downsample_factor"])


def _add_qwen2(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    vision["image_size"] = 560
    writer.add_clip_projector_type(KINDS.QWEN2VL if config["model_type"] == "qwen2_vl" else KINDS.QWEN25VL)
    if config["model_type"] == "qwen2_vl":
        vision["intermediate_size"], vision["hidden_size"] = vision["hidden_size"], vision["embed_dim"]
    else:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_vision_window_size(vision["window_size"])
    writer.add_vision_attention_layernorm_eps(1e-6)
    _qwen_pixels(writer, processor)


def _add_qwen3(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    vision["image_size"] = int(vision["num_position_embeddings"] ** 0.5 * vision["patch_size"])
    writer.add_clip_projector_type(KINDS.QWEN3VL)
    writer.add_vision_use_gelu(True)
    writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
    writer.add_vision_attention_layernorm_eps(config["text_config"]["rms_norm_eps"])
    deep = vision.get("deepstack_visual_indexes") or ()
    writer.add_vision_is_deepstack_layers([i in deep for i in range(vision["depth"])])
    _qwen_pixels(writer, processor)


def _qwen_pixels(writer: Any, processor: Any) -> None:
    """Which the files do not have: pictures are those of the published models, too large for a test."""
    writer.add_vision_min_pixels(processor["size"]["shortest_edge"])
    writer.add_vision_max_pixels(processor["size"]["longest_edge"])


def _add_glm_ocr(writer: Any, config: Any, vision: Any, processor: Any) -> None:
    vision["image_size"] = 336
    writer.add_clip_projector_type(KINDS.GLM4V)
    writer.add_vision_use_silu(True)
    writer.add_vision_attention_layernorm_eps(vision["rms_norm_eps"])
    _qwen_pixels(writer, processor)


_ADD: Mapping[str, Callable[..., None]] = {
    "gemma3": _add_gemma3, "smolvlm": _add_smolvlm, "mistral3": _add_mistral3, "internvl": _add_internvl,
    "gemma4": _add_gemma4, "lfm2_vl": _add_lfm2, **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _add_qwen2),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), _add_qwen3), "glm_ocr": _add_glm_ocr,
}  # fmt: skip
STORED = tuple(_ADD)  # the models whose towers are stored in GGUF


def _plain(arrays: Any, config: Any) -> Arrays:
    for name, values in arrays:
        if any(part in name for part in ("vision_model", "vision_tower", "connector", "multi_modal_projector")):
            if config["model_type"] == "gemma3":
                name = name.replace("_weight", ".weight").replace("vision_tower.", "vision_tower.vision_model.")
                name = name.replace(".vision_model.vision_model.", ".vision_model.").removeprefix("model.")
            yield name, values + 1 if "soft_emb_norm.weight" in name else values


def _mistral3(arrays: Any, config: Any) -> Arrays:
    heads = config["vision_config"]["num_attention_heads"]
    for name, values in _plain(arrays, config):
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rows in pairs
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        yield name, values
    table = next(values for name, values in arrays if name.endswith("embed_tokens.weight"))
    yield "v.token_embd.img_break", table[258]


_INTERNVL = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}


def _internvl(arrays: Any, config: Any) -> Arrays:
    for name, values in _plain(arrays, config):
        if name.endswith("mask_token"):
            continue
        _, _, part = name.partition("multi_modal_projector.")
        if part:
            module, _, suffix = part.partition(".")
            name = f"mlp1.{_INTERNVL[module]}.{suffix}"
        name = name if part else f"model.{name.removeprefix('model.')}"
        yield f"{name}.weight" if ".lambda_" in name or name.endswith("position_embeddings") else name, values


def _lfm2(arrays: Any, config: Any) -> Arrays:
    patch = config["vision_config"]["patch_size"]
    for name, values in _plain(arrays, config):
        name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        name = name.replace(".vision_model.vision_model.", ".vision_model.")
        if name.endswith("patch_embedding.weight"):
            values = values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
        yield name, values


def _gemma4(arrays: Any, config: Any) -> Arrays:
    patch = config["vision_config"]["patch_size"]
    for name, values in arrays:
        if "vision_tower" not in name and "embed_vision" not in name:
            continue
        name = name.replace("model.vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
        if name.endswith("input_proj.weight"):
            values = values.reshape(-1, patch, patch, 3).transpose(0, 3, 1, 2)
        yield f"{name}.weight" if name.endswith("position_embedding_table") else name, np.atleast_1d(values)


def _qwen(arrays: Any, config: Any) -> Arrays:
    deep = config["vision_config"].get("deepstack_visual_indexes") or ()
    for name, values in arrays:
        name = name.removeprefix("model.")
        if not name.startswith("visual."):
            continue
        part = name.removeprefix("visual.merger.")
        if name == "visual.patch_embed.proj.weight":
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif ".qkv." in name and config["model_type"].startswith("qwen2"):
            for one, rows in zip("qkv", np.split(values, 3)):
                yield name.replace("qkv", one), rows
        elif name.startswith("visual.deepstack_merger_list."):
            _, _, index, module, suffix = name.split(".")
            yield f"v.deepstack.{deep[int(index)]}.{module.removeprefix('linear_')}.{suffix}", values
        elif part != name and part.startswith("linear_fc"):
            yield f"mm.{2 * (part[9] == '2')}.{part.partition('.')[2]}", values
        elif part.startswith("norm."):
            yield f"v.post_ln.{part.partition('.')[2]}", values
        else:
            yield name, values


_TENSORS: Mapping[str, Callable[[Any, Any], Arrays]] = {
    "gemma4": _gemma4, "internvl": _internvl, "lfm2_vl": _lfm2, "mistral3": _mistral3,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm_ocr"), _qwen),
}  # fmt: skip
