"""Native code that wheels for a platform bring: compiled from the sources beside it, and named by their hash.

`wheels/build.py` makes it. A file whose name has another hash was made from other sources, or for another TVM.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from mlcpipe.support.resources import compiled_path, native_path

POOL_SOURCES = tuple(native_path() / name for name in ("pool.c", "runtime/pool.h", "kernel_errors.c"))
POOL = "pool"


def digest_of(sources: Iterable[Path], words: Iterable[str] = ()) -> str:
    """A hash of sources and of whatever else decides what is compiled: 24 hex digits."""
    digest = hashlib.sha256()
    for source in sources:
        content = source.read_bytes()
        digest.update(f"{source.name}\0{len(content)}\0".encode())
        digest.update(content)
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:24]


def compiled(stem: str, digest: str, suffix: str) -> Path | None:
    """The wheel's file that was made from sources with this digest."""
    path = compiled_path() / f"{stem}-{digest}{suffix}"
    return path if path.is_file() else None


def unfit(stem: str, suffix: str) -> bool:
    """Whether the wheel brought such a file at all; asked where none fits."""
    return any(compiled_path().glob(f"{stem}-*{suffix}"))


def compiled_pool() -> Path | None:
    """The threads of a library's parallel loops, as an object file for `mlcpipe.compiler.elf`."""
    return compiled(POOL, digest_of(POOL_SOURCES), ".o")
