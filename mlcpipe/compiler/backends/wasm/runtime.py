"""TVM's runtime for browsers as WebAssembly objects: built once from the wheel's sources, then cached.

The objects do not depend on the model, so the user's cache stores them under a hash of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlcpipe.compiler.backends.wasm.emscripten import Emscripten
from mlcpipe.compiler.tvm_sources import INCLUDES, SourceTree, built_once, package_folder, source_tree
from mlcpipe.support.progress import Progress

_UNITS = ("webgpu_runtime", "tvmjs_support", "wasm_runtime")
_FLAGS = ("-O2", "-std=c++17", "-Wno-ignored-attributes", "-c")


def runtime_objects(emcc: Emscripten, cache: Path, progress: Progress) -> Sequence[Path]:
    """The runtime's objects, from `cache` or newly built (one to three minutes on one core).

    Raises CompileError with emcc's error, or if the wheel lacks the sources.
    """
    tree = source_tree(("web/emcc", package_folder() / "web" / "emcc"))
    folder = cache / "wasm_runtime" / tree.key((emcc.version, *_FLAGS, *INCLUDES, *_UNITS))
    names = [f"{unit}.o" for unit in _UNITS]
    return built_once(folder, names, cache, lambda made: _build(emcc, tree, made, progress))


def _build(emcc: Emscripten, tree: SourceTree, made: Path, progress: Progress) -> None:
    progress.note("the browser's runtime is built once: that takes one to three minutes")
    with tree.copied() as copy:
        includes = [f"-I../{path}" for path in INCLUDES]
        for index, unit in enumerate(_UNITS):
            progress.stage(f"build the browser's runtime: part {index + 1} of {len(_UNITS)}")
            arguments = [*includes, *_FLAGS, f"emcc/{unit}.cc", "-o", str(made / f"{unit}.o")]
            emcc.run(arguments, copy / "web")
