"""The store of compiled kernels: an entry is found by all that makes it, and by nothing else; damage is a miss."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

import mlcpipe
from mlcpipe.compiler import device_library, kernel_store
from mlcpipe.compiler.backends import base, find_writer, webgpu
from mlcpipe.compiler.backends.base import DeviceLibrary
from mlcpipe.compiler.backends.wasm.emscripten import Emscripten
from mlcpipe.compiler.backends.webgpu import WasmLibrary
from mlcpipe.compiler.build import Kernels, new_object_file
from mlcpipe.compiler.device_library import LibraryFiles
from mlcpipe.compiler.export import with_metadata
from mlcpipe.compiler.kernel_store import KernelStore
from mlcpipe.compiler.link import Linker, object_format
from mlcpipe.compiler.object_file import ObjectFile
from mlcpipe.compiler.scratch import Allocations
from mlcpipe.errors import CompileError
from mlcpipe.passes.lowering import Lowering
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import Target, Variant, compiled_variants, load_target
from tests.conftest import QUICK, TinyLlama, write_llama

KEY = "ab" + "0" * 62
MADE = ObjectFile(b"code" * 99, ("f", "g"), {"f": Allocations((4, ("Mul", "rows", 8)), (("rows",), ()))})
LIBRARY = LibraryFiles({"libmodel.a": b"archive" * 99, "empty": b"", "model.so": b"code" * 99})


@cache  # TVM's parser asks Python for a source file, which takes half a second
def adding(added: float) -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def add(X: T.Buffer((4,), "float32")):
        for i in T.serial(4):
            X[i] = X[i] + T.float32(added)

    return add


def module(added: float, name: str = "add") -> tvm.IRModule:
    return tvm.IRModule({name: adding(added).with_attr("global_symbol", name)})


def target(**options: object) -> Any:
    return tvm.target.Target({"kind": "llvm", "mcpu": "x86-64", "mtriple": "x86_64-linux-gnu", **options})


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(tvm.IRModule(), module(1), target())


def test_each_part_changes_the_key(kernels: Kernels) -> None:
    others: tuple[dict[str, Any], ...] = (
        {"internal": module(2)},
        {"internal": module(1, "other")},
        {"internal": tvm.IRModule(), "of_hosts": module(1)},
        {"of_hosts": module(1, "other")},
        {"target": target(mcpu="x86-64-v3")},
        {"target": target(mattr=["+avx2"])},
        {"target": target(mtriple="x86_64-unknown-linux-musl")},
    )
    found = {replace(kernels, **other).key(".o") for other in others}
    assert len(found | {kernels.key(".o")}) == 1 + len(others)


def test_the_key_is_that_of_the_same_code_made_again(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Kernels(tvm.IRModule(), module(1), target(), "another model")
    assert again.key(".o") == kernels.key(".o") != kernels.key(".obj")
    before = kernels.key(".o")
    monkeypatch.setattr(kernel_store, "_versions", lambda: b"of another release")
    assert kernels.key(".o") != before


LINKER = Linker("cc", "1.0", ("cc", "-a"), "linux")
DEVICE = DeviceLibrary(LINKER, lambda _: nullcontext(()), "NVRTC 1.0", archiver=LINKER, build="of May")
WASM = WasmLibrary(Emscripten("emcc", "1.0"))
TARGETS = ("vulkan", "cuda", "metal", "webgpu")


def answering(text: str, name: str = "_metadata") -> tvm.IRModule:
    return tvm.IRModule({name: with_metadata(tvm.IRModule(), {"text": text})["_metadata"]})


def lowering(name: str) -> Lowering:
    target = load_target(name)
    variant, layout = compiled_variants(target)[0], load_layout(target.weight_layout)
    return Lowering(answering("a model"), (), target, variant, load_scheme("q4f16_1"), layout)


def _other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, dict):
        return {**value, "max_num_threads": 64}
    if isinstance(value, tuple):
        return (*value, value[0] if value else "more")
    return not value if isinstance(value, bool) else value + type(value)(1)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The key by which a writer asks for a library."""

    class Asked:
        def __init__(self) -> None:
            self.key = ""

        def get(self, key: str, kind: type[LibraryFiles], make: object) -> LibraryFiles:
            self.key = key
            return LibraryFiles(
                {f"{stem}{suffix}": b"" for stem in ("model", "model-f16") for suffix in (".so", ".wasm")}
            )

        def trim(self) -> None: ...

    monkeypatch.setattr(webgpu, "runtime_objects", lambda *_: [Path("of this runtime", "a.o")])

    def key(writer: Any, state: Lowering, folder: Path, stem: str = "model") -> str:
        asked = Asked()
        monkeypatch.setattr(device_library, "kernel_store", lambda dump: asked)
        writer.write(state, [state.variant], folder, stem, SilentProgress())
        return asked.key

    return key


