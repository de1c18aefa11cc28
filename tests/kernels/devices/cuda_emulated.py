"""The emulated CUDA device: all cases in one library, which another process loads and calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mlcpipe.compiler.backends.nvrtc import codegen
from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from mlcpipe.compiler.build import build_kernels
from mlcpipe.compiler.link import export_device_library, find_linker
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import load_target, triple
from tests.cuda import emulation
from tests.kernels.cases.gpu import CASES
from tests.kernels.cases.gpu.case import Array, Call
from tests.kernels.devices.run import error_of

TARGET = load_target("cuda")


def errors(names: Iterable[str], nvrtc: Nvrtc, folder: Path) -> Mapping[str, str]:
    """The error of each case, "" if there is none."""
    functions: dict[str, tirx.PrimFunc] = {}
    calls: dict[str, list[tuple[str, Call]]] = {}
    for number, name in enumerate(names):
        case = CASES[name]
        functions |= {f"case{number}_{key}": func for key, func in case.functions(TARGET.schedule).items()}
        calls[name] = [(f"case{number}_{call.function}", call) for call in case.calls()]
    library = folder / "functions.so"
    _compile(functions, library, folder)
    flat = [one for some in calls.values() for one in some]
    job = {
        "library": library,
        "calls": [[symbol, _stored(call, folder / f"call{i}")] for i, (symbol, call) in enumerate(flat)],
    }
    (made,) = emulation.run_engines(emulation.build_driver(folder, nvrtc), [job], folder)
    found: dict[int, list[Array]] = {}
    for key, array in made.items():  # "<call>.<tensor>"
        found.setdefault(int(key.split(".")[0]), []).append(array)
    after = iter(found[i] for i in range(len(flat)))
    return {name: _first_error([(call, next(after)) for _, call in some]) for name, some in calls.items()}


def _first_error(calls: list[tuple[Call, list[Array]]]) -> str:
    messages = (error_of(lambda call=call, found=found: call.check(found)) for call, found in calls)  # type: ignore[misc]
    return next(filter(None, messages), "")


def _compile(functions: Mapping[str, tirx.PrimFunc], library: Path, folder: Path) -> None:
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    codegen.register(lambda source: emulation.compile_kernels(source, folder))
    kernels = KernelModule(tvm.IRModule(named), tvm.target.Target(dict(TARGET.tvm)))
    module = build_kernels(kernels, pipeline.SOURCES)
    export_device_library(module, library, find_linker(), triple(TARGET), codegen.mark_compiled)


def _stored(call: Call, path: Path) -> Any:
    np.savez(path.with_suffix(".npz"), **{f"{i:02}": np.asarray(a) for i, a in enumerate(call.args)})
    return str(path.with_suffix(".npz"))
