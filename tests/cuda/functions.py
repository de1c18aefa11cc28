"""Single PrimFuncs as libraries for the emulated device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import tirx

from mlcpipe.compiler.cuda import build
from mlcpipe.compiler.device_kernels import build_kernels
from mlcpipe.compiler.library import own_barriers
from mlcpipe.compiler.link import export_device_library, find_linker
from mlcpipe.targets import load_target, triple

from . import emulation

Array = NDArray[Any]
Call = tuple[tirx.PrimFunc, tuple[Array | float, ...]]


def job(functions: Mapping[str, Call], folder: Path) -> dict[str, Any]:
    """What `emulation.run_engines` takes: it calls each function and gives its tensors back as `<name>.<i>`."""
    folder.mkdir()
    target = load_target("cuda")
    named = {name: func.with_attr("global_symbol", name) for name, (func, _) in functions.items()}
    build.register(lambda source: emulation.compile_kernels(source, folder))
    with own_barriers():
        module = build_kernels(tvm.IRModule(named), tvm.target.Target(dict(target.tvm)))
    library = folder / "functions.so"
    export_device_library(module, library, find_linker(), triple(target), build.mark_compiled)
    calls = {name: folder / f"{name}.npz" for name in functions}
    for name, (_, arguments) in functions.items():
        np.savez(calls[name], **{f"{i:02}": np.asarray(a) for i, a in enumerate(arguments)})
    return {"library": library, "calls": {name: str(path) for name, path in calls.items()}}
