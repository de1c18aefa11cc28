"""The native runtime, which runs bundles without Python: compiled from our sources and TVM's, and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlcpipe.bundle.manifest import FORMAT_VERSION, abi_hash
from mlcpipe.compiler.link import POOL, Linker
from mlcpipe.compiler.tvm_sources import INCLUDES, SourceTree, built_once, source_tree
from mlcpipe.support.generated import filled
from mlcpipe.support.progress import Progress, SilentProgress
from mlcpipe.support.resources import native_path

LIBRARY = "libmlcpipe.so"
RUNTIME_SOURCES = native_path() / "runtime"
_TEXT = sorted((RUNTIME_SOURCES / "text").glob("*.cc"))
_CLI = sorted((RUNTIME_SOURCES / "cli").glob("*.cc"))
_GPUS, _PLUGIN = "gpus.o", "plugin.o"
_PARTS = ("runtime.o", "pool.o", *(f"{path.stem}.o" for path in (*_TEXT, *_CLI)))  # the same on every device
_SECTIONS = ("-ffunction-sections", "-fdata-sections", "-fvisibility=hidden")
_C = ("-O2", "-fPIC", *_SECTIONS, "-DMLCPIPE_RUNTIME", "-c")
# TVM's functions are hidden, so that two runtimes in one process do not clash. musl's headers lack the byte order.
_TVM = (
    "-DTVM_FFI_DLL=",
    "-DTVM_FFI_DLL_EXPORT=",
    "-DTVM_DLL=",
    "-DTVM_RUNTIME_DLL=",
    "-DTVM_FFI_CMAKE_LITTLE_ENDIAN=1",
)
_CXX = ("-std=c++17", "-Os", "-DNDEBUG", "-g0", "-fPIC", *_SECTIONS, "-fvisibility-inlines-hidden", *_TVM, "-c")
_LICENSES = """.section .rodata
.globl mlcpipe_licenses
mlcpipe_licenses: .incbin "@NAME@"
.byte 0
.section .note.GNU-stack,"",%progbits
"""
_WARNINGS = ("-Wall", "-Wextra")
_STRIPPED = ("-pthread", "-Wl,--gc-sections", "-Wl,-s")
_SHARED = ("-shared", *_STRIPPED, f"-Wl,--version-script={RUNTIME_SOURCES / 'exports.map'}")


@dataclass(frozen=True)
class DevicePlugin:
    """Additional sources for a kind of device: `unit` includes all others of its folder.

    `definition` is the macro that enables it, `standard` that of C++, `headers` a folder with the device's headers.
    """

    unit: Path
    definition: str
    standard: str
    headers: Path

    def sources(self) -> list[Path]:
        """Its sources without headers."""
        return sorted([*self.unit.parent.glob("*.h"), *self.unit.parent.glob("*.cc")])


def shared_library(compiler: Linker, cache: Path, plugin: DevicePlugin | None = None) -> Path:
    """The runtime as a shared library, from `cache` or newly built (a minute on one core).

    Raises CompileError with the compiler's error, or if the wheel lacks the sources.
    """
    objects = object_files(compiler, cache, plugin)

    def build(made: Path) -> None:
        compiler.run([*_SHARED, *map(str, objects), "-o", str(made / LIBRARY), "-ldl"])

    return built_once(objects[-1].parent.with_suffix(".so"), [LIBRARY], cache, build)[0]


def definitions() -> list[str]:
    """Macros that the runtime's sources of C++ are compiled with, as a compiler's options."""
    return [*_TVM, f'-DMLCPIPE_ABI="{abi_hash()}"', f"-DMLCPIPE_FORMAT_VERSION={FORMAT_VERSION}"]


def macros() -> dict[str, str]:
    """`definitions` by name, with values as `generated.Value` has them."""
    options = (option.removeprefix("-D").partition("=") for option in definitions())
    return {name: value.strip('"') for name, _, value in options}


def compile_core(compiler: Linker, tree: Path, source: Path, output: str, *flags: str) -> None:
    """Compile runtime.cc, or another unit with TVM's headers, in a copy of TVM's sources. Raises CompileError."""
    system = (word.replace("-I", "-isystem") for word in _includes(tree))
    words = [f"-I{RUNTIME_SOURCES}", *definitions(), *flags, *system]
    compiler.run([*_CXX, *_WARNINGS, *words, str(source), "-o", output])


def library_sources() -> list[Path]:
    """Our sources and headers of the runtime, without its command line and thread pool."""
    files = (path for suffix in ("h", "cc", "map") for path in RUNTIME_SOURCES.rglob(f"*.{suffix}"))
    return sorted(path for path in files if path.parent.name != "cli")


def object_files(compiler: Linker, cache: Path, plugin: DevicePlugin | None = None) -> list[Path]:
    """The runtime's object files, from `cache` or newly built, for other programs. Raises CompileError."""
    tvm, own = _objects(compiler, cache, plugin)
    programs = {f"{path.stem}.o" for path in _CLI}
    return [tvm, *(path for path in own if path.name not in programs)]


