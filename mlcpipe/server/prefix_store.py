"""Computed prompts in a folder: files of `runtime/chat_file.py`, by name."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest
from mlcpipe.runtime.chat_file import SavedChat, read_chat, write_chat
from mlcpipe.server.errors import ApiError
from mlcpipe.support.private import private_folder

MOST = 256  # files per folder
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SUFFIX = ".prefix"
_Folder = TypeVar("_Folder", bound="PrefixFolder")


@dataclass(frozen=True)
class PrefixFolder:
    """A folder of computed prompts. Methods raise ApiError."""

    folder: Path

    def of(self: _Folder, owner: str) -> _Folder:
        """The store of one key, in its own folder; "" is the shared one."""
        return replace(self, folder=self.folder / owner) if owner else self

    def names(self) -> dict[str, int]:
        """Names in order, with the bytes of their files."""
        paths = sorted(path for path in self.folder.glob(f"*{_SUFFIX}") if path.is_file())
        return {path.stem: path.stat().st_size for path in paths if _NAME.fullmatch(path.stem)}

    def delete(self, name: str) -> None:
        """Remove a file."""
        try:
            self.path(name).unlink()
        except FileNotFoundError:
            raise _absent(name) from None

    def path(self, name: str) -> Path:
        """The path of a name's file, existing or not."""
        if not _NAME.fullmatch(name):
            message = "name: expected 1 to 64 letters, digits, dots, hyphens and underscores, not beginning with a dot"
            raise ApiError(400, message, param="name")
        return self.folder / f"{name}{_SUFFIX}"


@dataclass(frozen=True)
class PrefixStore(PrefixFolder):
    """A folder, and the model of its files. Methods raise ApiError and what they call raises."""

    manifest: Manifest
    context_length: int

    def write(self, name: str, tokens: Sequence[int], states: Sequence[NDArray[np.int8]], salt: str) -> int:
        """Write the states after a prompt's tokens -> bytes of the file."""
        path = self.path(name)
        private_folder(self.folder)
        if not path.exists() and len(self.names()) >= MOST:
            raise ApiError(400, f"there are {MOST} saved prefixes: delete one", code="too_many_prefixes")
        write_chat(path, self.manifest, tokens, len(tokens), states, {"salt": _digest(salt)}, mode=0o600)
        return path.stat().st_size

    def read(self, name: str, salt: str) -> SavedChat:
        """A checked file; one saved with another salt counts as missing."""
        path = self.path(name)
        if path.is_file():
            saved = read_chat(path, self.manifest, self.context_length)
            if hmac.compare_digest(str((saved.chat or {}).get("salt")).encode(), _digest(salt).encode()):
                return saved
        raise _absent(name)


def _absent(name: str) -> ApiError:
    return ApiError(404, f"there is no saved prefix {name!r}", code="prefix_not_found", param="name")


def _digest(salt: str) -> str:
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
