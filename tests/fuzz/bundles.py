"""Damaged bundles: the manifest's fields, texts and weights whose hashes are right, the library, odd files."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.fuzz.mutate import damage_bytes, damage_json_file, fresh_copy, odd_file

_MANIFEST = "mlcpipe.json"
_INDEX = "tensor-cache.json"
_CHAT = ["--prompt", "hi", "--max-tokens", "4", "--no-stats"]


def state_hash(bundle: Path, name: str) -> None:
    """Make the manifest agree with a changed file."""
    manifest = json.loads((bundle / _MANIFEST).read_text(encoding="utf-8"))
    raw = (bundle / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    (bundle / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def _manifest(draw: random.Random, bundle: Path) -> None:
    damage_json_file(draw, bundle / _MANIFEST)


def _text(draw: random.Random, bundle: Path) -> None:
    name = draw.choice(sorted(path.name for path in bundle.glob("*.json") if path.name != _MANIFEST))
    damage_json_file(draw, bundle / name)
    state_hash(bundle, name)


def _weights(draw: random.Random, bundle: Path) -> None:
    name = draw.choice(sorted(path.name for path in bundle.glob("*.bin")))
    raw = bytearray((bundle / name).read_bytes())
    kind = draw.choice((np.nan, np.inf, 6e4, "bytes", "cut"))
    if kind == "cut":
        raw = bytearray(damage_bytes(draw, bytes(raw)))
    elif isinstance(kind, str):
        at = draw.randrange(len(raw))
        raw[at : at + 4096] = draw.randbytes(len(raw[at : at + 4096]))
    else:
        dtype = np.dtype(draw.choice(("float16", "float32")))
        at = draw.randrange(len(raw) // dtype.itemsize) * dtype.itemsize
        count = min(draw.choice((1, 100, 10_000)), (len(raw) - at) // dtype.itemsize)
        raw[at : at + count * dtype.itemsize] = np.full(count, kind, dtype).tobytes()
    (bundle / name).write_bytes(raw)
    state_hash(bundle, name)
    if draw.random() < 0.9:
        index = json.loads((bundle / _INDEX).read_text(encoding="utf-8"))
        for shard in index["records"]:
            if shard["dataPath"] == name:
                shard["md5sum"] = hashlib.md5(raw).hexdigest()
                shard["nbytes"] = len(raw)
        (bundle / _INDEX).write_text(json.dumps(index), encoding="utf-8")
        state_hash(bundle, _INDEX)


def _library(draw: random.Random, bundle: Path) -> None:
    """Its hash stays the old one: a library with the right hash is a program, and may do anything."""
    library = draw.choice(sorted((bundle / "lib").iterdir()))
    library.write_bytes(damage_bytes(draw, library.read_bytes()))


def _odd(draw: random.Random, bundle: Path) -> None:
    odd_file(draw, draw.choice(sorted(path for path in bundle.rglob("*") if path.is_file())))


_KINDS: tuple[Callable[[random.Random, Path], None], ...] = (
    _manifest, _manifest, _manifest, _text, _text, _text, _text, _weights, _weights, _library, _odd,
)  # fmt: skip


def make(seed: int, source: Path, folder: Path) -> list[list[str]]:
    """The bundle of a seed, made of the whole one in `source`, and the commands to run on it."""
    draw = random.Random(f"bundle {seed}")
    bundle = fresh_copy(source, folder / "bundle")
    draw.choice(_KINDS)(draw, bundle)
    sampling = draw.choice(([], ["--temperature", "0"], ["--raw"], ["--context", "64"]))
    return [["inspect", str(bundle)], ["chat", str(bundle), *_CHAT, *sampling]]
