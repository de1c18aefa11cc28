"""Free disk space: checked before the work, and named when a write fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlcpipe.errors import ResourceError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises ResourceError unless the disk of `folder` (which need not exist yet) has `needed_bytes` free."""
    free = _free_bytes(folder)
    if free < needed_bytes:
        raise ResourceError(
            "not enough space on the disk",
            where=folder,
            expected=f"{_sized(needed_bytes)} free",
            found=_sized(free),
            next_step="free space or write to another disk",
        )


def folder_bytes(folder: Path) -> int:
    """Bytes of a folder's files; links count as links."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # another program removes it meanwhile
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def same_disk(one: Path, other: Path) -> bool:
    """Whether two folders, which need not exist yet, share the free space of a disk."""
    return _existing(one).stat().st_dev == _existing(other).stat().st_dev


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    folder = Path(os.path.realpath(folder))
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _sized(count: int) -> str:
    return f"{count / 1e9:.3f} GB ({count} bytes)"


@contextmanager
def full_disk_named(dest: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Raises ResourceError instead of the system's error for a full disk, which names no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise ResourceError(
            "the disk is full or refuses a file of this size",
            where=dest,
            expected=f"room for {_sized(needed_bytes)}" if needed_bytes else "room for the output",
            found=f"{_sized(_free_bytes(dest.parent))} free ({error.strerror})",
            next_step="free space or write to another disk",
        ) from error
