"""Links a module of host code and WGSL kernels with TVM's runtime for browsers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlcpipe.compiler.backends.wasm import wgsl
from mlcpipe.compiler.backends.wasm.emscripten import Emscripten


def link_wasm(emcc: Emscripten, module: object, runtime: Sequence[Path], path: Path, level: str) -> None:
    """Write a module for kind webgpu as `path`, with the objects of TVM's runtime. Raises CompileError."""
    options = {
        "WASM_BIGINT": "1",
        "ERROR_ON_UNDEFINED_SYMBOLS": "0",  # the host defines TVMFFIWasm*
        "STANDALONE_WASM": "1",
        "ALLOW_MEMORY_GROWTH": "1",
        "TOTAL_MEMORY": "16MB",
    }

    def fcompile(target: str, files: Sequence[str], options_: object = None, **_: object) -> None:
        wgsl.finish([Path(file) for file in files])
        settings = [word for key, value in options.items() for word in ("-s", f"{key}={value}")]
        arguments = [level, "--no-entry", *settings, "-o", target, *map(str, runtime), *files]
        emcc.run(arguments, path.parent)

    fcompile.object_format = "o"  # type: ignore[attr-defined]
    module.export_library(str(path), fcompile=fcompile)  # type: ignore[attr-defined]
