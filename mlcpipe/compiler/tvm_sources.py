"""TVM's runtime as source: the wheel's files, missing headers, and our edits; its objects are cached."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from filelock import FileLock

from mlcpipe.errors import CompileError
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.private import check_private, private_folder
from mlcpipe.support.resources import native_path

_SHIM = native_path() / "tvm_shim"
_SOURCES = (".h", ".cc", ".hpp", ".c")
_FFI = "3rdparty/tvm-ffi/include/tvm/ffi"
# These edits shrink a library for browsers from 4.1 to 2.9 MB at the same speed (1.85 ms of host time per token, demo
# model, Node 20, 2026-11). The compiler decides what to inline, and functions do not describe their types, which no
# host asks for.
_EDITS: tuple[tuple[str, str, str], ...] = (
    (f"{_FFI}/base_details.h", "#define TVM_FFI_INLINE [[gnu::always_inline]] inline", "#define TVM_FFI_INLINE inline"),
    (f"{_FFI}/reflection/registry.h", "FuncInfo::TypeSchema()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchema<T>::v()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchemaImpl<Function>::v()", "std::string()"),
)
_CHANGED = "// Changed by mlcpipe: the original is in the packages apache-tvm and apache-tvm-ffi.\n"
_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
# Include folders of the tree.
INCLUDES = (".", "include", "3rdparty/tvm-ffi/include", "3rdparty/tvm-ffi/3rdparty/dlpack/include")


@dataclass(frozen=True)
class SourceTree:
    """TVM's source tree: (folder in the tree, folder on disk) of each part."""

    parts: tuple[tuple[str, Path], ...]

    def files(self) -> Iterator[tuple[str, Path]]:
        """Name in the tree and path of every source, in a fixed order."""
        for name, folder in self.parts:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix in _SOURCES:
                    yield f"{name}/{path.relative_to(folder).as_posix()}", path

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """A temporary copy of the tree with our edits; sources include each other by relative paths.

        Raises CompileError.
        """
        with tempfile.TemporaryDirectory() as name:
            self.copy(Path(name), dict(self.files()))
            yield Path(name)

    def copy(self, target: Path, names: Collection[str]) -> None:
        """Copy the named files to a folder, with our edits. Raises CompileError."""
        for name, path in self.files():
            if name in names:
                copy = target / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        for name, old, new in _EDITS:
            copy = target / name
            text = copy.read_text(encoding="utf-8")
            if old not in text:
                raise CompileError("TVM's runtime has unexpected sources", where=name, expected=old, found="none")
            copy.write_text(_CHANGED + text.removeprefix(_CHANGED).replace(old, new), encoding="utf-8")

    def included(self, sources: Iterable[Path]) -> set[str]:
        """Names of the files that sources include, on any system, directly or not."""
        files = dict(self.files())
        waiting = [(path, "") for path in sources]
        found: set[str] = set()
        while waiting:
            path, folder = waiting.pop()
            for word in _INCLUDE.findall(path.read_text(encoding="utf-8")):
                names = (posixpath.normpath(posixpath.join(place, word)) for place in (folder, *INCLUDES))
                name = next((name for name in names if name in files), None)
                if name is not None and name not in found:
                    found.add(name)
                    waiting.append((files[name], posixpath.dirname(name)))
        return found

    def key(self, words: Sequence[str]) -> str:
        """Hash over the sources, our edits, and words such as the compiler's version and flags."""
        digest = hashlib.sha256()
        for word in (*words, *(word for edit in _EDITS for word in edit)):
            digest.update(word.encode() + b"\0")
        for name, path in self.files():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()[:24]


def source_tree(*others: tuple[str, Path]) -> SourceTree:
    """The runtime's sources, with `others` as further parts. Raises CompileError if the wheel lacks them."""
    package, ffi = package_folder(), Path(tvm_ffi.__file__).parent
    parts = (
        ("src/runtime", package / "src" / "runtime"),
        ("include/tvm", package / "include" / "tvm"),
        ("3rdparty/tvm-ffi/include", ffi / "include"),
        ("3rdparty/tvm-ffi/src", ffi / "src"),
        ("3rdparty/tvm-ffi/3rdparty", ffi / "3rdparty"),
        ("include/tvm/support", _SHIM / "include" / "tvm" / "support"),
        ("src/support", _SHIM / "src" / "support"),
        ("3rdparty/compiler-rt", _SHIM / "3rdparty" / "compiler-rt"),
        *others,
    )
    missing = next((folder for _, folder in parts if not folder.is_dir()), None)
    if missing is not None:
        raise CompileError(
            "the sources of TVM's runtime are missing", where=missing, next_step="install apache-tvm again"
        )
    return SourceTree(parts)


def package_folder() -> Path:
    """The folder of the package `tvm`."""
    return Path(tvm.__file__).parent


def built_once(folder: Path, names: Sequence[str], cache: Path, build: Callable[[Path], None]) -> list[Path]:
    """Files of a folder of `cache`; if one is missing, `build` makes them all in an empty folder.

    Several processes may call it at once: one builds, the others wait for it. Raises CompileError for files that
    another user may have written, and what `build` raises.
    """
    paths = [folder / name for name in names]
    if all(path.is_file() for path in paths):
        for path in paths:
            check_private(path, cache, CompileError)
        return paths
    private_folder(folder.parent)
    with FileLock(folder.with_suffix(".lock")):
        if not all(path.is_file() for path in paths):
            with atomic_directory(folder, replaces="*") as made:
                build(made)
    return paths
