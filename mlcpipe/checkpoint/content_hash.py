"""Content hash of a checkpoint's files, used as a cache key. A large file is read only once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from mlcpipe.errors import CheckpointError, MlcpipeError
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.files import file_size
from mlcpipe.support.json_files import shown_path
from mlcpipe.support.private import private_folder

REMEMBERED_BYTES = 1 << 20  # hashing a smaller file is as fast as looking up its digest
BUFFER_BYTES = 8 << 20
# Two changes within this time may leave the same modification time (FAT has a resolution of 2 s).
SETTLED_SECONDS = 3.0
DIGEST = re.compile(rb"[0-9a-f]{64}")


def hash_files(files: Iterable[Path], cache_dir: Path | None = None) -> str:
    """sha256 in hex over (name, size, sha256 of the content) of `files`, sorted by name.

    `cache_dir` is a folder of this user that stores digests of large files; None stores nothing.
    Raises CheckpointError for a file that cannot be read.
    """
    total = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        size = file_size(file, CheckpointError)
        total.update(f"{file.name}\0{size}\0{file_digest(file, cache_dir)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def file_digest(file: Path, cache_dir: Path | None = None) -> str:
    """sha256 of one file in hex, looked up in `cache_dir` by path, size, times and inode."""
    try:
        status = file.stat()
        if cache_dir is None or status.st_size < REMEMBERED_BYTES:
            return _digest(file)
        identity = _identity(file, status)
        slot = cache_dir / hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        remembered = _recall(slot)
        if remembered is not None:
            return remembered
        digest = _digest(file)
        settled = time.time() - status.st_mtime > SETTLED_SECONDS
        if _identity(file, file.stat()) != identity:
            raise CheckpointError(
                "a file changed while it was read",
                where=shown_path(file),
                next_step="wait until the writer is done",
            )
    except OSError as error:
        raise CheckpointError("cannot read a file", where=shown_path(file), found=error) from error
    if settled:
        # The cache only saves time: a read-only or full cache folder must not stop the caller.
        with contextlib.suppress(OSError, MlcpipeError):
            private_folder(cache_dir)
            atomic_write(slot, digest.encode())
    return digest


def _identity(file: Path, status: os.stat_result) -> str:
    # Includes the change time, which programs cannot set.
    times = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
    return f"{file.resolve()}\0{status.st_size}\0{times}\0{status.st_dev}\0{status.st_ino}"


def _recall(slot: Path) -> str | None:
    try:
        with slot.open("rb") as file:
            text = file.read(65)
    except OSError:
        return None
    return text.decode() if DIGEST.fullmatch(text) else None


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