def write_program(
    compiler: Linker,
    cache: Path,
    code: Path | None,
    output: Path,
    licenses: Path | None = None,
    plugin: DevicePlugin | None = None,
    progress: Progress = SilentProgress(),
) -> None:
    """Write the runtime's command line as a program, with the static library `code` of a bundle or to load bundles.

    With code it is static and needs only the system's kernel, so it loads no plugin. `licenses` is the text of
    --licenses. Raises CompileError.
    """
    tvm, own = _objects(compiler, cache, plugin, progress)
    words = ["-rdynamic", "-ldl"] if code is None else ["-static", "-Wl,-u,mlcpipe_library_symbols", str(code), "-lm"]
    if licenses is not None:
        source = licenses.with_suffix(".S")
        source.write_text(filled(_LICENSES, {"NAME": licenses.name}, source.suffix), encoding="utf-8")
        own, words = [*own, source], [*words, f"-I{licenses.parent}"]
    compiler.run([*_STRIPPED, str(tvm), *map(str, own), *words, "-o", str(output)])


def _objects(
    compiler: Linker, cache: Path, plugin: DevicePlugin | None, progress: Progress = SilentProgress()
) -> tuple[Path, list[Path]]:
    """TVM's runtime, which rarely changes and takes most of the time, and our objects."""
    tree, command = source_tree(), (*compiler.command, compiler.version)
    source = (RUNTIME_SOURCES / "tvm.cc").read_text(encoding="utf-8")
    key = tree.key((*command, *_CXX, *INCLUDES, source))

    def build(made: Path) -> None:
        progress.note("the runtime is compiled once for an architecture: that takes two minutes or more")
        progress.stage("compile TVM's part of the runtime")
        with tree.copied() as copy:
            compiler.run([*_CXX, "-w", *_includes(copy), str(RUNTIME_SOURCES / "tvm.cc"), "-o", str(made / "tvm.o")])

    tvm = built_once(cache / "native" / f"tvm-{key}", ["tvm.o"], cache, build)[0]
    gpus = cache / "native" / f"runtime-{_key((*command, key), plugin)}"
    parts = cache / "native" / f"parts-{_key((*command, key), None)}"
    names = (_GPUS, _PLUGIN) if plugin else (_GPUS,)
    return tvm, [
        *built_once(parts, _PARTS, cache, partial(_compile_parts, compiler, tree, progress)),
        *built_once(gpus, names, cache, partial(_compile_gpus, compiler, tree, plugin)),
    ]


def _compile_gpus(compiler: Linker, tree: SourceTree, plugin: DevicePlugin | None, made: Path) -> None:
    """Compile the plugin, and what asks for it, in a copy of TVM's tree."""
    device = [f"-D{plugin.definition}"] if plugin else []
    with tree.copied() as copy:
        compile_core(compiler, copy, RUNTIME_SOURCES / "gpus.cc", str(made / _GPUS), *device)
        if plugin is not None:
            words = [
                "-Wno-missing-field-initializers",
                f"-std={plugin.standard}",
                *device,
                *(word.replace("-I", "-isystem") for word in _includes(copy)),
                "-isystem",
                str(plugin.headers),
            ]
            compiler.run([*_CXX, *_WARNINGS, *words, str(plugin.unit), "-o", str(made / _PLUGIN)])


def _compile_parts(compiler: Linker, tree: SourceTree, progress: Progress, made: Path) -> None:
    """Compile the model-running sources in a copy of TVM's tree, then those without TVM."""
    core, pool, *others = (str(made / name) for name in _PARTS)
    progress.stage("compile the engine")
    with tree.copied() as copy:
        compile_core(compiler, copy, RUNTIME_SOURCES / "runtime.cc", core, "-DMLCPIPE_GPUS_APART")
    progress.stage("compile tokenizer, templates and command line")
    progress.steps_total(len(_PARTS) - 1)
    for source, made_object in zip([*_TEXT, *_CLI], others):
        compiler.run([*_CXX, *_WARNINGS, f"-I{RUNTIME_SOURCES}", str(source), "-o", made_object])
        progress.advance(1)
    compiler.run(["-x", "c", "-std=gnu11", *_C, *_WARNINGS, str(POOL), "-o", pool])
    progress.advance(1)


def _includes(tree: Path) -> list[str]:
    return [f"-I{tree / name}" for name in INCLUDES]


def _key(words: Sequence[str], plugin: DevicePlugin | None) -> str:
    """Hash over our sources, flags and compiler."""
    digest = hashlib.sha256()
    for word in (*words, *_CXX, *_C, *_WARNINGS, *_SHARED, abi_hash()):
        digest.update(word.encode() + b"\0")
    sources = sorted(
        [*RUNTIME_SOURCES.rglob("*.h"), *RUNTIME_SOURCES.rglob("*.cc"), *RUNTIME_SOURCES.rglob("*.map"), POOL]
    )
    for path in [*sources, *(plugin.sources() if plugin else ())]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:24]
