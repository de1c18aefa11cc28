"""The bundles in the cache, with records of the models that they were made of.

`bundles/<key>` is a bundle, `locks/<key>` the lock of those who make or remove it. `models/<hash>.json` is one use of a
model: its name, and the key of its bundle, or "" for a download. A record is written once; its time is that of the last
use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from mlcpipe.bundle.manifest import MANIFEST, read_manifest
from mlcpipe.errors import BundleError, MlcpipeError, UsageError
from mlcpipe.support.atomic import atomic_write, remove_directory
from mlcpipe.support.disk import folder_bytes
from mlcpipe.support.files import local_path
from mlcpipe.support.json_files import read_json_object
from mlcpipe.support.private import private_folder

BUNDLES, LOCKS, RECORDS = "bundles", "locks", "models"
DEMO = "demo"  # the name of the model that comes with mlcpipe
_MAX_RECORD_BYTES = 1 << 16


@dataclass
class CachedModel:
    """A bundle of the cache, or a download if `bundle` is None. `used` is the time of the last use, in seconds.

    `names` are those that people gave, the latest first. A broken bundle has no `target` and no `quantization`.
    """

    bundle: Path | None
    names: list[str] = field(default_factory=list)
    target: str = ""
    quantization: str = ""
    nbytes: int = 0
    used: float = 0.0


def typed_name(model: str | Path | None) -> str:
    """The name under which the use of a model is recorded: of a path, the absolute one."""
    path = None if model is None else local_path(model)
    return DEMO if model is None else str(model) if path is None else os.path.abspath(path)


def record_use(cache: Path | None, name: str, key: str) -> None:
    """Remember that the model `name` was used now, as the bundle `key`. A cache that cannot be written is no error."""
    if cache is None:
        return
    content = json.dumps({"name": name, "bundle": key}).encode()
    path = cache / RECORDS / f"{hashlib.sha256(content).hexdigest()[:24]}.json"
    with suppress(OSError, MlcpipeError):
        if path.exists():
            os.utime(path)
        else:
            private_folder(path.parent)
            atomic_write(path, content)


def cached_models(cache: Path) -> list[CachedModel]:
    """All bundles of the cache and the recorded downloads, whose size is not known here; the latest used first."""
    found: dict[tuple[str, str], CachedModel] = {}
    for bundle in _bundles(cache):
        found[bundle.name, ""] = _described(bundle)
    for path, used in _records(cache):
        name, key = _read_record(path)
        if name and not key:
            found.setdefault(("", name), CachedModel(None))
        if name and (model := found.get((key, "" if key else name))):  # not of a bundle that was removed
            model.names.append(name)
            model.used = max(model.used, used)
    return sorted(found.values(), key=lambda model: -model.used)


def remove_bundle(cache: Path, bundle: Path) -> None:
    """Remove a bundle of the cache. Raises UsageError while another run makes it or, on Windows, uses it."""
    if bundle.parent != cache / BUNDLES:
        raise UsageError("not a bundle of the cache", where=bundle, expected=cache / BUNDLES)
    busy = UsageError("another run uses the bundle", where=bundle, next_step="end it, then run the command again")
    try:
        with FileLock(private_folder(cache / LOCKS) / bundle.name, timeout=0):
            remove_directory(bundle)
    except (Timeout, PermissionError) as error:
        raise busy from error
    forget(cache, key=bundle.name)


def forget(cache: Path, *, key: str, name: str | None = None) -> None:
    """Remove the records of a bundle, or with key "" those of the download `name`."""
    for path, _ in _records(cache):
        recorded = _read_record(path)
        if recorded[1] == key and name in (None, recorded[0]):
            path.unlink(missing_ok=True)


def _bundles(cache: Path) -> list[Path]:
    folder = cache / BUNDLES
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [folder / name for name in names if not name.startswith(".") and (folder / name / MANIFEST).is_file()]


def _described(bundle: Path) -> CachedModel:
    model = CachedModel(bundle, nbytes=folder_bytes(bundle), used=bundle.stat().st_mtime)
    with suppress(BundleError):
        manifest = read_manifest(bundle, check_abi=False)
        model.target, model.quantization = manifest.target.name, manifest.quantization
    return model


def _records(cache: Path) -> Iterator[tuple[Path, float]]:
    """The records with their times, the latest first."""
    found = []
    for path in (cache / RECORDS).glob("*.json"):
        with suppress(OSError):
            found.append((path, path.stat().st_mtime))
    yield from sorted(found, key=lambda record: -record[1])


def _read_record(path: Path) -> tuple[str, str]:
    """Name and key; empty texts for a damaged record."""
    with suppress(MlcpipeError):
        record = read_json_object(path, limit=_MAX_RECORD_BYTES, error=BundleError)
        name, key = record.get("name"), record.get("bundle")
        if isinstance(name, str) and isinstance(key, str):
            return name, key
    return "", ""