@pytest.mark.parametrize(
    "kind, other",
    [
        *((Target, field.name) for field in fields(Target)),
        *((Variant, field.name) for field in fields(Variant)),
        *((Lowering, mod) for mod in (answering("another model"), answering("a model", "other"))),
    ],
)
@pytest.mark.parametrize("name", TARGETS)
def test_each_part_of_a_library_changes_its_key(name: str, kind: type[Any], other: Any) -> None:
    state = lowering(name)
    if kind is Lowering:
        changed = replace(state, mod=other)
    else:
        part = kind.__name__.lower()
        whole = getattr(state, part)
        changed = replace(state, **{part: replace(whole, **{other: _other(getattr(whole, other))})})
    assert device_library.key(state, "model", ()) == device_library.key(lowering(name), "model", ())
    assert device_library.key(changed, "model", ()) != device_library.key(state, "model", ())


@pytest.mark.parametrize("kernel", [(2, "add"), (1, "other")])
@pytest.mark.parametrize("name", TARGETS)
def test_each_kernel_changes_the_key_of_a_library(name: str, kernel: tuple[float, str]) -> None:
    ours, theirs = (
        device_library.key(replace(lowering(name), mod=mod), "model", ()) for mod in (module(1), module(*kernel))
    )
    assert ours != theirs


@pytest.mark.parametrize(
    "writer, others",
    [
        (
            DEVICE,
            [
                *(
                    replace(DEVICE, **{tool: replace(LINKER, **{field.name: _other(getattr(LINKER, field.name))})})
                    for tool in ("linker", "archiver")
                    for field in fields(Linker)
                ),
                replace(DEVICE, compiler="NVRTC 1.1"), replace(DEVICE, build="of June"), replace(DEVICE, archiver=None),
            ],
        ),
        (WASM, [WasmLibrary(Emscripten("emcc", "1.1")), WasmLibrary(Emscripten("em", "1.0")), replace(WASM, quick=True)]),
    ],
)  # fmt: skip
def test_each_tool_changes_the_key(
    writer: Any, others: list[Any], keys: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = lowering("webgpu" if writer is WASM else "cuda")
    first = keys(writer, state, tmp_path)
    assert keys(writer, state, tmp_path) == first != keys(writer, state, tmp_path, "model-f16")
    found = [keys(other, state, tmp_path) for other in others]
    monkeypatch.setattr(webgpu, "runtime_objects", lambda *_: [Path("of another runtime", "a.o")])
    found += [keys(writer, state, tmp_path)] if writer is WASM else []
    for module_, changed in ((device_library, "_source"), (kernel_store, "_versions")):
        with monkeypatch.context() as patch:
            patch.setattr(module_, changed, lambda: b"of another release")
            found.append(keys(writer, state, tmp_path))
    assert len({first, *found}) == 1 + len(found)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "kernels", tmp_path)


def never() -> Any:
    raise AssertionError("made again")


@pytest.mark.parametrize("made", [MADE, LIBRARY])
def test_an_entry_is_what_was_made(made: Any, store: KernelStore) -> None:
    assert store.get(KEY, type(made), lambda: made) is made
    assert store.get(KEY, type(made), never) == made


def test_an_entry_of_real_code(kernels: Kernels, store: KernelStore) -> None:
    real = new_object_file(kernels, f".{object_format()}")
    assert "add" in {name.removeprefix("__tvm_ffi_") for name in real.names}
    assert store.get(KEY, ObjectFile, lambda: real) is real
    found = store.get(KEY, ObjectFile, never)
    assert found == real and found.allocations["add"].at(3) == real.allocations["add"].at(3)


def _cut(data: bytes) -> bytes:
    return data[:-1]


