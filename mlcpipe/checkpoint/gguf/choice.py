"""Choose the GGUF file that a tag names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlcpipe.checkpoint.gguf.shards import shard_names

TAG = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,63}"
_NAME = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_+-]|\.(?!\.))*/)*[A-Za-z0-9_](?:[A-Za-z0-9_+-]|\.(?!\.))*\.gguf")
MAX_NAME = 400
_KINDS = ("f16", "bf16", "f32", "q8_0")  # of towers, the preferred one first


def gguf_models(names: Iterable[str], tag: str = "") -> list[list[str]]:
    """The models among the files `names` whose name contains `tag` as a word; each is the list of its parts, in order.

    `Q4_K_M` matches `x.Q4_K_M.gguf`, `x-q4_k_m.gguf` and `Q4_K_M/x-00001-of-00002.gguf`, and not `x-Q4_K.gguf`.
    Files of image encoders (mmproj) and names that leave the folder are left out.
    """
    word = _word(tag)
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if len(name) > MAX_NAME or not _NAME.fullmatch(name) or is_mmproj(name):
            continue
        folder, slash, file = name.rpartition("/")
        parts = [f"{folder}{slash}{part}" for part in shard_names(file)]
        if not tag or word.search(name.removesuffix(".gguf")):
            models[parts[0]] = parts
    return list(models.values())


def mmproj_of(names: Iterable[str], model: str) -> str | None:
    """The file among `names` with the tower of a model that sees, in the same folder: in float16 if there is a choice.

    None if there is none, or several of the same kind.
    """
    folder = model.rpartition("/")[0]
    towers = [
        name
        for name in sorted(names)
        if len(name) <= MAX_NAME and _NAME.fullmatch(name) and name.rpartition("/")[0] == folder and is_mmproj(name)
    ]
    kinds = [[name for name in towers if _word(kind).search(name.removesuffix(".gguf"))] for kind in _KINDS]
    return next((found[0] for found in (*kinds, towers) if len(found) == 1), None)


def is_mmproj(name: str) -> bool:
    """Whether a file's name says that it has a tower."""
    return "mmproj" in name.lower()


def _word(tag: str) -> re.Pattern[str]:
    return re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?=$|[-./])", re.IGNORECASE)
