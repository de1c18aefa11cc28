"""Symbols of object files get a prefix; all else stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tvm
from tvm.script import tirx as T

from mlcpipe.compiler.build import Kernels, new_object_file
from mlcpipe.compiler.object_symbols import defined_symbols, is_riscv, write_renamed
from mlcpipe.compiler.static_library import with_prefix
from mlcpipe.errors import CompileError

NAMES = {"__tvm_ffi_fill", "__extendhfsf2"}


@pytest.fixture(
    scope="module", params=["x86_64-linux-gnu", "aarch64-linux-gnu", "riscv64-linux-gnu", "arm64-apple-ios17.0"]
)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    @T.prim_func(s_tir=True)
    def fill(X: T.Buffer((4,), "float32")):
        for i in T.serial(4):
            X[i] = T.float32(1)

    target = tvm.target.Target({"kind": "llvm", "mtriple": request.param})
    kernels = Kernels(tvm.IRModule({"fill": fill.with_attr("global_symbol", "fill")}), tvm.IRModule(), target)
    made: Path = tmp_path_factory.mktemp("object") / "fill.o"
    made.write_bytes(new_object_file(kernels, ".o").code)
    return made


def test_what_an_object_file_defines_gets_a_prefix(path: Path, tmp_path: Path) -> None:
    defined = defined_symbols(path)
    assert defined >= NAMES and "TVMFFIErrorSetRaisedFromCStrParts" not in defined
    copy = tmp_path / "copy.o"
    write_renamed(path, copy, {name: f"mlcpipe_1_{name}" for name in NAMES})
    assert defined_symbols(copy) == {f"mlcpipe_1_{name}" if name in NAMES else name for name in defined}
    before, after = path.read_bytes(), copy.read_bytes()
    changed = [at for at, (old, new) in enumerate(zip(before, after)) if old != new]
    assert after[64 : changed[0]] == before[64 : changed[0]]
    assert len(changed) <= 4 * len(NAMES) + 16  # a place in each symbol, and the table of names


def test_nothing_to_rename_changes_no_name(path: Path, tmp_path: Path) -> None:
    write_renamed(path, tmp_path / "copy.o", {})
    assert defined_symbols(tmp_path / "copy.o") == defined_symbols(path)


def test_each_file_has_its_own_of_what_several_define(path: Path, tmp_path: Path) -> None:
    """As the conversions of float16 that each variant has; TVM's variables are one."""
    defined = defined_symbols(path)
    prefix, (first, second) = with_prefix([path, path], tmp_path)
    assert re.fullmatch("mlcpipe_[0-9a-f]{16}_", prefix)
    halves = {name for name in defined if name.endswith(("hfsf2", "sfhf2"))}
    kept = halves if is_riscv(path) else set()  # the native runtime has those that work there
    assert len(halves) == 2 and defined_symbols(first) == {prefix + name for name in defined - kept} | kept
    shared = defined_symbols(first) & defined_symbols(second)
    assert shared == {prefix + name for name in defined if name.startswith(("__TVM", "__tvm_ffi__"))} | kept
    assert is_riscv(path) or f"{prefix}1___extendhfsf2" in defined_symbols(second)
    other = with_prefix([path], tmp_path)[0]
    assert other != prefix == with_prefix([path, path], tmp_path)[0]


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x01\x01" + bytes(60), b"\xce\xfa\xed\xfe" + bytes(60)])
def test_other_formats_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other.o").write_bytes(content)
    with pytest.raises(CompileError, match="another format in other.o"):
        defined_symbols(tmp_path / "other.o")


def test_an_object_file_of_apple_s_without_symbols_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.o").write_bytes(b"\xcf\xfa\xed\xfe" + bytes(60))
    with pytest.raises(CompileError, match="without symbols in empty.o"):
        defined_symbols(tmp_path / "empty.o")
