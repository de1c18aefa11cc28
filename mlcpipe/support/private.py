"""Private folders of this user: the cache with its native code, and the keys of trusted publishers."""

from __future__ import annotations

import os
from pathlib import Path

from mlcpipe.errors import MlcpipeError

_ENTER, _WRITE = 0o077, 0o022  # permissions of group and others, in the modes of stat(2)


def private_folder(folder: Path) -> Path:
    """Make a folder and missing parents; nobody else may enter the new ones. Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    return folder


def check_private(path: Path, root: Path, error: type[MlcpipeError]) -> None:
    """Raise `error` unless only this user and root can have written `path` and its folders from `root` on.

    As ssh does with keys. Below a folder that only its owner may enter, modes do not matter. Windows keeps such folders
    in the user's profile: nothing is checked there.
    """
    if os.name != "posix":
        return
    closed = False
    for part in [root, *reversed([one for one in path.parents if one.is_relative_to(root) and one != root]), path]:
        status = part.stat()
        found = None
        if status.st_uid not in (os.geteuid(), 0):
            found = f"the owner {status.st_uid}"
        elif not closed and status.st_mode & _WRITE:
            found = f"mode {status.st_mode & 0o7777:04o}"
        if found is not None:
            raise error(
                "others may have written this code", where=part, found=found,
                expected=f"owner {os.geteuid()}, and no write access for others",
                next_step="delete it, or set MLCPIPE_CACHE and MLCPIPE_CONFIG to folders of your own",
            )  # fmt: skip
        closed = closed or not status.st_mode & _ENTER
