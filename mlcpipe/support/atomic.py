"""Atomic writes of files and folders, with checks of free disk space."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.support.disk import check_disk_space, full_disk_named

_WRITER_S = 60  # for a file: more than a busy disk needs
_OWN = "mlcpipe-"  # in temporary names beside an output, and not in names of users' files


@contextmanager
def atomic_directory(dest: Path, *, replaces: str = "", needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder next to `dest`; it becomes `dest` when the block ends without an exception.

    Everything is flushed to disk first: a `dest` that exists is complete, even after a power cut. An exception removes
    the temporary folder; the next call for the same `dest` removes those of killed processes. A non-empty folder is
    replaced only if one of its files matches the pattern `replaces`, and in one step: whenever the process is killed,
    `dest` is the old folder or the new one. (A file system that cannot exchange folders takes two steps; the next call
    restores a folder killed between them.)

    Raises UsageError when `dest` is a file, must not be replaced or is being written by another run, ResourceError
    when the disk has less than `needed_bytes` or fills up, and OSError for any other failure.
    """
    dest = Path(os.path.realpath(dest))
    with contextlib.ExitStack() as cleanup, full_disk_named(dest, needed_bytes):
        check_disk_space(dest.parent, needed_bytes)
        dest.parent.mkdir(parents=True, exist_ok=True)
        cleanup.enter_context(only_writer(dest, _busy(dest)))
        _clear(dest)
        check_destination(dest, replaces)
        partial = _sibling(dest, "partial")
        cleanup.callback(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        _flush_tree(partial)
        check_destination(dest, replaces)
        _publish(partial, dest)


def remove_directory(folder: Path) -> None:
    """Delete a folder, which nobody sees in part: it is renamed first. Links are not followed. Raises OSError."""
    if folder.is_symlink():
        return folder.unlink()
    partial = _sibling(folder, "partial")
    os.rename(folder, partial)
    shutil.rmtree(partial)


def atomic_write(path: Path, data: bytes) -> None:
    """Writes `data` to `path` as `atomic_file` does."""
    with atomic_file(path, len(data)) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path, needed_bytes: int, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yields an empty file of this mode of open(2), which becomes `path` when the block ends without an exception.

    A reader sees the old content or the new. Writers wait for each other. Leftovers of killed writers are removed.
    Raises ResourceError when the disk has less than `needed_bytes` or fills up, UsageError when another writer takes
    too long, and OSError for any other failure.
    """
    path = Path(os.path.realpath(path))
    partial = path.with_name(f".{path.name}.{_OWN}partial")
    path.parent.stat()  # the lock would make the folder
    check_disk_space(path.parent, needed_bytes)
    busy = UsageError("another run is writing this file", where=path, next_step="wait for it or stop it")
    with full_disk_named(path, needed_bytes), only_writer(path, busy, wait_s=_WRITER_S):
        partial.unlink(missing_ok=True)
        try:
            partial.touch(mode, exist_ok=False)
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            _flush_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def check_destination(dest: Path, replaces: str = "") -> None:
    """Raises UsageError unless `dest` is new, empty, or contains a file that matches the pattern `replaces`."""
    there = next((path for path in (dest, *dest.parents) if path.exists()), dest)
    if there.exists() and not there.is_dir():
        what = "the output" if there == dest else "the place of the output"
        raise UsageError(f"{what} is not a folder", where=there, found="a file", next_step="give another path")
    if there != dest or not dest.exists():
        return
    if any(dest.iterdir()) and not replaces:
        raise _not_empty(dest)
    if any(dest.iterdir()) and not any(dest.glob(replaces)):
        raise UsageError(
            "refusing to overwrite a folder", where=dest, expected=f"{replaces} in it", found="other files"
        )


def check_early(dest: Path, replaces: str = "") -> None:
    """As `check_destination`, before the work. Also removes the lock of a run killed after it wrote everything.

    Raises UsageError, also if another run is writing there.
    """
    dest = Path(os.path.realpath(dest))
    if _lock_file(dest).exists():
        with only_writer(dest, _busy(dest)):
            pass
    check_destination(dest, replaces)


@contextmanager
def only_writer(dest: Path, busy: MlcpipeError, wait_s: float = 0) -> Iterator[None]:
    """Holds a lock that the system releases when the process ends, even if killed.

    Raises `busy` if another holds it for `wait_s`.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_file(dest), timeout=wait_s, poll_interval=0.005)
    try:
        lock.acquire()
    except Timeout:
        raise busy from None
    try:
        yield
    finally:
        # Before the release: filelock retries if the file of an acquired lock was removed.
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()


def _lock_file(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.{_OWN}lock")


def _busy(dest: Path) -> UsageError:
    return UsageError("another run is writing this folder", where=dest, next_step="wait for it or choose another path")


def _sibling(path: Path, purpose: str) -> Path:
    return path.with_name(f".{path.name}.{_OWN}{purpose}-{secrets.token_hex(4)}")


def _clear(dest: Path) -> None:
    """Remove leftovers of killed runs beside `dest`; if `dest` is missing, move the old folder back."""
    ours = re.compile(rf"\.{re.escape(dest.name)}\.{_OWN}(partial|replaced)-[0-9a-f]{{8}}")
    with os.scandir(dest.parent) as entries:
        found = [(entry, ours.fullmatch(entry.name)) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for folder, name in found:
        if name and name[1] == "replaced" and not dest.exists():
            os.rename(folder.path, dest)
        elif name:
            shutil.rmtree(folder.path, ignore_errors=True)


def _flush_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            # Windows flushes only files opened for writing.
            with open(os.path.join(root, name), "rb" if os.name == "posix" else "r+b") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # Windows cannot open folders; it journals their entries
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, dest: Path) -> None:
    """Rename `partial` to `dest`; the old folder is then called `partial`, or deleted."""
    try:
        if not dest.exists():
            os.rename(partial, dest)
        elif not _exchanged(partial, dest):
            old = _sibling(dest, "replaced")
            os.rename(dest, old)
            try:
                os.rename(partial, dest)
            except BaseException:
                os.rename(old, dest)
                raise
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # a folder created meanwhile
            raise _not_empty(dest) from error
        raise
    _flush_folder(dest.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; False if the system or file system cannot.

    renameat2(2) with RENAME_EXCHANGE on Linux, renamex_np(2) with RENAME_SWAP on macOS; both flags are 2.
    """
    if sys.platform == "win32":
        return False
    names = os.fsencode(one), os.fsencode(other)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        failed = libc.renamex_np(*names, 2)
    elif sys.platform == "linux" and hasattr(libc, "renameat2"):
        at_cwd = -100
        failed = libc.renameat2(at_cwd, names[0], at_cwd, names[1], 2)
    else:
        return False
    code = ctypes.get_errno()
    if failed and code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(other))
    return not failed


def _not_empty(dest: Path) -> UsageError:
    return UsageError("output folder not empty", where=dest, next_step="give another path or --overwrite")
