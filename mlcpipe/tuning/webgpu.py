"""Measuring kernels for browsers, in Node on Dawn: default and candidate of a kernel are linked into one library."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import tirx

from mlcpipe.compiler.emscripten import find_emcc
from mlcpipe.compiler.library import link_wasm, own_barriers
from mlcpipe.compiler.wasm_runtime import runtime_objects
from mlcpipe.env import env
from mlcpipe.errors import CompileError, TargetError
from mlcpipe.progress import SilentProgress
from mlcpipe.targets import Target, Variant, tvm_target
from mlcpipe.tuning.inputs import Inputs
from mlcpipe.tuning.kernels import parameters, ruled
from mlcpipe.tuning.measure import HALF_S, TOLERANCE, copies_of
from mlcpipe.tuning.pool import LineProcess
from tir_schedules.op import Declined

PACKAGES = ("webgpu", "@mlc-ai/web-runtime")
_FOLDERS = (".", "tests/webgpu")  # where Node looks for them, and above
_MOST_COPIES, _MOST_BYTES = 64, 256 << 20
_FIRST_S, _LIMIT_S = 20.0, 120.0
_DEVICE_S = 60.0
MORE_TO_COMPILE_S = 0.2  # a page waits for it before its first token, at every visit


def new_node() -> LineProcess:
    """The measuring script in Node. Raises TargetError where there is no Node."""
    node = shutil.which("node")
    if node is None:
        raise TargetError("no Node to measure WebGPU with", next_step="install Node 20 or newer")
    script = Path(__file__).with_name("webgpu.cjs")
    return LineProcess((node, str(script), *_FOLDERS), own_session=False)


def adapter_name() -> str:
    """Vendor and architecture of the adapter that Dawn takes. Raises TargetError."""
    with new_node() as node:
        found = node.ask({"do": "device"}, _DEVICE_S)
    if "error" in found:
        missing = "Cannot find module" in found["error"]
        advice = f"npm install {' '.join(PACKAGES)}" if missing else "VK_ICD_FILENAMES names a Vulkan driver"
        raise TargetError("no WebGPU to measure with", found=found["error"].splitlines()[0], next_step=advice)
    return str(found["device"])


def _answer(node: LineProcess, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What Node says to a job. Raises CompileError for an error there."""
    found = node.ask(job, limit_s)
    if "error" in found:
        raise CompileError("the candidate does not run", found=found["error"].splitlines()[0])
    return found


class WebBench:
    """One range of rows of one kernel, as `measure.Bench` has it."""

    def __init__(self, target: Target, variant: Variant, rule: str, func: tirx.PrimFunc, given: Inputs) -> None:
        self._target, self._variant, self._rule, self._func = target, variant, rule, func
        self._folder = tempfile.TemporaryDirectory(prefix="mlcpipe-tune-")
        self._args: list[dict[str, Any]] = []
        self.nbytes, self._outputs = given.nbytes, given.outputs
        for index, (value, (_, dtype)) in enumerate(zip(given.values, parameters(func))):
            if not isinstance(value, np.ndarray):
                self._args.append({"number": value, "dtype": dtype})
                continue
            path = Path(self._folder.name, f"{index}.bin")
            path.write_bytes(value.tobytes())
            self._args.append({"shape": list(value.shape), "dtype": str(value.dtype), "path": str(path)})
        self._copies = copies_of(given, _MOST_COPIES, _MOST_BYTES)

    def pairs(self, choice: Mapping[str, int], count: int) -> list[tuple[float, float]]:
        """As `measure.Bench.pairs`."""
        job = {
            "do": "load", "wasm": str(self._linked(choice)), "args": self._args, "outputs": self._outputs,
            "copies": self._copies,
        }  # fmt: skip
        with new_node() as node:  # tvmjs takes one library a process
            found = _answer(node, job, _FIRST_S)
            default, candidate = found["first"]
            if candidate > default + MORE_TO_COMPILE_S:
                raise CompileError(
                    "the candidate's shaders take too long to compile",
                    expected=f"{MORE_TO_COMPILE_S} s more than the default's {default:.2f} s",
                    found=f"{candidate:.2f} s",
                )
            for off, largest in found["apart"]:
                if not 0 <= off <= TOLERANCE * largest:
                    raise CompileError("the candidate computes something else", found=off)
            measured = _answer(node, {"do": "pairs", "count": count, "seconds": HALF_S}, _LIMIT_S)
        return [(float(default), float(candidate)) for default, candidate in measured["pairs"]]

    def _linked(self, choice: Mapping[str, int]) -> Path:
        functions = {}
        for name, knobs in (("default", {}), ("candidate", choice)):
            made = ruled(self._target, self._rule, self._func, {**self._variant.schedule, **knobs})
            if isinstance(made, Declined):
                raise CompileError("the rule declined", found=made.reason)
            functions[name] = made.with_attr("global_symbol", name)
        mod = tvm.IRModule(functions).with_attr("system_lib_prefix", "")
        try:
            with own_barriers():
                module = tirx.build(mod, target=tvm_target(self._target, self._variant))
        except (RuntimeError, ValueError, TypeError) as error:
            raise CompileError("code generation failed", found=str(error).strip().splitlines()[-1][:200]) from error
        path, emcc = Path(self._folder.name, "pair.wasm"), find_emcc()
        link_wasm(emcc, module, runtime_objects(emcc, env().cache_dir, SilentProgress()), path, "-O1")
        return path

    def close(self) -> None:
        """Remove the files."""
        self._folder.cleanup()
