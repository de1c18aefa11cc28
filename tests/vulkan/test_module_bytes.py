"""Bytes of a module that are torn, hostile or of another time: refused in words, never read past their end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

from mlcpipe.devices import vulkan
from tests.vulkan.conftest import Compiled
from tests.vulkan.gpu import download, upload
from tests.vulkan.kernels import ADD, INCREMENT, module_bytes, pack

REFUSED = "vulkan: a module that cannot be loaded: "
Header = dict[str, Any]


@pytest.fixture(scope="module")
def good(compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return module_bytes([ADD, INCREMENT], tmp_path_factory.mktemp("good"))


def load(data: bytes) -> Any:
    return tvm_ffi.get_global_func("ffi.Module.load_from_bytes.vulkan")(data)


def split(data: bytes) -> tuple[Header, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def test_a_module_is_its_bytes(good: bytes, gpu: vulkan.Device) -> None:
    module = load(good)
    assert module.kind == "vulkan"
    assert json.loads(module.inspect_source()) == split(good)[0]
    assert bytes(vulkan.function("module_bytes")(module)) == good
    tensor = upload(np.zeros(4, np.int32))
    module["increment"](tensor, 4, 1, 64)
    assert download(tensor).tolist() == [1] * 4
    with pytest.raises(AttributeError):
        module["absent"]


def kernel_field(name: str, value: Any) -> Callable[[Header], None]:
    return lambda header: header["kernels"][0].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.__setitem__("format", 2), "another format"),
        (lambda h: h.__setitem__("kernels", 5), "kernels is no list"),
        (lambda h: h["kernels"].append(5), "a kernel is no object"),
        (lambda h: h["kernels"].append(h["kernels"][0]), "two kernels have the same name"),
        (lambda h: h["kernels"][0].pop("entry"), "kernel add has no entry"),
        (kernel_field("name", ""), "name is no text"),
        (kernel_field("name", "a\0b"), "name is no text"),
        (kernel_field("entry", "other"), "no compute entry point other"),
        (kernel_field("spirv_offset", 1 << 40), "spirv_offset is no integer"),
        (kernel_field("spirv_offset", -4), "spirv_offset is no integer"),
        (kernel_field("spirv_offset", 2), "is not aligned to words"),
        (kernel_field("spirv_offset", 4), "is not SPIR-V"),
        (kernel_field("spirv_bytes", 1 << 40), "spirv_bytes is no integer"),
        (kernel_field("spirv_bytes", 0), "code is too short"),
        (kernel_field("spirv_bytes", 100), "torn"),
        (kernel_field("spirv_bytes", 5.5), "spirv_bytes is no integer"),
        (kernel_field("spirv_bytes", True), "spirv_bytes is no integer"),
        (kernel_field("push_constant_bytes", 260), "push_constant_bytes is no integer"),
        (kernel_field("push_constant_bytes", 4), "offset is no integer from 0 to 0"),
        (kernel_field("scalars", [{"arg": 3, "dtype": "int7", "offset": 0}]), "scalar of an unknown type"),
        (kernel_field("scalars", [{"arg": 2, "dtype": "int32", "offset": 0}]), "names an argument twice"),
        (kernel_field("scalars", [{"arg": 7, "dtype": "int32", "offset": 0}]), "does not name all of its arguments"),
        (kernel_field("buffers", [{"arg": i, "write": True} for i in range(65)]), "buffers is no list, or too long"),
        (kernel_field("buffers", [{"arg": 0, "write": 1}]), "write is no boolean"),
        (kernel_field("workgroup", [0, 1, 1]), "workgroup is no integer from 1"),
        (kernel_field("workgroup", [4096, 4096, 1]), "has more than 4096 threads"),
        (kernel_field("workgroup", [64]), "workgroup has not three numbers"),
        (kernel_field("launch_params", ["blockIdx.w"]), "unknown launch parameter blockIdx.w"),
        (kernel_field("launch_params", ["blockIdx.x", "blockIdx.x"]), "unknown launch parameter blockIdx.x"),
        (kernel_field("launch_params", ["tirx.use_dyn_shared_memory"]), "unknown launch parameter"),
        (kernel_field("subgroup_size", 48), "no power of two"),
        (kernel_field("features", ["timeTravel"]), "needs timeTravel, which this mlcpipe does not know"),
        (kernel_field("grid_base", {"offset": 8}), "offset is no integer"),
        (kernel_field("grid_base", 8), "grid_base is no object"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(good: bytes, change: Callable[[Header], Any], words: str) -> None:
    header, code = split(good)
    header = copy.deepcopy(header)
    change(header)
    with pytest.raises(RuntimeError, match=f"^{REFUSED}.*{words}"):
        load(pack(header, code))


def test_torn_and_foreign_bytes_are_refused(good: bytes) -> None:
    size = int.from_bytes(good[:8], "little")
    cases = [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 64, good[:100], good[: 8 + size], good[:-4], b"VKM1" + good]
    cases += [(8).to_bytes(8, "little") + b"[" * 8, (size + 8).to_bytes(8, "little") + good[8:]]
    nested = b"[" * 8_000_000
    cases += [len(nested).to_bytes(8, "little") + nested, b'{"a": ' + good]
    for data in cases:
        with pytest.raises(RuntimeError, match=f"^{REFUSED}"):
            load(data)


def test_random_damage_never_crashes(good: bytes) -> None:
    """Flipped bytes anywhere: refused, or loaded, since not every byte has to be what it is. None is run."""
    generator = np.random.default_rng(7)
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for at in generator.integers(0, len(data), generator.integers(1, 6)):
            data[at] = generator.integers(0, 256)
        try:
            load(bytes(data[: len(data) - int(generator.integers(0, 2) * generator.integers(0, 64))]))
        except RuntimeError as error:
            assert str(error).startswith(REFUSED)
            refused += 1
    assert refused > 500


def test_magic_of_spirv(good: bytes, tmp_path: Path) -> None:
    header, code = split(good)
    for at, value in ((0, 0), (4, 0x00020000), (12, 0), (12, 0xFFFFFFFF), (20, 0), (20, 0xFFFF0011)):
        data = bytearray(code)
        data[at : at + 4] = value.to_bytes(4, "little")
        with pytest.raises(RuntimeError, match=REFUSED + "kernel add: its (code|SPIR-V)"):
            load(pack(header, bytes(data)))
