"""TVM's runtime for browsers as WebAssembly objects: built once from the wheel's sources, then cached.

The wheel ships the sources without some headers; `mlcpipe/native/tvm_shim` has ours. The objects do not depend on
the model, so the user's cache stores them under a hash of their inputs.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm
import tvm_ffi
from filelock import FileLock

from mlcpipe.atomic import atomic_directory
from mlcpipe.compiler.backends.wasm.emscripten import Emscripten
from mlcpipe.errors import CompileError
from mlcpipe.private import check_private, private_folder
from mlcpipe.progress import Progress
from mlcpipe.resources import native_path

_UNITS = ("webgpu_runtime", "tvmjs_support", "wasm_runtime")
_SHIM = native_path() / "tvm_shim"
_FLAGS = ("-O2", "-std=c++17", "-Wno-ignored-attributes", "-c")
_INCLUDES = (
    "..",
    "../include",
    "../3rdparty/tvm-ffi/include",
    "../3rdparty/tvm-ffi/3rdparty/dlpack/include",
)
_SOURCES = (".h", ".cc", ".hpp", ".c")
_FFI = "3rdparty/tvm-ffi/include/tvm/ffi"
# These edits shrink a library from 4.1 to 2.9 MB at the same speed (1.85 ms of host time per token, demo model, Node
# 20, 2026-11). The compiler decides what to inline, and functions do not describe their types: no browser asks for it.
_EDITS: tuple[tuple[str, str, str], ...] = (
    (f"{_FFI}/base_details.h", "#define TVM_FFI_INLINE [[gnu::always_inline]] inline", "#define TVM_FFI_INLINE inline"),
    (f"{_FFI}/reflection/registry.h", "FuncInfo::TypeSchema()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchema<T>::v()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchemaImpl<Function>::v()", "std::string()"),
)


@dataclass(frozen=True)
class _Tree:
    """TVM's source tree: (folder in the tree, folder on disk) of each part."""

    parts: tuple[tuple[str, Path], ...]

    def files(self) -> Iterator[tuple[str, Path]]:
        """Name in the tree and path of every source, in a fixed order."""
        for name, folder in self.parts:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix in _SOURCES:
                    yield f"{name}/{path.relative_to(folder).as_posix()}", path

    def copy(self, target: Path) -> None:
        """Copy the tree and apply our edits; sources include each other by relative paths. Raises CompileError."""
        for name, path in self.files():
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        for name, old, new in _EDITS:
            copy = target / name
            text = copy.read_text(encoding="utf-8")
            if old not in text:
                raise CompileError("TVM's runtime has unexpected sources", where=name, expected=old, found="none")
            copy.write_text(text.replace(old, new), encoding="utf-8")


def _tree() -> _Tree:
    package, ffi = Path(tvm.__file__).parent, Path(tvm_ffi.__file__).parent
    parts = (
        ("web/emcc", package / "web" / "emcc"),
        ("src/runtime", package / "src" / "runtime"),
        ("include/tvm", package / "include" / "tvm"),
        ("3rdparty/tvm-ffi/include", ffi / "include"),
        ("3rdparty/tvm-ffi/src", ffi / "src"),
        ("3rdparty/tvm-ffi/3rdparty", ffi / "3rdparty"),
        ("include/tvm/support", _SHIM / "include" / "tvm" / "support"),
        ("src/support", _SHIM / "src" / "support"),
        ("3rdparty/compiler-rt", _SHIM / "3rdparty" / "compiler-rt"),
    )
    missing = next((folder for _, folder in parts if not folder.is_dir()), None)
    if missing is not None:
        raise CompileError(
            "the sources of TVM's runtime are missing", where=missing, next_step="install apache-tvm again"
        )
    return _Tree(parts)


def runtime_objects(emcc: Emscripten, cache: Path, progress: Progress) -> Sequence[Path]:
    """The runtime's objects, from `cache` or newly built (one minute on one core).

    Raises CompileError with emcc's error, or if the wheel lacks the sources.
    """
    tree = _tree()
    folder = cache / "wasm_runtime" / _key(emcc, tree)
    objects = [folder / f"{unit}.o" for unit in _UNITS]
    if all(path.is_file() for path in objects):
        for path in objects:
            check_private(path, cache, CompileError)
        return objects
    private_folder(folder.parent)
    with FileLock(folder.with_suffix(".lock")):
        if not all(path.is_file() for path in objects):
            _build(emcc, tree, folder, progress)
    return objects


def _build(emcc: Emscripten, tree: _Tree, folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as work, atomic_directory(folder, replaces="*.o") as made:
        tree.copy(Path(work))
        includes = [f"-I{path}" for path in _INCLUDES]
        for index, unit in enumerate(_UNITS):
            progress.stage(f"build the browser's runtime, once: part {index + 1} of {len(_UNITS)}")
            arguments = [*includes, *_FLAGS, f"emcc/{unit}.cc", "-o", str(made / f"{unit}.o")]
            emcc.run(arguments, Path(work) / "web")


def _key(emcc: Emscripten, tree: _Tree) -> str:
    """Hash over compiler, flags and sources."""
    digest = hashlib.sha256()
    for word in (emcc.version, *_FLAGS, *_INCLUDES, *_UNITS, *(word for edit in _EDITS for word in edit)):
        digest.update(word.encode() + b"\0")
    for name, path in tree.files():
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]
