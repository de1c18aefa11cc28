"""Compiled libraries in a process that lives on while their files change."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.compiler.link import find_linker
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ResourceError
from tests.conftest import Bundles

# A function of TVM's calling convention (tvm/ffi/c_api.h): its result has a type, 1 for integers, and a value.
SOURCE = """
struct value { int type; int padding; long long number; };
static long long number = %d;
int __tvm_ffi_number(void* self, const struct value* arguments, int count, struct value* result) {
  result->type = 1, result->padding = 0, result->number = number;
  return 0;
}
"""


def renamed(new: Path, library: Path) -> None:
    staged = Path(shutil.copy(new, library.with_name("staged")))
    os.replace(staged, library)


def removed_first(new: Path, library: Path) -> None:
    shutil.rmtree(library.parent)
    library.parent.mkdir()
    shutil.copy(new, library)


def written_over(new: Path, library: Path) -> None:
    library.write_bytes(new.read_bytes())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Three, that return 0, 1 and 2."""
    folder, linker = tmp_path_factory.mktemp("libraries"), find_linker()
    made = [folder / f"{number}.so" for number in range(3)]
    for number, path in enumerate(made):
        source = path.with_suffix(".c")
        source.write_text(SOURCE % number)
        linker.run(["-shared", "-fPIC", "-o", str(path), str(source)])
    return made


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("replace", [renamed, removed_first, written_over])
def test_a_library_is_the_one_that_its_file_holds(
    replace: Callable[[Path, Path], None], in_memory: bool, libraries: Sequence[Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as on macOS and Windows
    path = tmp_path / "lib" / "model.so"
    path.parent.mkdir()
    modules = []
    for number in (0, 1, 2, 1):
        replace(libraries[number], path)
        modules.append(tvm_runtime.load_module(path))
    assert [module["number"]() for module in modules] == [0, 1, 2, 1]
    modules.append(tvm_runtime.load_module(tmp_path / "lib" / ".." / "lib" / path.name))
    assert all(module.same_as(modules[1]) for module in modules[3:])


def test_what_was_not_checked_is_not_run(libraries: Sequence[Path], tmp_path: Path) -> None:
    path = Path(shutil.copy(libraries[0], tmp_path / "model.so"))
    checked = hashlib.sha256(path.read_bytes()).hexdigest()
    assert tvm_runtime.load_module(path, checked)["number"]() == 0
    for changed in (libraries[1].read_bytes(), libraries[0].read_bytes()[:4096]):  # half a file would kill the process
        path.write_bytes(changed)
        with pytest.raises(RuntimeError, match="changed after it was checked"):
            tvm_runtime.load_module(path, checked)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_copy_without_room_is_named(
    in_memory: bool, libraries: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_memory:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    path = Path(shutil.copy(libraries[0], tmp_path / "model.so"))
    resource = pytest.importorskip("resource", reason="POSIX limits")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ResourceError, match="refuses a file of this size"):
            tvm_runtime.load_module(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_what_is_no_library_keeps_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    path.write_bytes(b"\x7fELF")
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="model.so|/proc/self/fd"):
            tvm_runtime.load_module(path)
    assert len(before) == (len(os.listdir("/proc/self/fd")) if before else 0)


@pytest.mark.parametrize("is_alive", [False, True], ids=["deleted", "alive"])
def test_a_bundle_in_the_folder_of_another(is_alive: bool, tiny_bundles: Bundles, tmp_path: Path) -> None:
    folder, prompt, engines = tmp_path / "bundle", list(b"a prompt"), []
    for quantization in ("q0f32", "q4f16_1"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_bundles[quantization], folder)
        engines.append(Engine(folder, threads=1))
        answers = [
            engine.generate(prompt, sampling=SamplingParams(temperature=0), max_tokens=8, ignore_eos=True).token_ids
            for engine in (engines[-1], Engine(tiny_bundles[quantization], threads=1))
        ]
        assert answers[0] == answers[1]
        if not is_alive:
            engines.clear()


def test_numbers_are_written_where_numpy_takes_them_for_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NumPy before 2.3 does."""
    from_dlpack = np.from_dlpack

    def read_only(made: Any) -> Any:
        found = from_dlpack(made)
        found.flags.writeable = False
        return found

    monkeypatch.setattr(np, "from_dlpack", read_only)
    made = tvm_runtime.tensor(np.arange(6, dtype=np.int32).reshape(2, 3))
    tvm_runtime.array(made)[1] = 7
    assert tvm_runtime.array(made).tolist() == [[0, 1, 2], [7, 7, 7]]
