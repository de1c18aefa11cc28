"""Attacks that were found by hand, as data: each is a damaged bundle or checkpoint, and its seed is its place here."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import QUICK
from tests.fuzz.bundles import state_hash
from tests.fuzz.mutate import fresh_copy

_STEP = 2**61 - 1  # integers that are multiples of it have the same hash
_MIB = 1 << 20

Attack = Callable[[Path], None]


def _edit(name: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        change(content)
        path.write_text(json.dumps(content), encoding="utf-8")
        if (folder / "mlcpipe.json").exists() and name != "mlcpipe.json":
            state_hash(folder, name)

    return attack


def _template(source: str) -> Attack:
    return _edit("tokenizer_config.json", lambda content: content.update(chat_template=source))


def _tokenizer(**parts: Any) -> Attack:
    return _edit("tokenizer.json", lambda content: content.update(parts))


def _chain(kind: str, list_name: str, count: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return {"type": kind, list_name: [step] * count}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _many(name: str, before: str, item: str, size: int) -> Attack:
    """A list of `size` bytes in place of the content of a file."""

    def attack(folder: Path) -> None:
        path = folder / name
        text = path.read_text(encoding="utf-8")
        assert before in text, name
        head, _, tail = text.partition(before)
        path.write_text(head + before + item * (size // len(item)) + tail, encoding="utf-8")

    return attack


def _header(folder: Path) -> None:
    header = ("{" + ",".join(f'"{"n" * 40}{i}":[0]' for i in range(1_200_000)) + "}").encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


BUNDLES: dict[str, Attack] = {
    "width of a format": _template("{{ ('%(a)9999d' * 100000) % {'a': 1} }}"),
    "width in a filter": _template("{{ ('%(a)9999d' * 100000) | format(a=1) }}"),
    "unique of one hash": _template(f"{{{{ range(0, {_STEP} * 100000, {_STEP}) | unique | list | length }}}}"),
    "dict of one hash": _template(f"{{% set d = dict(range(0, {_STEP} * 100000, {_STEP}) | batch(2)) %}}"),
    "long loops": _template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    "power": _template("{{ 2 ** 10 ** 8 }}"),
    "repeated text": _template("{{ 'a' * 10 ** 10 }}"),
    "growing normalizer": _tokenizer(normalizer=_chain("Sequence", "normalizers", 8)),
    "growing decoder": _tokenizer(decoder=_chain("Sequence", "decoders", 11)),
    "regex that hangs": _tokenizer(pre_tokenizer=_split("(?:a|a){22}[^ax]")),
    "regex with nested repeats": _tokenizer(pre_tokenizer=_split("(a+)+$")),
    "regex of a normalizer": _tokenizer(
        normalizer={"type": "Replace", "pattern": {"Regex": "(?:a|a){22}[^ax]"}, "content": ""}
    ),
    "errors of a manifest": _many("mlcpipe.json", '"kernels": [', "[],", 58 * _MIB),
    "errors of a small manifest": _many("mlcpipe.json", '"kernels": [', "[],", 1_200_000),
    "errors of an index": _many("tensor-cache.json", '"records": [', "[],", 58 * _MIB),
    "no memory for keys and values": _edit("mlcpipe.json", lambda m: m["states"][0]["parts"].clear()),
    "half a surrogate": _edit("generation_config.json", lambda content: content.update(a="\ud800")),
}
CHECKPOINTS: dict[str, Attack] = {
    "many names": _header,
    "half a surrogate in config.json": _edit("config.json", lambda content: content.update(a=["\ud800"])),
    "half a surrogate in generation_config.json": _edit("generation_config.json", lambda c: c.update({"\ud800": 1})),
    "template that takes memory": _template("{{ ('%(a)9999d' * 100000) % {'a': 1} }}"),
    "template that takes time": _template(f"{{{{ range(0, {_STEP} * 100000, {_STEP}) | unique | list }}}}"),
}


def bundle(seed: int, source: Path, folder: Path) -> list[list[str]]:
    """The attack of `BUNDLES` at `seed` on a copy of the whole bundle in `source`."""
    attacked = fresh_copy(source, folder / "bundle")
    list(BUNDLES.values())[seed](attacked)
    prompts = ("hi a", "a" * 600 + "x")
    chat = [
        ["chat", str(attacked), "--max-tokens", "4", "--temperature", "0", "--prompt", prompt] for prompt in prompts
    ]
    return [["inspect", str(attacked)], *chat]


def checkpoint(seed: int, source: Path, folder: Path) -> list[list[str]]:
    """The attack of `CHECKPOINTS` at `seed` on a copy of the whole checkpoint in `source`."""
    attacked = fresh_copy(source, folder / "checkpoint")
    list(CHECKPOINTS.values())[seed](attacked)
    options = ["--target", QUICK, "--output", str(folder / "output"), "--overwrite"]
    return [["compile", str(attacked), *options]]
