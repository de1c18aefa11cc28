"""`system_fingerprint`: as long as it is the same, equal `deterministic` requests with a seed get equal answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlcpipe.bundle.manifest import MANIFEST
from mlcpipe.version import PINNED, __version__, commit


def fingerprint(bundle: Path, *settings: object) -> str:
    """Of this build, of a bundle, whose manifests have the SHA-256 of all its files, and of settings."""
    digest = hashlib.sha256(repr((__version__, commit(), PINNED, settings)).encode())
    for path in sorted(bundle.rglob(MANIFEST)):
        digest.update(path.read_bytes())
    return f"fp_{digest.hexdigest()[:16]}"
