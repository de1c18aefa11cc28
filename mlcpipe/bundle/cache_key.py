"""The name of a bundle in the cache: another one for all that compiling depends on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mlcpipe.support.env import env

_SOURCES = (".py", ".toml", ".json", ".c", ".cuh", ".metal")


def cache_key(target: str, *names: str) -> str:
    """The key of a bundle for a target, or several, and other names, made on this machine with these versions."""
    from mlcpipe.host.cpu import cpu_model
    from mlcpipe.host.cpu_features import host_features
    from mlcpipe.host.versions import versions

    described = [
        Path(name).read_text(encoding="utf-8", errors="replace") if name.endswith(".toml") else name
        for name in target.split(",")
    ]
    parts = [",".join(described), *names, cpu_model(), sorted(host_features()), versions()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def source_hash() -> str:
    """Hash of the compiler's source and tuning records: a changed kernel must not reuse a cached bundle."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for root in (package, package.parent / "tir_schedules", package.parent / "targets", env().cache_dir / "tuned"):
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.suffix in _SOURCES and name.parts[0] not in ("cli", "server", "web"):
                digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
