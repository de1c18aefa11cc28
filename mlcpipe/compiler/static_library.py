"""A library's code as a static library, for programs and apps that load no code: nothing registers itself.

Its table gives the address of each symbol that a loader of shared libraries would look up, so the native runtime
(`mlcpipe/native/runtime`) handles either kind the same way. It has no constructors, which a linker may drop. All
symbols begin with a prefix from a hash of the code, so that a program may contain several models and name the table of
each. A program with one model finds it as `TABLE`.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.link import Linker, export_objects, imports_object
from mlcpipe.compiler.object_symbols import defined_symbols, is_riscv, write_renamed
from mlcpipe.errors import CompileError
from mlcpipe.support.generated import word
from mlcpipe.support.resources import native_path

TABLE = "mlcpipe_library_symbols"
_PREFIX = "mlcpipe_{hash}_"
_OWN_TABLE = re.compile(rb"mlcpipe_[0-9a-f]{16}_code\b")
_ERRORS = native_path() / "kernel_errors.c"
_BINARY = "__tvm_ffi__library_bin"
_FUNCTION = "__tvm_ffi_"  # prefix of the functions of compiled code
# Variables that TVM's loader sets to its own functions if the code calls them (tvm/src/runtime/module.cc).
_CONTEXT = (
    "__tvm_ffi__library_ctx",
    "__TVMFFIFunctionCall",
    "__TVMFFIErrorSetRaisedFromCStr",
    "__TVMFFIErrorSetRaisedFromCStrParts",
    "__TVMFFIEnvModLookupFromImports",
    "__TVMFFIHandleInitOnce",
    "__TVMBackendAllocWorkspace",
    "__TVMBackendFreeWorkspace",
    "__TVMBackendParallelLaunch",
    "__TVMBackendParallelBarrier",
)
# Conversions of float16 that every object file defines weakly. On RISC-V they read a half from the wrong register;
# those of the native runtime's pool.c replace them and must keep their names.
_HALVES = frozenset({"__extendhfsf2", "__truncsfhf2"})


def write_static_library(
    module: Any, built: Sequence[BuiltVariant], output: Path, compiler: Linker, archiver: Linker, target: Any
) -> None:
    """Write a module of compiled Relax executables as a static library, the last variant's code first.

    `compiler` makes object files of C for the TVM target. Raises CompileError.
    """
    names = {name for variant in built for name in variant.symbols}
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for variant in reversed(built) for path in variant.paths]
        _archive([*paths, imports_object(module, Path(folder), target)], names, output, compiler, archiver)


def write_static_device_library(module: Any, output: Path, compiler: Linker, archiver: Linker, triple: str) -> None:
    """Write a module of host code and device kernels as such a static library. Raises CompileError."""

    def archive(paths: Sequence[Path]) -> None:
        names = {name for path in paths for name in defined_symbols(path) if name.startswith(_FUNCTION)}
        _archive(paths, names, output, compiler, archiver)

    export_objects(module, archive, triple)


def _archive(objects: Sequence[Path], names: set[str], output: Path, compiler: Linker, archiver: Linker) -> None:
    """Archive object files with a table of their symbols `names` and TVM's variables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [*objects, folder / "errors.o"]
        compiler.compile(_ERRORS, paths[-1])
        prefix, copies = with_prefix(paths, folder)
        context = {name for path in paths for name in defined_symbols(path)} & set(_CONTEXT)
        source, table = folder / "symbols.c", folder / "symbols.o"
        source.write_text(table_source(names | context, prefix), encoding="utf-8")
        compiler.compile(source, table)
        archiver.archive([*copies, table], output)


def with_prefix(paths: Sequence[Path], folder: Path) -> tuple[str, list[Path]]:
    """The prefix for the code in object files, and copies of them whose exported names begin with it.

    Names that several files define, such as float16 conversions in the instructions of their variant, stay separate:
    the first file's has the plain prefix. Only TVM's variables are shared; names that the native runtime replaces are
    kept.
    """
    digest = hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in paths))
    prefix = _PREFIX.format(hash=digest.hexdigest()[:16])
    defined = [defined_symbols(path) - (_HALVES if is_riscv(path) else set()) for path in paths]
    first = {name: number for number in reversed(range(len(paths))) for name in defined[number]}
    copies = []
    for number, path in enumerate(paths):
        again = {name for name in defined[number] if first[name] != number} - set(_CONTEXT)
        renamed = {name: prefix + name for name in first} | {name: f"{prefix}{number}_{name}" for name in again}
        copies.append(folder / f"{number}-{path.name}")
        write_renamed(path, copies[-1], renamed)
    return prefix, copies


def own_table(library: Path) -> str:
    """The name of a static library's own table. Raises CompileError for a library without one."""
    found = set(_OWN_TABLE.findall(library.read_bytes()))
    if len(found) != 1:
        raise CompileError("no static library of mlcpipe", where=library, next_step="compile the model again")
    return str(found.pop().decode())


def table_source(symbols: Iterable[str], prefix: str) -> str:
    """C that defines the table of symbols that begin with `prefix`, and `TABLE` as a weak alias of it
    if the system's linker supports that.

    It has names without the prefix and addresses, in the order of the names' bytes, then two null pointers.
    """
    names, own = sorted(word(name, ".c") for name in {_BINARY, *symbols}), f"{prefix}code"
    declared = (f"extern char {prefix}{name}[];" for name in names)
    rows = (f'  {{"{name}", {prefix}{name}}},' for name in names)
    struct = f"const struct symbol {{ const char* name; void* address; }} {own}[] = {{"
    alias = f'extern const struct symbol {TABLE}[{len(names) + 1}] __attribute__((weak, alias("{own}")));'
    return "\n".join([*declared, struct, *rows, "  {0, 0},", "};", "#if !defined(__APPLE__)", alias, "#endif", ""])
