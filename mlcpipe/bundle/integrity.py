"""Checks the files of a bundle against its manifest."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from mlcpipe.bundle.manifest import FileInfo, Manifest
from mlcpipe.bundle.tensor_cache import RECOMPILE, TENSOR_CACHE, read_tensor_cache
from mlcpipe.errors import BundleError
from mlcpipe.support.private import private_folder

_CHUNK = 1 << 20


def file_info(path: Path) -> FileInfo:
    """SHA-256 and bytes of a file, read in blocks."""
    return FileInfo(sha256=_digest(path), bytes=path.stat().st_size)


def verify(
    directory: Path,
    manifest: Manifest,
    *,
    deep: bool = False,
    stamps: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Check that every file in the manifest exists with the listed size and SHA-256.

    Parameter shards are large and hold no code. A shard is not hashed again while its path, size, times and
    inode match a file in `stamps`. All other files, above all the library, are hashed on each call. Files
    missing from the manifest are ignored. A hash in the manifest detects damage, not an attacker, who would
    rewrite the manifest too.

    Args:
        directory: the bundle.
        manifest: from `read_manifest`.
        deep: hash the shards even if the stamps match.
        stamps: a directory in the user's cache, created when needed. Without it shards are hashed only
            with `deep`.
        progress: called with the number of bytes after each hashed block.

    Raises:
        BundleError: a file is missing, not a regular file, or has another size or hash.
    """
    for path, info in manifest.files.items():
        _check_size(directory, path, info)
    shards: set[str] = set()
    indices = [path for path in manifest.files if PurePosixPath(path).name == TENSOR_CACHE]  # each stage has one
    for path in indices:
        _check_hash(directory, path, manifest.files[path], progress)
        folder = PurePosixPath(path).parent
        shards |= {str(folder / shard.dataPath) for shard in read_tensor_cache(directory / folder).records}
    for path, info in manifest.files.items():
        if path in indices:
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
        raise _wrong(directory, path, "a regular file", "another file type")
    if status.st_size != info.bytes:
        raise _wrong(directory, path, f"{info.bytes} bytes", f"{status.st_size}")


def _check_hash(directory: Path, path: str, info: FileInfo, progress: Callable[[int], None] | None) -> None:
    try:
        digest = _digest(directory / path, progress)
    except OSError as error:
        raise _wrong(directory, path, "a readable file", error.strerror) from error
    if digest != info.sha256:
        raise _wrong(directory, path, f"sha256 {info.sha256}", digest)


def _digest(path: Path, progress: Callable[[int], None] | None = None) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def _stamp(directory: Path, path: str, info: FileInfo, stamps: Path) -> Path:
    """Path of the stamp: an empty file named by a hash of the file's identity and expected content."""
    file = (directory / path).resolve()
    status = file.stat()
    # Includes the change time, which programs cannot set.
    times = (status.st_mtime_ns, status.st_ctime_ns)
    facts = (file, status.st_size, *times, status.st_dev, status.st_ino, info.sha256)
    return stamps / hashlib.sha256(os.fsencode("\n".join(map(str, facts)))).hexdigest()


def _remember(stamp: Path) -> None:
    # An unwritable cache only costs time at the next start.
    with contextlib.suppress(OSError):
        private_folder(stamp.parent)
        stamp.touch(mode=0o600)


def _wrong(directory: Path, path: str, expected: str, found: str | None) -> BundleError:
    return BundleError(
        f"the bundle's file {path} has changed since it was compiled",
        where=directory,
        expected=expected,
        found=found,
        next_step=RECOMPILE,
    )
