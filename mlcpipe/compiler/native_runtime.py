"""The native runtime, which runs bundles without Python: compiled from our sources and TVM's, and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mlcpipe.bundle.manifest import FORMAT_VERSION, abi_hash
from mlcpipe.compiler.link import POOL, Linker
from mlcpipe.compiler.tvm_sources import INCLUDES, SourceTree, built_once, source_tree
from mlcpipe.resources import native_path

LIBRARY, ARCHIVE = "libmlcpipe.so", "libmlcpipe.a"
_FOLDER = native_path() / "runtime"
_SECTIONS = ("-ffunction-sections", "-fdata-sections", "-fvisibility=hidden")
_C = ("-O2", "-fPIC", *_SECTIONS, "-DMLCPIPE_RUNTIME", "-c")
# TVM's functions are nobody else's: two runtimes in one process do not meet. musl's headers do not name the order.
_TVM = (
    "-DTVM_FFI_DLL=",
    "-DTVM_FFI_DLL_EXPORT=",
    "-DTVM_DLL=",
    "-DTVM_RUNTIME_DLL=",
    "-DTVM_FFI_CMAKE_LITTLE_ENDIAN=1",
)
_CXX = ("-std=c++17", "-Os", "-DNDEBUG", "-g0", "-fPIC", *_SECTIONS, "-fvisibility-inlines-hidden", *_TVM, "-c")
_LINK = ("-shared", "-pthread", "-Wl,--gc-sections", "-Wl,-s", f"-Wl,--version-script={_FOLDER / 'exports.map'}")


def shared_library(compiler: Linker, cache: Path) -> Path:
    """The runtime as a shared library, from `cache` or newly built (a minute on one core).

    Raises CompileError with the compiler's error, or if the wheel lacks the sources.
    """
    tree = source_tree()
    tvm = _tvm_object(compiler, cache, tree)
    folder = cache / "native" / f"{LIBRARY}-{_key(compiler, tvm.parent.name)}"
    return built_once(folder, [LIBRARY], cache, partial(_link, compiler, tree, tvm))[0]


def _tvm_object(compiler: Linker, cache: Path, tree: SourceTree) -> Path:
    """TVM's runtime, which changes seldom, and takes most of the time."""
    source = (_FOLDER / "tvm.cc").read_text(encoding="utf-8")
    folder = cache / "native" / f"tvm-{tree.key((*compiler.command, compiler.version, *_CXX, *INCLUDES, source))}"

    def build(made: Path) -> None:
        with tree.copied() as copy:
            compiler.run([*_CXX, "-w", *_includes(copy), str(_FOLDER / "tvm.cc"), "-o", str(made / "tvm.o")])

    return built_once(folder, ["tvm.o"], cache, build)[0]


def _link(compiler: Linker, tree: SourceTree, tvm: Path, made: Path) -> None:
    with tree.copied() as copy:
        objects = _own_objects(compiler, copy)
        compiler.run([*_LINK, str(tvm), *map(str, objects), "-o", str(made / LIBRARY), "-ldl"])


def _own_objects(compiler: Linker, copy: Path) -> list[Path]:
    """Our part of the runtime, compiled in a copy of TVM's tree."""
    core, pool = copy / "runtime.o", copy / "pool.o"
    defines = [f'-DMLCPIPE_ABI="{abi_hash()}"', f"-DMLCPIPE_FORMAT_VERSION={FORMAT_VERSION}"]
    system = [word.replace("-I", "-isystem") for word in _includes(copy)]
    compiler.run([*_CXX, "-Wall", "-Wextra", *defines, *system, str(_FOLDER / "runtime.cc"), "-o", str(core)])
    # The C compiler of a C++ compiler's driver
    compiler.run(["-x", "c", "-std=gnu11", *_C, str(POOL), "-o", str(pool)])
    return [core, pool]


def _includes(tree: Path) -> list[str]:
    return [f"-I{tree / name}" for name in INCLUDES]


def _key(compiler: Linker, tvm: str) -> str:
    """Hash over our sources, flags and what they are compiled with."""
    digest = hashlib.sha256()
    words: Sequence[str] = (*compiler.command, compiler.version, *_CXX, *_C, *_LINK, tvm, abi_hash())
    for word in words:
        digest.update(word.encode() + b"\0")
    for path in sorted([*_FOLDER.rglob("*.h"), *_FOLDER.rglob("*.cc"), POOL]):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]
