"""Names of models and small untrusted files: regular files only, of bounded size, with one-line errors."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from mlcpipe.errors import MlcpipeError

HUB_SCHEME = "hf://"
# Of a hub's names; no `..` or `--`, which the cache folder uses.
HUB_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_]|[.-](?![.-]))*(?<![.-])"
OLLAMA_SCHEME = "ollama://"
LFS_START = b"version https://git-lfs"  # of a pointer to a file that Git LFS did not fetch
LFS_ADVICE = "run `git lfs pull` in its folder"


def local_path(model: str | Path) -> Path | None:
    """A model's name as a path, with `~` expanded; None for names of the hub or Ollama, even if such a path exists."""
    return None if str(model).startswith((HUB_SCHEME, OLLAMA_SCHEME)) else Path(os.path.expanduser(model))


def file_size(path: Path, error_class: type[MlcpipeError], what: str = "file", next_step: str | None = None) -> int:
    """Size in bytes of the regular file `path`. Follows links; refuses pipes and devices, which would block.

    Raises `error_class` for anything else, calling it `what`.
    """
    where = repr(str(path))
    try:
        status = path.stat()
    except FileNotFoundError:
        raise error_class(
            f"missing {what}", where=where, expected="a file, or a link to one", found="nothing", next_step=next_step
        ) from None
    except (OSError, ValueError) as error:
        raise error_class(f"cannot read {what}", where=where, found=_reason(error), next_step=next_step) from error
    if not stat.S_ISREG(status.st_mode):
        found = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise error_class(
            f"cannot read {what}", where=where, expected="a regular file", found=found, next_step=next_step
        )
    return status.st_size


def read_bounded(
    path: Path, max_bytes: int, error_class: type[MlcpipeError], what: str = "file", next_step: str | None = None
) -> bytes:
    """The content of the regular file `path`, at most `max_bytes`. Raises `error_class`, calling the file `what`."""
    size = file_size(path, error_class, what, next_step)
    try:
        with path.open("rb") as file:
            raw = file.read(min(size, max_bytes) + 1)
    except OSError as error:
        raise error_class(
            f"cannot read {what}", where=repr(str(path)), found=_reason(error), next_step=next_step
        ) from error
    if max(size, len(raw)) > max_bytes:
        raise error_class(
            f"{what} too large",
            where=repr(str(path)),
            expected=f"at most {max_bytes} bytes",
            found=f"{size} bytes",
            next_step=next_step,
        )
    return raw


def read_utf8(path: Path, max_bytes: int, error_class: type[MlcpipeError], what: str) -> str:
    """The text of a file in UTF-8, of at most `max_bytes`. Raises `error_class`, calling the file `what`."""
    try:
        return read_bounded(path, max_bytes, error_class, what).decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"a bad byte at offset {error.start}"
        raise error_class(f"the {what} is not UTF-8", where=path, found=found) from None


def text_hash(text: str) -> str:
    """The SHA-256 of a text's UTF-8, without white space at its ends."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
