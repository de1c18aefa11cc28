"""Measures browser kernels in Node on Dawn: a kernel's default and candidate are linked into one library."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mlcpipe.compiler.backends.wasm.emscripten import find_emcc
from mlcpipe.compiler.backends.wasm.link import link_wasm
from mlcpipe.compiler.backends.wasm.runtime import runtime_objects
from mlcpipe.compiler.build import build_kernels
from mlcpipe.devices.base import record_name
from mlcpipe.errors import CompileError, TargetError, first_line, last_line
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.support.env import env
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import Target, Variant, tvm_target
from mlcpipe.tuned.kernels import parameters
from mlcpipe.tuning.inputs import Inputs
from mlcpipe.tuning.measure import HALF_S, check_outputs, copies_of, scheduled
from mlcpipe.tuning.pool import LineProcess

PACKAGES = "webgpu @mlc-ai/web-runtime"
_FOLDERS = (".", "tests/webgpu")  # Node searches these folders and their parents
_MAX_COPIES, _MAX_BYTES = 64, 256 << 20
_FIRST_S, _LIMIT_S = 20.0, 120.0
_DEVICE_S = 60.0
MAX_EXTRA_COMPILE_S = 0.2  # delays a page's first token at every visit


def new_node() -> LineProcess:
    """The measuring script in Node. Raises TargetError if Node is missing."""
    node = shutil.which("node")
    if node is None:
        raise TargetError("no Node to measure WebGPU with", next_step="install Node 20 or newer")
    script = Path(__file__).with_name("node.cjs")
    return LineProcess((node, str(script), *_FOLDERS), own_session=False)


def device_name() -> str:
    """Vendor and architecture of Dawn's adapter. Raises TargetError."""
    with new_node() as node:
        answer = node.ask({"do": "device"}, _DEVICE_S)
    if "error" in answer:
        missing = "Cannot find module" in answer["error"]
        advice = f"npm install {PACKAGES}" if missing else "set VK_ICD_FILENAMES to a Vulkan driver"
        raise TargetError("no WebGPU to measure with", found=first_line(answer["error"]), next_step=advice)
    return record_name(str(answer["device"]))


def _answer(node: LineProcess, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Node's answer to a job. Raises CompileError for an error there."""
    answer = node.ask(job, limit_s)
    if "error" in answer:
        raise CompileError("the candidate does not run", found=first_line(answer["error"]))
    return answer


class Bench:
    """One row range of one kernel, like `measure.Bench`."""

    def __init__(self, target: Target, variant: Variant, rule: str, func: tirx.PrimFunc, inputs: Inputs) -> None:
        self._target, self._variant, self._rule, self._func = target, variant, rule, func
        self._folder = tempfile.TemporaryDirectory(prefix="mlcpipe-tune-")
        self._args: list[dict[str, Any]] = []
        self.nbytes, self._outputs = inputs.nbytes, inputs.outputs
        for index, (value, (_, dtype)) in enumerate(zip(inputs.values, parameters(func))):
            if not isinstance(value, np.ndarray):
                self._args.append({"number": value, "dtype": dtype})
                continue
            path = Path(self._folder.name, f"{index}.bin")
            path.write_bytes(value.tobytes())
            self._args.append({"shape": list(value.shape), "dtype": str(value.dtype), "path": str(path)})
        self._copies = copies_of(inputs, _MAX_COPIES, _MAX_BYTES)

    def pairs(self, choice: Mapping[str, int], count: int) -> list[tuple[float, float]]:
        """As `measure.Bench.pairs`."""
        job = {
            "do": "load", "wasm": str(self._linked(choice)), "args": self._args, "outputs": self._outputs,
            "copies": self._copies,
        }  # fmt: skip
        with new_node() as node:  # tvmjs takes one library per process
            answer = _answer(node, job, _FIRST_S)
            default, candidate = answer["first"]
            if candidate > default + MAX_EXTRA_COMPILE_S:
                raise CompileError(
                    "the candidate's shaders take too long to compile",
                    expected=f"{MAX_EXTRA_COMPILE_S} s more than the default's {default:.2f} s",
                    found=f"{candidate:.2f} s",
                )
            check_outputs(answer["apart"])
            measured = _answer(node, {"do": "pairs", "count": count, "seconds": HALF_S}, _LIMIT_S)
        return [(float(default), float(candidate)) for default, candidate in measured["pairs"]]

    def _linked(self, choice: Mapping[str, int]) -> Path:
        functions = {}
        for name, knobs in (("default", {}), ("candidate", choice)):
            kernel = scheduled(self._target, self._rule, self._func, {**self._variant.schedule, **knobs})
            functions[name] = kernel.with_attr("global_symbol", name)
        mod = tvm.IRModule(functions).with_attr("system_lib_prefix", "")
        try:
            module = build_kernels(KernelModule(mod, tvm_target(self._target, self._variant)))
        except (RuntimeError, ValueError, TypeError) as error:
            raise CompileError("code generation failed", found=last_line(error)) from error
        path, emcc = Path(self._folder.name, "pair.wasm"), find_emcc()
        link_wasm(emcc, module, runtime_objects(emcc, env().cache_dir, SilentProgress()), path, "-O1")
        return path

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
