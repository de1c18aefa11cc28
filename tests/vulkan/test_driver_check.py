"""The check of drivers: it passes on this one, is quick, is not run twice, and sees wrong numbers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.devices import vulkan
from mlcpipe.devices.support import driver_check
from mlcpipe.errors import TargetError
from tests.vulkan.gpu import assign, download


def compiled(gpu: vulkan.Device) -> Any:
    import tvm
    from tvm.target import Target

    from mlcpipe.compiler import driver_check as kernels
    from mlcpipe.compiler.backends.spirv import codegen as build

    build.register()
    target = Target({"kind": "vulkan", "max_num_threads": 256, "max_shared_memory_per_block": 16384}, host="llvm")
    float16 = {"shaderFloat16", "storageBuffer16BitAccess"} <= gpu.features
    functions = kernels.functions(target, float16=float16)
    names = {driver_check.PREFIX + case.name for case in driver_check.cases()}
    assert set(functions) == names - {"driver_check_matrices"} - (set() if float16 else {"driver_check_halves"})
    return tvm.compile(tvm.IRModule(functions), target=target).mod


@pytest.fixture(scope="module")
def library(gpu: vulkan.Device) -> Any:
    return compiled(gpu)


def test_this_driver_passes_once_and_quickly(
    library: Any, gpu: vulkan.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path))
    begun = time.process_time()
    assert driver_check.check(library, gpu)
    seconds, begun = time.process_time() - begun, time.process_time()
    compiled(gpu)
    assert seconds < 5 * (time.process_time() - begun), seconds  # both take 0.2 s
    assert not driver_check.check(library, gpu)


class Without:
    """A library of a target without float16, as tvm_ffi says it."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def get_function(self, name: str, query_imports: bool) -> Any:
        if name == driver_check.PREFIX + "halves":
            raise AttributeError(f"Module has no function '{name}'")
        return self.library.get_function(name, query_imports=query_imports)


def test_a_library_without_halves_leaves_them_to_the_next(
    library: Any, gpu: vulkan.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if "shaderFloat16" not in gpu.features:
        pytest.skip("this device has no float16")
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path))
    assert [driver_check.check(one, gpu) for one in (Without(library), Without(library), library)] == [
        True,
        False,
        True,
    ]


class Wrong:
    """A library one of whose kernels is off by one number."""

    def __init__(self, library: Any, name: str, value: float) -> None:
        self.library, self.name, self.value = library, driver_check.PREFIX + name, value

    def get_function(self, name: str, query_imports: bool) -> Any:
        right = self.library.get_function(name, query_imports=query_imports)
        if name != self.name:
            return right

        def wrong(*tensors: Any) -> None:
            right(*tensors)
            numbers = download(tensors[-1])
            numbers.flat[3] = self.value
            assign(tensors[-1], numbers)

        return wrong


@pytest.mark.parametrize(("name", "value"), [("sums", np.nan), ("integers", 100), ("arithmetic", 7.5)])
def test_a_driver_with_wrong_numbers_is_refused(
    library: Any, gpu: vulkan.Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: float
) -> None:
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path))
    for _ in range(2):  # what failed is not kept
        with pytest.raises(TargetError, match=f"computes wrong numbers in the driver check {name}; .* 1 of "):
            driver_check.check(Wrong(library, name, value), gpu)
