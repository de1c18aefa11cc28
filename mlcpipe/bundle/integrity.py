"""Whether the files of a bundle are the ones its manifest lists."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from mlcpipe.bundle.manifest import FileInfo, Manifest
from mlcpipe.bundle.tensor_cache import RECOMPILE, TENSOR_CACHE, read_tensor_cache
from mlcpipe.errors import BundleError

_CHUNK = 1 << 20


def verify(
    directory: Path,
    manifest: Manifest,
    *,
    deep: bool = False,
    stamps: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Check that every file the manifest lists is there, has its size and its SHA-256.

    Parameter shards are large and hold no code. One that was hashed before is not hashed again while its
    path, size, times and inode are unchanged: `stamps` remembers them. Everything else, the library above
    all, is hashed on each call. Files the manifest does not list are ignored. A hash in the manifest finds
    damage, not an attacker, who would write the manifest too.

    Args:
        directory: the bundle.
        manifest: what `read_manifest` returned.
        deep: hash the shards whatever the stamps say.
        stamps: a directory of the user's cache, made when needed. Without it nothing is remembered, and
            shards are hashed only when `deep`.
        progress: called with the number of bytes after each part that was hashed.

    Raises:
        BundleError: a file is missing, not a regular file, or has another size or hash.
    """
    for path, info in manifest.files.items():
        _check_size(directory, path, info)
    shards: set[str] = set()
    if TENSOR_CACHE in manifest.files:
        _check_hash(directory, TENSOR_CACHE, manifest.files[TENSOR_CACHE], progress)
        shards = {shard.dataPath for shard in read_tensor_cache(directory).records}
    for path, info in manifest.files.items():
        if path == TENSOR_CACHE:
            continue
        if path not in shards:
            _check_hash(directory, path, info, progress)
        elif deep or (stamps is not None and not os.path.exists(_stamp(directory, path, info, stamps))):
            before = _stamp(directory, path, info, stamps) if stamps is not None else None
            _check_hash(directory, path, info, progress)
            if stamps is not None and before == _stamp(directory, path, info, stamps):
                _remember(before)


def _check_size(directory: Path, path: str, info: FileInfo) -> None:
    try:
        status = (directory / path).stat()
    except OSError as error:
        raise _wrong(directory, path, "a file", error.strerror) from None
    if not stat.S_ISREG(status.st_mode):
        raise _wrong(directory, path, "a regular file", "something else")
    if status.st_size != info.bytes:
        raise _wrong(directory, path, f"{info.bytes} bytes", f"{status.st_size}")


def _check_hash(directory: Path, path: str, info: FileInfo, progress: Callable[[int], None] | None) -> None:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    try:
        with open(directory / path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise _wrong(directory, path, "a readable file", error.strerror) from error
    if digest.hexdigest() != info.sha256:
        raise _wrong(directory, path, f"sha256 {info.sha256}", digest.hexdigest())


def _stamp(directory: Path, path: str, info: FileInfo, stamps: Path) -> Path:
    """The stamp's file: its name is a hash of what identifies this content of this file, and it is empty."""
    file = (directory / path).resolve()
    status = file.stat()
    # The change time too: unlike the modification time, a program cannot set it.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    facts = (file, status.st_size, *times, status.st_dev, status.st_ino, info.sha256)
    return stamps / hashlib.sha256(os.fsencode("\n".join(map(str, facts)))).hexdigest()


def _remember(stamp: Path) -> None:
    # A cache that cannot be written costs time at the next start and nothing else.
    with contextlib.suppress(OSError):
        stamp.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        stamp.touch(mode=0o600)


def _wrong(directory: Path, path: str, expected: str, found: str | None) -> BundleError:
    return BundleError(
        f"the bundle's file {path} is not as compiled",
        where=directory,
        expected=expected,
        found=found,
        next_step=RECOMPILE,
    )
