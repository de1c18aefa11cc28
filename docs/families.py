"""Writes docs/families.md from the families' own files: `python docs/families.py`. A test compares the two."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from mlcpipe.checkpoint.text_tower import TOWERS, text_family
from mlcpipe.encoders import encoder_of, encoder_types
from mlcpipe.errors import ConfigError
from mlcpipe.models import diffusion_types, gguf_families, model_types
from mlcpipe.nn.config import Fields
from mlcpipe.sound import FAMILIES, hears
from mlcpipe.vision import has_tower

PAGE = Path(__file__).with_name("families.md")
_MODELS = "Models:"
# Enough of a config.json for `build` to reach the fields that it refuses.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


# What people ran in autumn 2026, the most downloaded first: models, and the `model_type` of their config.json.
_POPULAR = (
    ("Qwen3.5, Qwen3.6, Qwen3.8 (dense)", "qwen3_5"),
    ("Qwen3.5, Qwen3.6 35B-A3B, 122B-A10B, 397B-A17B", "qwen3_5_moe"),
    ("Gemma 4 E2B, E4B, 26B-A4B, 31B", "gemma4"),
    ("Llama 3.1, 3.2, 3.3, DeepSeek-R1-Distill-Llama", "llama"),
    ("Qwen3, Qwen3-Embedding", "qwen3"),
    ("gpt-oss 20B, 120B", "gpt_oss"),
    ("Qwen3-30B-A3B, Qwen3-Coder-30B", "qwen3_moe"),
    ("Gemma 3 4B, 12B, 27B, MedGemma", "gemma3"),
    ("Gemma 3 270M, 1B, EmbeddingGemma", "gemma3_text"),
    ("Qwen2.5, Qwen2.5-Coder, QwQ", "qwen2"),
    ("Qwen3-VL", "qwen3_vl"),
    ("LFM2, LFM2.5", "lfm2"),
    ("LFM3-1.7B", "lfm3"),
    ("LFM2-8B-A1B, LFM2-24B-A2B", "lfm2_moe"),
    ("LFM2-VL, LFM2.5-VL", "lfm2_vl"),
    ("Ministral 3, Mistral Small 3.1, 3.2", "mistral3"),
    ("GLM-4.7-Flash", "glm4_moe_lite"),
    ("Nemotron 3 Nano, Nemotron Nano 2", "nemotron_h"),
    ("Granite 4 H-Micro, H-Tiny, H-Small", "granitemoehybrid"),
    ("Granite 3, Granite 4 dense", "granite"),
    ("SmolVLM2", "smolvlm"),
    ("GLM-OCR", "glm_ocr"),
    ("LLaVA-OneVision 0.5B, 7B, 72B", "llava_onevision"),
    ("Phi-3.5-mini, Phi-4, Phi-4-mini", "phi3"),
    ("Mistral 7B, Nemo", "mistral"),
    ("Gemma 2", "gemma2"),
    ("Gemma 3n E2B, E4B", "gemma3n"),
    ("Qwen2.5-VL", "qwen2_5_vl"),
    ("SmolLM3", "smollm3"),
    ("Muse Glimmer 30B", "muse_glimmer"),
    ("Laguna XS 2, S 2.1", "laguna"),
    ("EXAONE 4", "exaone4"),
    ("OLMo 3", "olmo3"),
    ("Command R7B, Command A", "cohere2"),
    ("GLM-4-0414", "glm4"),
    ("GLM-4.5-Air, GLM-4.6, GLM-4.7", "glm4_moe"),
    ("Qwen3-Next, Qwen3-Coder-Next", "qwen3_next"),
    ("Kimi-Linear-48B-A3B", "kimi_linear"),
    ("Ling-3.0-Flash", "bailing_hybrid"),
    ("Falcon-H1", "falcon_h1"),
    ("Zamba2 1.2B, 2.7B, 7B", "zamba2"),
    ("RWKV7-World, RWKV7-G1", "rwkv7"),
    ("DeepSeek-V3, R1, Kimi-K2, Moonlight", "deepseek_v3"),
    ("DeepSeek-V2-Lite, Coder-V2-Lite", "deepseek_v2"),
    ("Llama 4 Scout, Maverick", "llama4"),
    ("bge-m3, multilingual-e5, bge-reranker-v2-m3", "xlm-roberta"),
    ("all-MiniLM, bge small to large", "bert"),
    ("all-mpnet-base-v2", "mpnet"),
    ("gte-multilingual-base", "new"),
    ("nomic-embed-text v1.5, v2", "nomic_bert"),
    ("Whisper tiny to large-v3-turbo", "whisper"),
)
# Of them those that need what their family has not yet; its file says what.
_REFUSED = ("Ling-3.0-Flash",)


def page() -> str:
    """The page as Markdown: models by name, families that write text, those inside models of pictures, and encoders."""
    parts = ["# Model families", "This page is generated from the files of the families by `python docs/families.py`."]
    parts += [
        "## Models of autumn 2026",
        "The models that were downloaded most, and whether they run here. Of those that read pictures or sound the text"
        " runs; those that see do so in Python on CPUs.",
        _table("models | model_type | runs | GGUF", map(_popular, *zip(*_POPULAR))),
        "## Families that write text",
        f"{len(model_types())} families write text. A name is the `model_type` of config.json and the file in"
        " `mlcpipe/models`. Tests compare each with transformers, RWKV-7 with its published formula: logits agree"
        " within 1e-4 in prefill and in steps, and so do greedy tokens. Fields that are refused have another meaning"
        " than the one that is built: such a model is refused by name, with the field.",
        _table("family | what it is | models | GGUF | refused unless neutral", _families()),
        "## Families that write text by diffusion",
        "Their models decide many tokens at a time; [Text by diffusion](diffusion.md) says how. Files are in"
        " `mlcpipe/models/diffusion`.",
        _table(
            "family | what it is | models",
            ((f"`{name}`", *_about("models.diffusion", name)) for name in diffusion_types()),
        ),
        "## Text models inside others",
        "Of a model of pictures the text model is read, with its own family. Those that see do so in Python on CPUs;"
        " elsewhere, and for the others, pictures are refused.",
        _table("model_type | family of its text | sees", map(_whole, TOWERS)),
        "## Models that embed texts",
        _table("family | what it is", ((f"`{name}`", _about("encoders", name)[0]) for name in encoder_types())),
        "## Models that hear",
        _table("family | what it is", ((f"`{name}`", _about("sound", name)[0]) for name in FAMILIES)),
    ]
    return "\n\n".join(parts) + "\n"


def _whole(model_type: str) -> tuple[str, str, str]:
    return f"`{model_type}`", f"`{text_family(model_type)}`", "yes" if has_tower({"model_type": model_type}) else ""


def _popular(models: str, model_type: str) -> tuple[str, str, str, str]:
    tower = text_family(model_type) if model_type in TOWERS else None
    encoder = encoder_of({"model_type": model_type}) is not None or hears({"model_type": model_type})
    known = (encoder or (tower or model_type) in model_types()) and models not in _REFUSED
    gguf = (tower or model_type) in gguf_families()
    runs = ("text and pictures" if has_tower({"model_type": model_type}) else "the text") if tower else "yes"
    return models, f"`{model_type}`", runs if known else "no", "yes" if gguf else ""


def _families() -> Iterator[tuple[str, ...]]:
    stored = gguf_families()
    for name in model_types():
        about, models = _about("models", name)
        archs = (stored[name].arch, *stored[name].also) if name in stored else ()
        gguf = ", ".join(f"`{arch}`" for arch in archs)
        yield f"`{name}`", about, models, gguf, ", ".join(f"`{field}`" for field in _refused(name))


def _about(room: str, name: str) -> tuple[str, str]:
    """The first paragraph of a family's docstring, and the models that it names."""
    text = inspect.getdoc(importlib.import_module(f"mlcpipe.{room}.{name}")) or ""
    first, *others = (" ".join(part.split()) for part in text.split("\n\n"))
    models = next((part.removeprefix(_MODELS).strip() for part in others if part.startswith(_MODELS)), "")
    return first.rstrip("."), models.rstrip(".")


def _refused(name: str) -> list[str]:
    """The fields that a family refuses unless they say nothing, or what it does anyway."""
    found: set[str] = set()
    refuse = Fields.refuse

    def recorded(self: Fields, **neutral: Any) -> None:
        found.update(neutral)
        refuse(self, **neutral)

    sizes = dict.fromkeys(_SIZES, 64) | {"model_type": name, "num_hidden_layers": 2, "num_attention_heads": 4}
    with mock.patch.object(Fields, "refuse", recorded), suppress(ConfigError):
        importlib.import_module(f"mlcpipe.models.{name}").build(sizes)
    return sorted(found)


def _table(head: str, rows: Any) -> str:
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
