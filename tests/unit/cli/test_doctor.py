"""`mlcpipe doctor`: a verdict, and only those targets ok whose library can be written here."""

from __future__ import annotations

import sys

import pytest

from mlcpipe.cli import doctor
from mlcpipe.compiler import link
from mlcpipe.devices.support import vulkan_plugin
from mlcpipe.errors import TargetError
from mlcpipe.host.finding import Finding

ZIG, HEADERS = "pip install 'mlcpipe[zig]'", "apt-get install g++ libvulkan-dev"


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac's compiler links for Metal")
def test_each_target_is_asked_for_its_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with cc alone."""

    def no_headers() -> vulkan_plugin.Compiler:
        raise TargetError("no plugin", expected="headers", next_step=HEADERS)

    monkeypatch.setattr(link, "find_zig", lambda: None)
    monkeypatch.setattr("mlcpipe.compiler.backends.metal.find_zig", lambda: None)
    monkeypatch.setattr(vulkan_plugin, "find_compiler", no_headers)
    tools, targets = doctor._targets()
    found = {name: (one.state, one.advice) for name, one in targets.items()}
    for name in ("android", "android-x86_64", "arm64-linux", "ios", "metal", "riscv64-linux", "x86_64-linux"):
        assert found[name] == ("missing", ZIG), name
    assert found["vulkan"] == found["nvidia"] == found["android-mali"] == ("missing", HEADERS)
    assert found["cpu"] == found["cpu-native"] == ("ok", "") and tools.value
    lines = {one.advice: one for one in doctor._lines(targets)}
    assert "riscv64-linux" in lines[ZIG].value and "no plugin; it takes headers" in lines[HEADERS].value


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({}, "the CPU; linker "),
        ({"vulkan": [Finding("vulkan plugin", "ok", "of the wheel, x"), Finding("vulkan:0", "note", "llvmpipe")]},
         "the CPU; the Vulkan plugin of the wheel; linker "),
        ({"vulkan": [Finding("vulkan plugin", "ok", "/x.so, compiled here"), Finding("vulkan:0", "ok", "RX 7600")]},
         "vulkan:0 for models that it runs clearly faster, else the CPU; the Vulkan plugin compiled here; linker "),
    ],
)  # fmt: skip
def test_what_this_machine_uses_in_a_line(devices: dict[str, list[Finding]], words: str) -> None:
    found = doctor._uses(devices)
    assert found.name == "uses" and found.value.startswith(words)


_GPU, _SOFTWARE = Finding("cuda:0", "ok", "H200; 139 GiB"), Finding("vulkan:0", "note", "llvmpipe; software")
_NONE = Finding("cuda", "missing", "no driver", "install a driver")
_OK, _LACKS = Finding("x", "ok", ""), Finding("x", "missing", "no linker", "install one")


@pytest.mark.parametrize(
    ("cpu", "gpus", "target", "verdict"),
    [
        (_LACKS, {}, _OK, "Not ready: no linker. Try: install one"),
        (_OK, {}, _OK, "Ready: the CPU."),
        (_OK, {"cuda": [_NONE], "vulkan": [_SOFTWARE]}, _OK, "Ready: the CPU. For a GPU: install a driver (cuda)."),
        (_OK, {"cuda": [_NONE], "vulkan": [_NONE]}, _OK,
         "Ready: the CPU. For a GPU: install a driver (cuda); or install a driver (vulkan)."),
        (_OK, {"cuda": [_GPU], "vulkan": [_NONE]}, _OK, "Ready: the CPU and cuda:0 (H200)."),
        (_OK, {"cuda": [_GPU]}, _LACKS, "Ready: the CPU. For a GPU: install one (cuda)."),
    ],
)  # fmt: skip
def test_the_verdict(cpu: Finding, gpus: dict[str, list[Finding]], target: Finding, verdict: str) -> None:
    assert doctor._verdict(cpu, gpus, dict.fromkeys(gpus, target)) == verdict
