"""A model's code as a shared library for Android, linked without Android's development kit."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlcpipe.compiler.link import Linker
from mlcpipe.compiler.static_library import TABLE, own_table

PAGE_BYTES = 1 << 14  # Android 15 and later may have pages of 16 KiB
# Libraries of every Android, and their functions that kernels call.
_FLOAT32 = "ceil cos erf exp floor fma fmod log log2 nearbyint pow rint round sin sqrt tanh trunc"
_SYSTEM = {
    "libc.so": ("memcpy", "memmove", "memset"),
    "libm.so": tuple(f"{name}f" for name in _FLOAT32.split()),
}


def link_android_library(static: Path, output: Path, linker: Linker) -> None:
    """Link a model's static library into the shared library `output`, which exports only its symbol table.

    Its soname contains the hash of its code, so that an app may load several. Raises CompileError for a function that
    no library of `_SYSTEM` has.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        needed = [_stand_in(folder, library, functions, linker) for library, functions in _SYSTEM.items()]
        exports = folder / "exports.map"
        exports.write_text(f"{{ global: {TABLE}; local: *; }};\n", encoding="ascii")
        soname = f"lib{own_table(static).removesuffix('_code')}.so"
        linker.run(
            [
                *("-shared", "-nostdlib", "-Wl,-s", "-Wl,-z,defs", "-Wl,-z,now", f"-Wl,-z,max-page-size={PAGE_BYTES}"),
                *(f"-Wl,-soname,{soname}", f"-Wl,--version-script={exports}"),
                *("-Wl,--whole-archive", str(static), "-Wl,--no-whole-archive", "-Wl,--as-needed"),
                *map(str, needed),
                *("-o", str(output)),
            ]
        )


def _stand_in(folder: Path, library: str, functions: tuple[str, ...], linker: Linker) -> Path:
    """A library with the name and functions of one of the system's, for the linker."""
    source = folder / f"{library}.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in functions), encoding="ascii")
    flags = ["-shared", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library}"]
    linker.run([*flags, str(source), "-o", str(folder / library)])
    return folder / library