def _flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("made", [MADE, LIBRARY])
@pytest.mark.parametrize("damage", [_cut, lambda data: b"", *(_flipped(at) for at in (0, 8, 39, 40, 44, 60, 200, -2))])
def test_a_damaged_entry_is_made_again(
    damage: Callable[[bytes], bytes], made: Any, store: KernelStore, tmp_path: Path
) -> None:
    kind = type(made)
    store.get(KEY, kind, lambda: made)
    (entry,) = tmp_path.glob("kernels/??/*")
    entry.write_bytes(damage(entry.read_bytes()))
    with pytest.raises(AssertionError, match="made again"):
        store.get(KEY, kind, never)
    assert store.get(KEY, kind, lambda: made) is made and store.get(KEY, kind, never) == made


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
def test_what_others_may_have_written_is_not_taken(store: KernelStore, tmp_path: Path) -> None:
    store.get(KEY, ObjectFile, lambda: MADE)
    (entry,) = tmp_path.glob("kernels/??/*")
    tmp_path.chmod(0o755)
    (tmp_path / "kernels").chmod(0o755)
    entry.parent.chmod(0o755)
    entry.chmod(0o666)
    with pytest.raises(AssertionError, match="made again"):
        store.get(KEY, ObjectFile, never)


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file in the place of the folder")
    assert KernelStore(tmp_path / "kernels", tmp_path).get(KEY, ObjectFile, lambda: MADE) is MADE


def test_the_least_recently_used_go(store: KernelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"{number:02x}" + "0" * 62 for number in range(10)]
    for number, key in enumerate(keys[:9]):
        store.get(key, ObjectFile, lambda: MADE)
        os.utime(tmp_path / "kernels" / key[:2] / key[2:], (number, number))
    store.get(keys[0], ObjectFile, never)  # used now
    size = next(tmp_path.glob("kernels/??/*")).stat().st_size
    monkeypatch.setattr(kernel_store, "MAX_BYTES", 8 * size)
    monkeypatch.setattr(kernel_store, "_TRIMMED_BYTES", 6 * size)
    store.get(keys[9], ObjectFile, lambda: MADE)
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
        checkpoint = write_llama(tmp_path / f"{seed}", TinyLlama(layers=1, seed=seed))
        output = tmp_path / f"{seed}-{quantization}"
        mlcpipe.compile(checkpoint, target=QUICK, quantization=quantization, output=output)
        counts.append(len(made))
        kinds = {name.rpartition("_")[0] for name in made}
        made.clear()
    assert counts[0] > counts[2] > counts[1] == 0
    assert kinds == {"matmul", "gated_matmul", "take"}


def _no_kernels(*_: object, **__: object) -> None:
    raise AssertionError("built again")


@pytest.mark.full
@pytest.mark.full_cases("vulkan-True", "webgpu-False")  # the others are kept as vulkan's are
@pytest.mark.parametrize(
    ("name", "compare"),
    # Two compiles for CUDA differed once.
    [("vulkan", True), ("cuda-sm86", False), ("metal", True), ("webgpu", False), ("webgpu", True)],
)
def test_a_second_model_of_these_shapes_has_the_same_library(
    name: str, compare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """It is that of a compile without a store, which takes part if `compare`; another quantization has its own."""
    try:
        find_writer(load_target(name))
    except CompileError as error:
        pytest.skip(str(error))
    if name == "webgpu":
        request.getfixturevalue("wasm_runtime")

    def library(seed: int, store: KernelStore | None, quantization: str = "q4f16_1") -> bytes:
        monkeypatch.setattr(device_library, "kernel_store", lambda dump: store)
        checkpoint = write_llama(tmp_path / f"{seed}", TinyLlama(layers=1, seed=seed))
        bundle = mlcpipe.compile(
            checkpoint, target=name, quantization=quantization, output=tmp_path / "bundle", overwrite=True,
            quick=name == "webgpu",
        )  # fmt: skip
        (path,) = (bundle / "lib").iterdir()
        return path.read_bytes()

    store = KernelStore(tmp_path / "kernels", tmp_path)
    first = library(0, store)
    assert not compare or library(1, None) == first
    monkeypatch.setattr(webgpu if name == "webgpu" else base, "build_for_device", _no_kernels)
    assert library(1, store) == first
    with pytest.raises(AssertionError, match="built again"):
        library(1, store, "q8f16_1")


@pytest.mark.parametrize("facts", [[["../x", 3]], [["a/b", 3]], [["", 3]], [["x", 2]], [["x", -1], ["y", 4]], [[1, 3]]])
def test_files_of_other_folders_or_sizes_are_refused(facts: list[Any]) -> None:
    with pytest.raises(ValueError, match="name|size"):
        LibraryFiles.from_entry(facts, b"abc")
