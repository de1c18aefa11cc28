"""Choose the GGUF file that a tag names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mlcpipe.checkpoint.gguf.shards import shard_names

TAG = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.)){0,63}"
_NAME = re.compile(r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_+-]|\.(?!\.))*/)*[A-Za-z0-9_](?:[A-Za-z0-9_+-]|\.(?!\.))*\.gguf")
MAX_NAME = 400


def gguf_models(names: Iterable[str], tag: str = "") -> list[list[str]]:
    """The models among the files `names` whose name contains `tag` as a word; each is the list of its parts, in order.

    `Q4_K_M` matches `x.Q4_K_M.gguf`, `x-q4_k_m.gguf` and `Q4_K_M/x-00001-of-00002.gguf`, and not `x-Q4_K.gguf`.
    Files of image encoders (mmproj) and names that leave the folder are left out.
    """
    word = re.compile(rf"(?:^|[-._/]){re.escape(tag)}(?=$|[-./])", re.IGNORECASE)
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if len(name) > MAX_NAME or not _NAME.fullmatch(name) or "mmproj" in name.lower():
            continue
        folder, slash, file = name.rpartition("/")
        parts = [f"{folder}{slash}{part}" for part in shard_names(file)]
        if not tag or word.search(name.removesuffix(".gguf")):
            models[parts[0]] = parts
    return list(models.values())
