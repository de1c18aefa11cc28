"""Libraries with kernels for devices, in the store of compiled code: whole, by a hash of everything that makes them.

Kernels have no entries of their own: hashing lowered ones takes most of the time that their SPIR-V takes, and more than
their source. What takes longer are passes, code that launches kernels, NVRTC and emcc (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm

from mlcpipe.compiler.kernel_store import kernel_store, key_of
from mlcpipe.passes.lowering import Lowering
from mlcpipe.support.resources import native_path, tuned_path

# In addition to Python: the starts of kernels' sources, and C that is linked to a library or writes modules for it.
_SOURCES = (".py", ".c", ".cc", ".h", ".cuh", ".metal")


@dataclass(frozen=True)
class LibraryFiles:
    """The files of a library, by name."""

    contents: Mapping[str, bytes]

    def to_entry(self) -> tuple[Any, bytes]:
        """What the store holds: names and sizes as JSON, and the files one after the other."""
        return [[name, len(content)] for name, content in self.contents.items()], b"".join(self.contents.values())

    @classmethod
    def from_entry(cls, facts: Any, code: bytes) -> LibraryFiles:
        """The same again. Raises ValueError for facts that are not names of files and sizes of all the code."""
        contents, at = {}, 0
        for name, nbytes in facts:
            if not (isinstance(name, str) and name and Path(name).name == name and type(nbytes) is int and nbytes >= 0):
                raise ValueError("no name and size of a file")
            contents[name] = code[at : at + nbytes]
            at += nbytes
        if at != len(code):
            raise ValueError("other sizes than the code's")
        return cls(contents)


def write_once(
    scheduled: Lowering, folder: Path, stem: str, tools: Sequence[object], write: Callable[[Path], None]
) -> None:
    """Put the library `stem` of a scheduled module into `folder`: what `write` puts there, or the store's copy of it.

    `tools`: the linker and all other programs that take part, with their versions and options, each by its `repr`.
    """

    def make() -> LibraryFiles:
        with tempfile.TemporaryDirectory() as made:
            write(Path(made))
            return LibraryFiles({path.name: path.read_bytes() for path in sorted(Path(made).iterdir())})

    store = kernel_store(scheduled.dump)
    files = make() if store is None else store.get(key(scheduled, stem, tools), LibraryFiles, make)
    if store is not None:
        store.trim()
    for name, content in files.contents.items():
        (folder / name).write_bytes(content)


def key(scheduled: Lowering, stem: str, tools: Sequence[object]) -> str:
    """What tells a library from all others: code, names, the target, the tools and mlcpipe's own source."""
    mod = scheduled.mod
    functions = sorted((gv.name_hint, tvm.ir.save_json(func)) for gv, func in mod.functions.items())
    code = json.dumps([functions, tvm.ir.save_json(mod.attrs)])
    described = repr([scheduled.target, scheduled.variant, str(scheduled.tvm_target), stem, *tools])
    return key_of(code, described, _source())


@functools.cache
def _source() -> bytes:
    """A hash of all source: kernels of the driver check are in no module, and much of it makes them."""
    packages = native_path().parent, tuned_path().parent
    digest = hashlib.sha256()
    for path in (path for package in packages for path in sorted(package.rglob("*")) if path.suffix in _SOURCES):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()
