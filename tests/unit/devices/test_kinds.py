"""A kind of device is two files, one of `mlcpipe.devices` and one of `mlcpipe.compiler.backends`, and target files."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcpipe import devices
from mlcpipe.cli import doctor
from mlcpipe.compiler import backends
from mlcpipe.errors import TargetError, UsageError
from mlcpipe.host.finding import Finding
from mlcpipe.targets import load_target, load_targets, target_names

_DEVICES = """
from dataclasses import dataclass
from typing import ClassVar
from mlcpipe.devices import base

TVM_KIND, TITLE = "toaster", "a toaster"

@dataclass(frozen=True)
class Device(base.Device):
    KIND: ClassVar[str] = "toaster"
    TYPE: ClassVar[int] = 99

    def best_target(self):
        return "toaster-pro"

    def facts(self):
        return "two slots",

def devices():
    return Device(0, "Slow"), Device(1, "Fast")

def choose(spec=None):
    return base.choose_from("toaster", spec, devices)

def findings():
    return [device.finding() for device in devices()]
"""
_BACKEND = """
from mlcpipe.errors import CompileError

OPTIONS = ("crisp",)

def find(target, crisp=False):
    if target.name == "cpu":
        raise CompileError("there is no bread", next_step="buy some")
    return f"a writer for {target.name}, crisp={crisp}"

def source(scheduled):
    return ""

def runner(target, variant):
    raise CompileError("nothing here runs the target's kernels")
"""


@pytest.fixture
def toaster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new kind of device; the path of a target for it."""
    for package, text in ((devices, _DEVICES), (backends, _BACKEND)):
        folder = tmp_path / package.__name__
        folder.mkdir()
        (folder / "toaster.py").write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    board = tmp_path / "board.toml"
    board.write_text('base = "vulkan"\nbackend = "toaster"\n')
    devices.kinds.cache_clear()
    backends.backends.cache_clear()
    yield board
    devices.kinds.cache_clear()
    backends.backends.cache_clear()
    for package in (devices, backends):
        sys.modules.pop(f"{package.__name__}.toaster", None)


def test_every_kind_has_a_backend_and_targets() -> None:
    assert devices.kinds() == backends.backends() == ("cpu", "cuda", "metal", "vulkan", "webgpu")
    for name in devices.kinds():
        kind, backend = devices.kind(name), backends.backend(name)
        assert all(callable(getattr(kind, key)) for key in ("devices", "choose", "findings"))
        assert all(callable(getattr(backend, key)) for key in ("find", "source", "runner"))
        assert all(target.tvm["kind"] == kind.TVM_KIND for target in load_targets(name))
    assert {load_target(name).backend for name in target_names()} == set(devices.kinds())


def _names_in(path: Path) -> set[str]:
    """Words that code could decide by: whole strings, parts of imported modules, and the file's own name."""
    names = {path.stem}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
    return names


def test_only_the_files_of_a_kind_decide_by_its_name() -> None:
    root = Path(devices.__file__).parents[1]
    own = (root / "devices", root / "compiler" / "backends")
    others = [path for path in root.rglob("*.py") if not any(path.is_relative_to(folder) for folder in own)]
    names = {*devices.kinds(), *(devices.kind(name).TVM_KIND for name in devices.kinds()), "opencl"} - {"cpu", "llvm"}
    found = {str(path.relative_to(root)): sorted(names & _names_in(path)) for path in others}
    assert len(others) > 150 and {path: used for path, used in found.items() if used} == {}


def test_a_new_kind_is_two_files(toaster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.choose("toaster:1").description == "toaster:1, Fast"
    assert devices.choose("toaster").best_target() == "toaster-pro"
    with pytest.raises(UsageError, match="there is no device toaster:2; expected toaster:0 Slow, toaster:1 Fast"):
        devices.choose("toaster:2")
    target = load_target(str(toaster))
    assert backends.find_writer(target, crisp=True) == "a writer for board, crisp=True"
    with monkeypatch.context() as patch:
        patch.setattr(devices, "kinds", lambda: ("toaster",))  # doctor asks the others for seconds
        patch.setattr(backends, "backend_of", lambda target: backends.backend("toaster"))
        patch.setattr("mlcpipe.targets.target_names", lambda: ("cpu",))
        assert [one.value for one in doctor._devices()["toaster"]] == ["Slow; two slots", "Fast; two slots"]
        assert doctor._targets()[1] == {"cpu": Finding("cpu", "missing", "there is no bread", "buy some")}


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(UsageError, match="--quick has no effect for the target in cpu; leave --quick out"):
        backends.find_writer(load_target("cpu"), quick=True)


def test_a_backend_that_does_not_exist(tmp_path: Path) -> None:
    board = tmp_path / "board.toml"
    board.write_text('base = "cpu"\nbackend = "toaster"\n')
    with pytest.raises(TargetError, match="backend in board; expected cpu or cuda or .*; found toaster"):
        backends.find_writer(load_target(str(board)))
