"""Which kernels start while the ones before them end: those of decode, on GPUs that can."""

from __future__ import annotations

import re

import pytest
import tvm

from mlcpipe.compiler.backends.nvrtc import codegen
from mlcpipe.compiler.backends.nvrtc.nvrtc import Nvrtc
from mlcpipe.compiler.build import build_kernels
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.kernels.cases.gpu import CASES

# Case -> what the function is called in a module.
NAMED = {"few rows: activations in float16": "matmul_few", "many rows: int4": "matmul_many", "norm": "rms_norm_few"}


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    """Source by target."""
    return {name: _source(name) for name in ("cuda", "cuda-sm90")}


def _source(name: str) -> str:
    target, sources = load_target(name), []
    codegen.register(lambda source: (sources.append(source), b"no machine code")[1])
    named = {
        symbol: func.with_attr("global_symbol", symbol)
        for case, symbol in NAMED.items()
        for func in CASES[case].functions(target.schedule).values()
    }
    kernels = KernelModule(tvm.IRModule(named), tvm_target(target, compiled_variants(target)[0]))
    build_kernels(kernels, pipeline.SOURCES)
    return str(sources[0])


def _waiting(source: str) -> set[str]:
    """Functions whose kernels begin with a wait; all kernels of one do, or none."""
    kernels = re.findall(r"(\w+)_kernel\w*\([^;{]*\) \{\n(.*)\n", source)
    waiting = {name for name, first in kernels if first.strip() == "mlcpipe_wait_for_earlier();"}
    assert not waiting & {name for name, first in kernels if "wait_for_earlier" not in first}
    return waiting


def test_kernels_of_decode_wait_where_launches_overlap(generated: dict[str, str]) -> None:
    assert _waiting(generated["cuda"]) == set()
    assert _waiting(generated["cuda-sm90"]) == {"matmul_few", "rms_norm_few"}


def test_the_wait_is_code_of_hopper_alone(generated: dict[str, str], nvrtc: Nvrtc) -> None:
    source = generated["cuda-sm90"]
    for architecture, count in (("sm_89", 0), ("sm_90", source.count("mlcpipe_wait_for_earlier();"))):
        ptx = nvrtc.compile(source, architecture).ptx.decode()
        assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == count
