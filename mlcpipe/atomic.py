"""Files and folders that appear whole or not at all, and disks that are asked before they are filled."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlcpipe.errors import ResourceError, UsageError

if sys.platform != "win32":
    import fcntl

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def atomic_directory(dest: Path, *, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty sibling folder of `dest`; it becomes `dest` when the block ends without an exception.

    Before that, files and folders are flushed to the disk: a `dest` that exists is complete, even after a
    power cut. After any exception, KeyboardInterrupt too, the temporary folder is removed. What a killed
    process left is removed by the next call for the same `dest` (on POSIX). `overwrite` replaces a non-empty
    folder: the old one stays until the new one is complete. `needed_bytes`, where known, is checked first.

    Raises UsageError when `dest` is a file, or not empty without `overwrite`, or written by another run, and
    ResourceError when the disk is or gets full.
    """
    dest = Path(os.path.realpath(dest))
    _check_destination(dest, overwrite)
    if needed_bytes:
        check_disk_space(dest.parent, needed_bytes)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(dest)
        partial, lock = _claim(dest)
    except OSError as error:
        raise _cannot_write(dest, error, needed_bytes) from error
    try:
        yield partial
        _flush_tree(partial)
        _publish(partial, dest, overwrite)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise _cannot_write(dest, error, max(needed_bytes, _tree_bytes(partial))) from error
        raise
    finally:
        # After the rename there is nothing left under this name, which ignore_errors passes over.
        shutil.rmtree(partial, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def atomic_write(path: Path, data: bytes) -> None:
    """Writes `data` to `path` so that a reader sees the old content or the new, never a part.

    Raises ResourceError when the disk is full, and OSError for anything else that the system refuses.
    """
    path = Path(os.path.realpath(path))
    _remove_abandoned(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _flush_folder(path.parent)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise _cannot_write(path, error, len(data)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def check_disk_space(folder: Path, needed_bytes: int) -> None:
    """Raises ResourceError unless the disk of `folder` (which need not exist yet) has `needed_bytes` free."""
    existing = _existing_parent(folder)
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ResourceError(
            f"not enough space on disk {_disk_of(existing)}",
            where=folder,
            expected=f"{_sized(needed_bytes)} free",
            found=_sized(free),
            next_step="free space or write to another disk",
        )


def _check_destination(dest: Path, overwrite: bool) -> None:
    if not dest.exists():
        return
    if not dest.is_dir():
        raise UsageError(
            "the output is not a folder",
            where=dest,
            expected="a new folder",
            found="a file",
            next_step="give another path",
        )
    if overwrite and (Path.cwd().is_relative_to(dest) or Path.home().is_relative_to(dest)):
        raise UsageError(
            "refusing to replace a folder above the working or home folder",
            where=dest,
            expected="a folder of its own",
            next_step="give another path",
        )
    if not overwrite and any(dest.iterdir()):
        raise UsageError(
            "output folder not empty",
            where=dest,
            expected="a new or empty folder",
            found=f"{sum(1 for _ in dest.iterdir())} entries",
            next_step="give another path or remove it",
        )


def _claim(dest: Path) -> tuple[Path, int | None]:
    """A new temporary folder for `dest`, and a descriptor whose lock marks it as in use.

    The system releases the lock when the process ends, however it ends.
    """
    partial = dest.with_name(f".{dest.name}.partial-{os.getpid()}")
    while True:
        try:
            partial.mkdir()
        except FileExistsError:
            raise UsageError(
                "another run is writing this folder", where=dest, next_step="wait for it or give another path"
            ) from None
        if sys.platform == "win32":
            return partial, None
        # A cleaner may have taken the folder between mkdir and flock: then it is gone or going; make another.
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue
        free = _try_lock(lock) is not False
        if free and partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
            return partial, lock
        os.close(lock)


def _try_lock(descriptor: int) -> bool | None:
    """True when this process now holds the lock, False when another does, None where there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove_abandoned(dest: Path) -> None:
    """Removes what killed processes left for `dest`."""
    if sys.platform == "win32":
        return
    pattern = re.compile(re.escape(f".{dest.name}.partial-") + r"(\d{1,10})(-[0-9a-f]{8})?")
    with os.scandir(dest.parent) as entries:
        leftovers = [
            (Path(entry.path), match) for entry in entries if (match := pattern.fullmatch(entry.name))
        ]
    for leftover, match in leftovers:
        pid = int(match[1])
        if match[2] is None:
            _remove_folder_unless_locked(leftover, pid)
        elif not _is_alive(pid):
            leftover.unlink(missing_ok=True)


def _remove_folder_unless_locked(folder: Path, pid: int) -> None:
    """A lock says more than a process number, which containers and reboots hand out again."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone, or a link or file that is none of ours
    try:
        mine = _try_lock(descriptor)
        if mine or (mine is None and not _is_alive(pid)):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _flush_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(root, name)
            if stat.S_ISREG(path.lstat().st_mode):
                # Windows flushes only what is open for writing.
                with path.open("rb" if os.name == "posix" else "r+b") as file:
                    os.fsync(file.fileno())
        _flush_folder(Path(root))


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere a folder cannot be opened; its entries are journalled
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(partial: Path, dest: Path, overwrite: bool) -> None:
    if not dest.exists():
        partial.rename(dest)
    elif not any(dest.iterdir()):
        dest.rmdir()
        partial.rename(dest)
    elif overwrite:
        old = dest.with_name(f".{dest.name}.replaced-{os.getpid()}-{secrets.token_hex(4)}")
        dest.rename(old)
        try:
            partial.rename(dest)
        except BaseException:
            old.rename(dest)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        raise UsageError(
            "output folder not empty",
            where=dest,
            expected="it to stay as it was at the start",
            found="files that another program wrote meanwhile",
            next_step="give another path or remove it",
        )
    _flush_folder(dest.parent)


def _tree_bytes(folder: Path) -> int:
    return sum(Path(root, name).lstat().st_size for root, _, names in os.walk(folder) for name in names)


def _existing_parent(folder: Path) -> Path:
    folder = Path(os.path.realpath(folder))
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _disk_of(path: Path) -> Path:
    return next((parent for parent in (path, *path.parents) if os.path.ismount(parent)), path)


def _sized(count: int) -> str:
    return f"{count / 1e9:.3f} GB ({count} bytes)"


def _cannot_write(dest: Path, error: OSError, needed_bytes: int) -> ResourceError:
    existing = _existing_parent(dest.parent)
    free = f"{_sized(shutil.disk_usage(existing).free)} free"
    if error.errno not in FULL_DISK:
        return ResourceError(
            "cannot write the output", where=dest, found=error.strerror, next_step="give another path"
        )
    return ResourceError(
        f"disk {_disk_of(existing)} is full or refuses a file of this size",
        where=dest,
        expected=f"room for more than {_sized(needed_bytes)}" if needed_bytes else "room for the output",
        found=f"{free} ({error.strerror})",
        next_step="free space or write to another disk",
    )
