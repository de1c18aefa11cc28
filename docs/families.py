"""Writes docs/families.md from the families' own files: `python docs/families.py`. A test compares the two."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

from mlcpipe.checkpoint.text_tower import TOWERS
from mlcpipe.encoders import encoder_types
from mlcpipe.errors import ConfigError
from mlcpipe.models import gguf_families, model_types
from mlcpipe.nn.config import Fields

PAGE = Path(__file__).with_name("families.md")
_MODELS = "Models:"
# Enough of a config.json for `build` to reach the fields that it refuses.
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def page() -> str:
    """The page as Markdown: families that write text, those inside models of pictures, and encoders."""
    parts = ["# Model families", "This page is generated from the files of the families by `python docs/families.py`."]
    parts += [
        f"{len(model_types())} families write text. A name is the `model_type` of config.json and the file in"
        " `mlcpipe/models`. Tests compare each with transformers: logits agree within 1e-4 in prefill and in steps, and"
        " so do greedy tokens. Fields that are refused have another meaning than the one that is built: such a model is"
        " refused by name, with the field.",
        _table("family | what it is | models | GGUF | refused unless neutral", _families()),
        "## Text models inside others",
        "Of a model of pictures the text model is read, with its own family; pictures are refused.",
        _table("model_type | family of its text", ((f"`{whole}`", f"`{text}`") for whole, text in TOWERS.items())),
        "## Models that embed texts",
        _table("family | what it is", ((f"`{name}`", _about("encoders", name)[0]) for name in encoder_types())),
    ]
    return "\n\n".join(parts) + "\n"


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
