"""The store of compiled kernels: an entry is found by all that makes it, and by nothing else; damage is a miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.script import tirx as T

import mlcpipe
from mlcpipe.compiler import kernel_store
from mlcpipe.compiler.build import Kernels, new_object_file
from mlcpipe.compiler.kernel_store import KernelStore
from mlcpipe.compiler.link import object_format
from mlcpipe.compiler.object_file import ObjectFile
from mlcpipe.compiler.scratch import Allocations
from tests.conftest import QUICK, TinyLlama, write_llama

KEY = "ab" + "0" * 62
MADE = ObjectFile(b"code" * 99, ("f", "g"), {"f": Allocations((4, ("Mul", "rows", 8)), (("rows",), ()))})


def module(added: float, name: str = "add") -> tvm.IRModule:
    @T.prim_func(s_tir=True)
    def add(X: T.Buffer((4,), "float32")):
        for i in T.serial(4):
            X[i] = X[i] + T.float32(added)

    return tvm.IRModule({name: add.with_attr("global_symbol", name)})


def target(**options: object) -> Any:
    return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "mtriple": "x86_64-linux-gnu", **options})


KERNELS = Kernels(tvm.IRModule(), module(1), target())


@pytest.mark.parametrize(
    "other",
    [
        replace(KERNELS, internal=module(2)),
        replace(KERNELS, internal=module(1, "other")),
        replace(KERNELS, internal=tvm.IRModule(), of_hosts=module(1)),
        replace(KERNELS, of_hosts=module(1, "other")),
        replace(KERNELS, target=target(mcpu="x86-64-v3")),
        replace(KERNELS, target=target(mattr=["+avx2"])),
        replace(KERNELS, target=target(mtriple="x86_64-unknown-linux-musl")),
    ],
)
def test_each_part_changes_the_key(other: Kernels) -> None:
    assert other.key(".o") != KERNELS.key(".o")


def test_the_key_is_that_of_the_same_code_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = Kernels(tvm.IRModule(), module(1), target(), "another model")
    assert again.key(".o") == KERNELS.key(".o") != KERNELS.key(".obj")
    before = KERNELS.key(".o")
    monkeypatch.setattr(kernel_store, "_versions", lambda: b"of another release")
    assert KERNELS.key(".o") != before


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "kernels", tmp_path)


def never() -> ObjectFile:
    raise AssertionError("made again")


def test_an_entry_is_what_was_made(store: KernelStore) -> None:
    assert store.get(KEY, lambda: MADE) is MADE
    found = store.get(KEY, never)
    assert found == MADE and found.allocations["f"].at(3) == MADE.allocations["f"].at(3)
    real = new_object_file(KERNELS, f".{object_format()}")
    assert "add" in {name.removeprefix("__tvm_ffi_") for name in real.names}
    other = KEY[::-1]
    assert store.get(other, lambda: real) is real and store.get(other, never) == real


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", [_cut, lambda data: b"", *(_flipped(at) for at in (0, 8, 39, 40, 44, 60, 200, -2))])
def test_a_damaged_entry_is_made_again(damage: Callable[[bytes], bytes], store: KernelStore, tmp_path: Path) -> None:
    store.get(KEY, lambda: MADE)
    (entry,) = tmp_path.glob("kernels/??/*")
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.raises(AssertionError, match="made again"):
        store.get(KEY, never)
    assert store.get(KEY, lambda: MADE) is MADE and store.get(KEY, never) == MADE


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
def test_what_others_may_have_written_is_not_taken(store: KernelStore, tmp_path: Path) -> None:
    store.get(KEY, lambda: MADE)
    (entry,) = tmp_path.glob("kernels/??/*")
    tmp_path.chmod(0o755)
    (tmp_path / "kernels").chmod(0o755)
    entry.parent.chmod(0o755)
    entry.chmod(0o666)
    with pytest.raises(AssertionError, match="made again"):
        store.get(KEY, never)


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file in the place of the folder")
    assert KernelStore(tmp_path / "kernels", tmp_path).get(KEY, lambda: MADE) is MADE


def test_the_least_recently_used_go(store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{number:02x}" + "0" * 62 for number in range(10)]
    for number, key in enumerate(keys[:9]):
        store.get(key, lambda: MADE)
        os.utime(tmp_path / "kernels" / key[:2] / key[2:], (number, number))
    store.get(keys[0], never)  # used now
    size = next(tmp_path.glob("kernels/??/*")).stat().st_size
    monkeypatch.setattr(kernel_store, "MAX_BYTES", 8 * size)
    monkeypatch.setattr(kernel_store, "_TRIMMED_BYTES", 6 * size)
    store.get(keys[9], lambda: MADE)
    store.trim()
    assert [number for number in range(10) if (tmp_path / "kernels" / keys[number][:2] / keys[number][2:]).exists()] == [
        0, 5, 6, 7, 8, 9,
    ]  # fmt: skip


@pytest.mark.full
def test_a_second_model_of_these_shapes_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights; in another quantization only products of matrices are new."""
    made: list[str] = []

    def counted(kernels: Kernels, suffix: str) -> ObjectFile:
        made.extend(gv.name_hint for gv in kernels.internal.get_global_vars())
        return new_object_file(kernels, suffix)

    monkeypatch.setattr(mlcpipe.compiler.build, "new_object_file", counted)
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "cache"))
    counts = []
    for seed, quantization in ((0, "q4f16_1"), (1, "q4f16_1"), (1, "q8f16_1")):
        checkpoint = write_llama(tmp_path / f"{seed}", TinyLlama(seed=seed))
        output = tmp_path / f"{seed}-{quantization}"
        mlcpipe.compile(checkpoint, target=QUICK, quantization=quantization, output=output)
        counts.append(len(made))
        kinds = {name.rpartition("_")[0] for name in made}
        made.clear()
    assert counts[0] > counts[2] > counts[1] == 0
    assert kinds == {"matmul", "gated_matmul", "take"}
