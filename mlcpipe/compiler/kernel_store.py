"""A store of compiled code on disk, by a hash of everything that makes it: `object_file.py`, `device_library.py`.

An entry is a file named by its key: MAGIC, the SHA-256 of what follows, the length of a JSON header as u32
little-endian, the header and the code. A damaged entry is a miss. The folder is its user's alone, and the least
recently used entries go where it outgrows `MAX_BYTES`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tvm
import tvm_ffi

import mlcpipe.compiler
import mlcpipe.passes
from mlcpipe.errors import CompileError
from mlcpipe.support.env import env
from mlcpipe.support.private import check_private, private_folder

MAX_BYTES = 1 << 30
_TRIMMED_BYTES = MAX_BYTES * 3 // 4
_MAGIC = b"MLCKRN01"
_HEADER = struct.Struct("<8s32sI")


class Stored(Protocol):
    """What an entry holds: the code, and facts about it as JSON."""

    def to_entry(self) -> tuple[Any, bytes]: ...

    @classmethod
    def from_entry(cls, facts: Any, code: bytes) -> Any:
        """The same again. Raises ValueError for other facts."""


S = TypeVar("S", bound=Stored)


class KernelStore:
    """Compiled code in a folder, which need not exist yet. What the disk refuses is no error: it only saves time."""

    def __init__(self, folder: Path, root: Path) -> None:
        """`root` is the cache that the folder is in: nobody else may write from there on."""
        self._folder, self._root = folder, root
        self._wrote = False

    def get(self, key: str, kind: type[S], make: Callable[[], S]) -> S:
        """The entry of a key, or what `make` returns, which becomes the entry. Raises what `make` raises."""
        path = self._folder / key[:2] / key[2:]
        with suppress(OSError, ValueError, CompileError):
            found: S = kind.from_entry(*_read(path.read_bytes()))
            check_private(path, self._root, CompileError)
            os.utime(path)
            return found
        made = make()
        with suppress(OSError):
            private_folder(path.parent)
            _write(path, *made.to_entry())
            self._wrote = True
        return made

    def trim(self) -> None:
        """Remove entries if some were written and all are more than `MAX_BYTES`, the least recently used first."""
        if not self._wrote:
            return
        with suppress(OSError):
            entries = [(entry.stat(), entry) for entry in self._folder.glob("??/*")]
            total = sum(status.st_size for status, _ in entries)
            for status, entry in sorted(entries, key=lambda one: one[0].st_mtime) if total > MAX_BYTES else ():
                entry.unlink(missing_ok=True)
                total -= status.st_size
                if total <= _TRIMMED_BYTES:
                    break


def kernel_store(dump: Path | None) -> KernelStore | None:
    """The store in the user's cache; None for a user without a home, and where a dump must show every pass."""
    folder, root = env().cached("kernels"), env().cache
    return None if folder is None or root is None or dump is not None else KernelStore(folder, root)


def key_of(*parts: str | bytes) -> str:
    """The key of what these parts make, with the versions of all that takes part in it."""
    digest = hashlib.sha256(_versions())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(struct.pack("<Q", len(data)) + data)
    return digest.hexdigest()


@functools.cache
def _versions() -> bytes:
    """TVM's versions, and a hash of the source from scheduled kernels to object files."""
    folders = [Path(next(iter(package.__path__))) for package in (mlcpipe.passes, mlcpipe.compiler)]
    sources = [source for folder in folders for source in sorted(folder.glob("*.py"))]
    digest = hashlib.sha256(f"{tvm.__version__} {tvm_ffi.__version__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.digest()


def _write(path: Path, facts: Any, code: bytes) -> None:
    """Readers see all or nothing. The hash stands for fsync, which would take longer than compiling many a kernel."""
    header = json.dumps(facts).encode()
    body = struct.pack("<I", len(header)) + header + code
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _read(data: bytes) -> tuple[Any, bytes]:
    """The facts and the code of an entry. Raises ValueError for damage."""
    if len(data) < _HEADER.size:
        raise ValueError("cut off")
    magic, digest, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or digest != hashlib.sha256(data[_HEADER.size - 4 :]).digest():
        raise ValueError("damaged")
    end = _HEADER.size + length
    return json.loads(data[_HEADER.size : end]), data[end:]
