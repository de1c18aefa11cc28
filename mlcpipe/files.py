"""Size and hash of a file."""

from __future__ import annotations

import hashlib
from pathlib import Path

from mlcpipe.bundle.manifest import FileInfo


def file_info(path: Path) -> FileInfo:
    """SHA-256 and bytes of a file, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return FileInfo(sha256=digest.hexdigest(), bytes=path.stat().st_size)
