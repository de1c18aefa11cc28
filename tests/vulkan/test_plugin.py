"""The plugin's way onto a machine: what is missing is named with the command to get it; devices are chosen by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe import loading
from mlcpipe.cli import main
from mlcpipe.devices import vulkan
from mlcpipe.devices.support import vulkan_plugin
from mlcpipe.devices.support.speeds import copied_gb_s
from mlcpipe.errors import TargetError, UsageError
from tests.conftest import write_llama

linux = pytest.mark.skipif(sys.platform != "linux", reason="the plugin is for Linux so far")


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@linux
def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TargetError, match=r"expected a C\+\+ compiler; apt-get install g\+\+ libvulkan-dev"):
        vulkan_plugin.find_compiler()
    script(tmp_path / "pacman", "exit 0")
    with pytest.raises(TargetError, match="pacman -S gcc vulkan-headers"):
        vulkan_plugin.find_compiler()
    with pytest.raises(TargetError):
        vulkan_plugin.check()


@linux
def test_the_plugin_of_a_wheel_is_taken_if_it_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One of other sources, or for another TVM, is not: the error says so where none can be compiled."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("mlcpipe.support.compiled.compiled_path", lambda: tmp_path)
    plugin = tmp_path / f"vulkan-{vulkan_plugin.digest()}.so"
    plugin.touch()
    vulkan_plugin.check()
    assert vulkan_plugin.build() == plugin and vulkan_plugin.origin() == f"of the wheel, {plugin}"
    monkeypatch.setattr(vulkan_plugin, "version", lambda name: "0.1.15")
    with pytest.raises(TargetError, match="found the wheel's plugin is of other sources, or for another TVM; apt-get"):
        vulkan_plugin.build()


@linux
def test_a_machine_without_vulkans_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path / "g++", 'case "$1" in --version) echo g++ 99;; *) exit 1;; esac')
    with pytest.raises(TargetError, match=r"expected Vulkan's headers, or a C\+\+20 compiler newer than this one"):
        vulkan_plugin.find_compiler()


@linux
def test_a_compiler_that_fails_is_an_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    fails = (
        'case "$*" in *-E*) cat > /dev/null;; *--version*) echo bad 1;; *) echo "x.cc:1: error: no" >&2; exit 1;; esac'
    )
    script(tmp_path / "c++", fails)
    with pytest.raises(TargetError, match="the Vulkan plugin does not compile in bad 1; found x.cc:1: error: no"):
        vulkan_plugin.build()
    assert [path.suffix for path in (tmp_path / "cache" / "vulkan").iterdir()] == [".lock"]


@linux
def test_processes_that_need_the_plugin_at_once_compile_it_once(tmp_path: Path) -> None:
    counts = tmp_path / "compiled"
    counting = f'case "$*" in *-E*) cat > /dev/null;; *--version*) echo slow 1;; *) echo x >> {counts}; sleep 1;'
    script(tmp_path / "c++", counting + ' while [ "$1" != -o ]; do shift; done; echo y > "$2";; esac')
    environment = {**os.environ, "PATH": f"{tmp_path}:/bin:/usr/bin", "MLCPIPE_CACHE": str(tmp_path / "cache")}
    code = "from mlcpipe.devices.support import vulkan_plugin; vulkan_plugin.build()"
    command = [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {code}"]
    root = Path(__file__).parents[2]
    started = [subprocess.Popen(command, cwd=root, env=environment) for _ in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    assert counts.read_text() == "x\n"


def test_choosing_a_device(gpu: vulkan.Device) -> None:
    assert vulkan.choose("vulkan") == vulkan.choose("vulkan:0") == gpu
    with pytest.raises(UsageError, match=r"there is no device vulkan:999; expected vulkan:0 "):
        vulkan.choose("vulkan:999")
    for spec in ("cuda", "vulkan:", "vulkan:x", "vulkan:-1", ""):
        with pytest.raises(UsageError, match="expected vulkan or vulkan:0"):
            vulkan.choose(spec or "none")


def test_doctor_lists_devices(gpu: vulkan.Device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["vulkan plugin"]["state"] == "ok"
    assert findings["vulkan:0"]["state"] == ("note" if gpu.kind == "software" else "ok")
    value = findings["vulkan:0"]["value"]
    assert gpu.title in value and gpu.kind in value and value.endswith("preferred")


def test_a_checkpoint_is_compiled_for_the_device_that_is_there(
    gpu: vulkan.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device` takes the target that suits the device, `--target` stays what it says."""
    seen: list[str] = []
    monkeypatch.setattr(mlcpipe, "compile", lambda checkpoint, target, **options: seen.append(target))
    checkpoint = str(write_llama(tmp_path / "checkpoint"))
    for target in (None, "vulkan"):
        loading.prepare_bundle(checkpoint, "vulkan:0", target=target)
    assert seen == [gpu.best_target(), "vulkan"]


def test_a_device_copies_and_software_is_no_hardware(gpu: vulkan.Device) -> None:
    assert copied_gb_s(gpu) > 0
    assert gpu.is_hardware == (gpu.kind != "software")
