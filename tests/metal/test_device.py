"""`--device metal` where there is no Mac, and what is said of one's errors. Engines on the device: `test_engine.py`."""

from __future__ import annotations

import sys

import pytest

from mlcpipe.devices import metal
from mlcpipe.errors import MlcpipeError, ResourceError, TargetError, UsageError
from mlcpipe.loading import prepare_bundle

CHIP = metal.Device(0, "Apple M2 Max", 21 << 30)


@pytest.fixture(autouse=True)
def fresh() -> None:
    metal.load.cache_clear()


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_elsewhere_the_error_says_what_it_needs() -> None:
    with pytest.raises(
        TargetError, match=r"Metal needs macOS on a Mac with Apple's chip; found \w+ \w+; .*--target cpu"
    ):
        prepare_bundle(device="metal")


@pytest.mark.skipif(sys.platform == "darwin", reason="this is a Mac")
def test_a_package_without_the_runtime_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlcpipe.devices.metal.sys.platform", "darwin")
    monkeypatch.setattr("mlcpipe.devices.metal.platform.machine", lambda: "arm64")
    with pytest.raises(TargetError, match="TVM's Metal runtime does not load; found .*tvm_runtime_metal"):
        metal.choose("metal:0")


@pytest.mark.parametrize("spec", ["metal:x", "cuda:0", "metal:-1"])
def test_other_words_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="expected metal or metal:0, metal:1"):
        metal.choose(spec)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal, "devices", lambda: (CHIP,))
    assert metal.choose("metal") is metal.choose("metal:0") is CHIP
    with pytest.raises(UsageError, match=r"there is no device metal:1; expected metal:0 Apple M2 Max"):
        metal.choose("metal:1")


@pytest.mark.parametrize(
    "name, target",
    [("Apple M2 Max", "metal-m2-max"), ("Apple M1", "metal-m1"), ("Apple M9", "metal"), ("Apple GPU", "metal")],
)
def test_a_chip_has_its_target(name: str, target: str) -> None:
    assert metal.Device(0, name, 1).best_target() == target


# What TVM's src/backend/metal/runtime raises.
@pytest.mark.parametrize(
    "text, kind",
    [
        ("Check failed: (buf != nil) is false: ", ResourceError),
        ("Failed to allocate staging buffer of size 16777216", ResourceError),
        (
            "GPUError after kernel matmul_kernel: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            ResourceError,
        ),
        ("GPUError after kernel matmul_kernel: Caused GPU Timeout Error", TargetError),
        ("Fail to compile metal source:program_source:3:1: error: unknown type name", TargetError),
    ],
)
def test_errors_of_the_runtime_are_ours(text: str, kind: type[MlcpipeError]) -> None:
    with pytest.raises(kind) as caught, metal.errors():
        raise RuntimeError(text)
    assert type(caught.value) is kind and text[-20:].strip() in str(caught.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="^something else$"), metal.errors():
        raise RuntimeError("something else")
