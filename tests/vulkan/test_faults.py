"""Drivers that fail and devices that are other than this one: a loader of our own under the plugin (fake_loader.c)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vulkan.conftest import Start
from tests.vulkan.kernels import ADD, INCREMENT, NUMBER, Kernel, module_bytes
from tests.vulkan.watch import has_layer

CPU, DISCRETE, INTEGRATED = "4", "2", "1"


@pytest.fixture(scope="module")
def run(
    beside_fake: Start, compiled: Callable[[Sequence[Kernel]], Any], tmp_path_factory: pytest.TempPathFactory
) -> Start:
    """`run(scenario, watched=True, FAKE_...="")`: what a function of `scenario.py` found."""
    folder = tmp_path_factory.mktemp("scenario")
    module = folder / "module.bin"
    module.write_bytes(module_bytes([ADD, INCREMENT, NUMBER], folder))
    return lambda scenario, **options: beside_fake("tests.vulkan.scenario", scenario, str(module), **options)


OTHER = {"FAKE_TYPES": DISCRETE, "FAKE_HIDE": ",VK_KHR_push_descriptor,", "FAKE_CLOCK": "0"}


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["unified", "discrete-no-push-no-clock"])
def test_every_call_of_the_driver_may_run_out_of_memory(run: Start, changes: dict[str, str]) -> None:
    found = run("out_of_memory", **changes)
    assert found["calls"] > 15
    for where, words in found["messages"].items():
        assert words.startswith("vulkan: "), where
        assert ": MemoryError" in where, words
        assert "memory" in words or "no room for" in words
    seen = " ".join(found["messages"])
    for call in ("vkQueueSubmit", "vkCreateComputePipelines"):
        assert call in seen
    assert (found["counts"]["pipelines_alive"], found["counts"]["buffers_alive"]) == (0, 2 if changes else 0)


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["unified", "discrete-no-push-no-clock"])
def test_a_device_may_be_lost_in_every_call(run: Start, changes: dict[str, str]) -> None:
    found = run("lost", **changes)
    assert found["calls"] > 15
    for where, words in found["messages"].items():
        assert words.startswith("vulkan: "), where
        assert ": RuntimeError" in where
        assert "gave up the device" in words or "was lost" in words
    assert (found["counts"]["pipelines_alive"], found["counts"]["buffers_alive"]) == (0, 2 if changes else 0)


def test_opening_a_device_may_fail_in_every_call(run: Start) -> None:
    found = run("opening")
    assert found["calls"] > 15
    assert all(words.startswith("vulkan: ") and "MemoryError" in where for where, words in found["messages"].items())
    assert {where.split(":")[0] for where in found["messages"]} >= {"vkCreateDevice", "vkCreateSemaphore"}


def test_a_lost_device_is_opened_anew_and_its_tensors_say_so(run: Start) -> None:
    found = run("tensors_of_a_lost_device")
    first, *later, launch = found["errors"]
    assert "the driver of llvmpipe" in first or "gave up the device" in first
    assert all("was lost with its contents; load the model again" in words for words in later)
    assert "got a tensor of a device that was lost; load the model again" in launch
    assert found["new"] == 64


@pytest.mark.parametrize("changes", [{}, OTHER], ids=["unified", "discrete"])
def test_memory_that_ends(run: Start, changes: dict[str, str]) -> None:
    found = run("full", **changes)
    assert found["error"].startswith("vulkan: no room for 1.91 MiB more on ")
    assert "are in use here" in found["error"]
    assert 60 <= found["tensors"] <= 79


def test_a_thousand_loads_leave_nothing(run: Start) -> None:
    grown = run("cycles", watched=False)
    for name in ("buffers_alive", "pipelines_alive", "used_bytes", "blocks", "block_bytes"):
        assert grown[name] <= 0, name
    assert grown["pipelines_made"] == 1000
    assert grown["resident"] < 16 << 20


def test_the_best_device_is_the_first(run: Start) -> None:
    found = run("describe", FAKE_TYPES=f"{CPU},{INTEGRATED},{DISCRETE}")["devices"]
    assert [(d["spec"], d["kind"]) for d in found] == [
        ("vulkan:0", "discrete"),
        ("vulkan:1", "integrated"),
        ("vulkan:2", "software"),
    ]


def test_kernels_compile_where_the_system_gives_no_thread(run: Start) -> None:
    assert run("no_threads")["same"]


def test_two_devices(run: Start) -> None:
    found = run("across", FAKE_TYPES=f"{CPU},{DISCRETE}")
    assert found["kinds"] == ["discrete", "software"]
    assert found["same"]
    assert "got a tensor that lies on another device, llvmpipe" in found["error"]


@pytest.mark.parametrize("types", [CPU, f"{CPU},{DISCRETE}"], ids=["one-device", "two-devices"])
def test_threads_share_a_device(run: Start, types: str) -> None:
    found = run("threads", FAKE_TYPES=types)
    assert found["failures"] == []
    assert found["alive"] == [0, found["alive"][1]]
    assert found["alive"][1] <= 2  # staging buffers


def test_a_missing_barrier_is_an_error_under_validation(run: Start) -> None:
    if not has_layer():
        pytest.skip("needs the validation layer, Debian's vulkan-validationlayers")
    words = run("hazard")["error"]
    assert words.startswith("vulkan: validation: ")
    assert "SYNC-HAZARD" in words


def test_an_old_driver_is_listed_with_the_reason(run: Start) -> None:
    (device,) = run("describe", FAKE_VERSION=str((1 << 22) | (1 << 12)))["devices"]
    assert device["problem"] == "its driver has Vulkan 1.1, 1.2 is needed"
    assert run("once", FAKE_VERSION=str((1 << 22) | (1 << 12)))["target_error"].startswith(
        "no Vulkan device can be used; found llvmpipe"
    )


def test_without_a_loader_or_driver_there_is_a_sentence(run: Start, tmp_path: Path) -> None:
    (tmp_path / "libvulkan.so.1").write_bytes(b"no library")
    (tmp_path / "libvulkan.so").write_bytes(b"no library")
    found = run("describe", LD_LIBRARY_PATH=str(tmp_path))
    assert found["target_error"].startswith("the system has no Vulkan loader (libvulkan.so.1); ")
    found = run("describe", FAKE_REAL=str(tmp_path / "absent"))
    assert found["target_error"].startswith("libvulkan.so.1 is not a Vulkan loader; ")
    found = run("describe", watched=False, VK_ICD_FILENAMES=str(tmp_path), VK_DRIVER_FILES=str(tmp_path))
    assert found["target_error"].startswith("the system has a Vulkan loader and no driver for it; ")


@pytest.mark.alone
def test_a_launch_costs_the_host_little(run: Start) -> None:
    """Time of the calling thread, TVM's call and the driver's recording included, next to a call from Python."""
    for changes in ({}, {"FAKE_HIDE": ",VK_KHR_push_descriptor,"}):
        cost = run("host_cost", watched=False, FAKE_IDLE="1", **changes)
        assert cost["call"] < cost["python"]  # of no workgroups: nothing is recorded
        assert max(cost["dependent"], cost["independent"]) < 15 * cost["python"], cost


def test_compiled_kernels_are_kept_on_the_disk(run: Start, plugin: Path, tmp_path: Path) -> None:
    """The next process finds them; a torn file is passed over and written again; no folder is no error."""
    folder = tmp_path / "vulkan"
    folder.mkdir()
    shutil.copy2(plugin, folder)
    cache = {"MLCPIPE_CACHE": str(tmp_path)}
    first = run("once", **cache)
    assert (first["counts"]["cache_loaded"], first["problem"]) == (0, "")
    (file,) = folder.glob("pipelines-*.bin")
    assert file.read_bytes().startswith(b"MLCVKPC1")
    assert run("once", **cache)["counts"]["cache_loaded"] == 1
    found = run("torn_cache", **cache)
    assert found["taken"] == [False, True] * 5
    assert len(found["files"]) == 2  # the plugin and the pipelines, nothing partial
