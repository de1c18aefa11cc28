"""A library's code as a static library, for programs and apps that load no code: nothing registers itself.

A table in it says where each symbol is that a loader of shared libraries would look up, so that the native runtime
(`mlcpipe/native/runtime`) takes either kind the same way. No constructor runs that a linker may drop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlcpipe.compiler.build import BuiltVariant
from mlcpipe.compiler.link import Linker, imports_object

TABLE = "mlcpipe_library_symbols"
_BINARY = "__tvm_ffi__library_bin"
# Variables that TVM's loader fills with its own functions, where code calls them (tvm/src/runtime/module.cc).
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


def write_static_library(
    module: Any, built: Sequence[BuiltVariant], output: Path, compiler: Linker, archiver: Linker, target: Any
) -> None:
    """Write a module of compiled Relax executables as a static library, the last variant's code first.

    `compiler` makes object files of C for the TVM target. Raises CompileError.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, table = Path(folder, "symbols.c"), Path(folder, "symbols.o")
        source.write_text(table_source(name for variant in built for name in variant.symbols), encoding="utf-8")
        compiler.compile(source, table)
        objects = [path for variant in reversed(built) for path in variant.paths]
        archiver.archive([*objects, imports_object(module, Path(folder), target), table], output)


def table_source(symbols: Iterable[str]) -> str:
    """C that defines `TABLE`: names and addresses in the order of the names' bytes, then two null pointers."""
    strong = {_BINARY, *symbols}
    names = sorted(strong | set(_CONTEXT))
    declared = (f"extern char {name}[]{'' if name in strong else ' __attribute__((weak))'};" for name in names)
    rows = (f'  {{"{name}", {name}}},' for name in names)
    struct = f"const struct {{ const char* name; void* address; }} {TABLE}[] = {{"
    return "\n".join([*declared, struct, *rows, "  {0, 0},", "};", ""])
