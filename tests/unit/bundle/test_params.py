"""Shards: what the writer writes, what the reader refuses, and that nothing is copied."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import numpy as np
import pytest
import tvm
from tvm.contrib import tvmjs

from mlcpipe.bundle import ParamsWriter, open_params, params_writer, read_manifest, to_tvm
from mlcpipe.bundle.params_reader import Preload
from mlcpipe.errors import BundleError, ResourceError

DTYPES = ("float16", "float32", "uint32", "int8", "uint8")


def write(directory: Path, arrays: dict[str, np.ndarray], max_shard_bytes: int = 1024) -> None:
    with ParamsWriter(directory, max_shard_bytes=max_shard_bytes) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.finish()


def index(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "tensor-cache.json").read_text())
    return content


def test_round_trip_through_mmap(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write(tmp_path, arrays)
    params = open_params(tmp_path, None)
    assert list(params) == list(arrays)
    assert params.nbytes == sum(array.nbytes for array in arrays.values())
    for name, array in arrays.items():
        assert params[name].dtype == array.dtype
        assert params[name].shape == array.shape
        assert params[name].tobytes() == array.tobytes()
        assert params[name].ctypes.data % 64 == 0
        assert not params[name].flags.writeable


def test_a_file_is_written_in_whole_blocks(
    tmp_path: Path, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its end; Linux keeps such a file in large pages."""
    written: list[int] = []

    def opened(path: Path, mode: str) -> mock.Mock:
        file = open_file(path, mode)
        return mock.Mock(wraps=file, **{"write.side_effect": lambda data: written.append(file.write(data))})

    open_file = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(params_writer, "BLOCK_BYTES", 100)
        patch.setattr(Path, "open", opened)
        with ParamsWriter(tmp_path, max_shard_bytes=1 << 20) as writer:
            for name, array in arrays.items():
                writer.add(name, array)
            patch.setattr(Path, "open", open_file)
            writer.finish()
    assert len(written) > 3 and set(written[:-1]) == {100} and written[-1] < 100
    params = open_params(tmp_path, None)
    assert all(params[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_tvm_s_own_loader_reads_the_shards(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write(tmp_path, arrays)
    loaded, metadata = tvmjs.load_tensor_cache(str(tmp_path), tvm.cpu())
    assert metadata["ParamSize"] == len(arrays)
    assert all(loaded[name].numpy().tobytes() == array.tobytes() for name, array in arrays.items())
    tvm.get_global_func("vm.builtin.tensor_cache.load")(str(tmp_path), 1, 0)
    cached = tvm.get_global_func("vm.builtin.tensor_cache.get")("large")
    assert cached.numpy().tobytes() == arrays["large"].tobytes()
    tvm.get_global_func("vm.builtin.tensor_cache.clear")()


def test_index_has_the_fields_and_types_of_tvm_s_writer(tmp_path: Path) -> None:
    array = np.arange(12, dtype="float32").reshape(3, 4)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write(ours, {"w": array})
    tvmjs.dump_tensor_cache({"w": array}, str(theirs), encode_format="raw", show_progress=False)
    assert index(ours)["records"] == index(theirs)["records"]
    assert index(ours)["metadata"] == {"ParamSize": 1, "ParamBytes": 48, "BitsPerParam": 32.0}


def test_bits_per_parameter_of_the_model(tmp_path: Path) -> None:
    with ParamsWriter(tmp_path) as writer:
        writer.add("w", np.zeros((4, 4), dtype="uint32"))
        writer.finish(model_params=128)
    assert index(tmp_path)["metadata"]["BitsPerParam"] == 4.0


def test_shards_are_filled_aligned_and_hashed(tmp_path: Path) -> None:
    with ParamsWriter(tmp_path, max_shard_bytes=256) as writer:
        for name, size in (("a", 100), ("b", 128), ("c", 1), ("large", 1000), ("d", 200)):
            writer.add(name, np.full(size, 7, dtype="uint8"))
        files = writer.finish()
    shards = index(tmp_path)["records"]
    assert [[r["name"] for r in shard["records"]] for shard in shards] == [["a", "b"], ["c"], ["large"], ["d"]]
    assert [r["byteOffset"] for r in shards[0]["records"]] == [0, 128]
    assert list(files) == [*(f"params_shard_{i}.bin" for i in range(4)), "tensor-cache.json"]
    for name, info in files.items():
        content = (tmp_path / name).read_bytes()
        assert info.bytes == len(content)
        assert info.sha256 == hashlib.sha256(content).hexdigest()
    for shard in shards:
        content = (tmp_path / shard["dataPath"]).read_bytes()
        assert shard["nbytes"] == len(content)
        assert shard["md5sum"] == hashlib.md5(content).hexdigest()


def test_writing_takes_no_memory_besides_the_tensor(tmp_path: Path) -> None:
    array = np.ones(4 << 20, "float32")
    with ParamsWriter(tmp_path) as writer:
        tracemalloc.start()
        try:
            for i in range(3):
                writer.add(f"w{i}", array)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        writer.finish()
    assert peak < 1 << 20


def test_array_of_another_order_is_stored_in_c_order(tmp_path: Path) -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    write(tmp_path, {"w": array})
    stored = open_params(tmp_path, None)["w"]
    assert stored.dtype == np.dtype("<f4")
    np.testing.assert_array_equal(stored, array)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("w", np.zeros(3, dtype="float64")),
        ("w", np.zeros((3, 0), dtype="float32")),
        ("w", np.zeros((1,) * 9, dtype="float32")),
        ("", np.zeros(3, dtype="float32")),
        ("there", np.zeros(3, dtype="float32")),
    ],
)
def test_writer_refuses_what_the_format_lacks(tmp_path: Path, name: str, array: np.ndarray) -> None:
    with ParamsWriter(tmp_path) as writer:
        writer.add("there", np.zeros(3, dtype="float32"))
        with pytest.raises(BundleError):
            writer.add(name, array)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("elements", [10, 1 << 20])
def test_full_disk_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    def open_full(path: Path, mode: str) -> BinaryIO:
        return open("/dev/full", "wb")

    monkeypatch.setattr(params_writer.Path, "open", open_full)
    with pytest.raises(ResourceError, match="the disk is full .*params_shard_0.bin"), ParamsWriter(tmp_path) as w:
        w.add("w", np.zeros(elements, dtype="float32"))
        w.finish()


def test_other_write_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "params_shard_0.bin").touch()
    with ParamsWriter(tmp_path) as writer, pytest.raises(FileExistsError, match=r"params_shard_0\.bin"):
        writer.add("w", np.zeros(3, dtype="float32"))


def test_writer_closes_its_file_after_an_error(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    with pytest.raises(KeyboardInterrupt), ParamsWriter(tmp_path) as writer:
        writer.add("w", np.zeros(3, dtype="float32"))
        raise KeyboardInterrupt
    after = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    assert after == before


# --- reading hostile indexes ---

Edit = Callable[[dict[str, Any]], None]


def edit(path: str, value: Any) -> Edit:
    """Set one value, by a path like `records.0.records.1.byteOffset`."""

    def apply(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        node: Any = content
        for key in parents:
            node = node[int(key)] if key.isdigit() else node[key]
        node[int(last) if last.isdigit() else last] = value

    return apply


def merge(*edits: Edit) -> Edit:
    def apply(content: dict[str, Any]) -> None:
        for one in edits:
            one(content)

    return apply


FIRST = "records.0.records.0."
SECOND = "records.0.records.1."


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (edit(FIRST + "dtype", "float64"), "dtype"),
        (edit(FIRST + "dtype", "object"), "dtype"),
        (edit(FIRST + "dtype", "uint32"), "shape x uint32"),
        (edit(FIRST + "format", "f32-to-bf16"), "format"),
        (edit("records.0.format", "zip"), "format"),
        (edit("records.0.dataPath", "../params_shard_0.bin"), "plain file name"),
        (edit("records.0.dataPath", "/etc/hostname"), "plain file name"),
        (edit("records.0.dataPath", "lib/model.so"), "plain file name"),
        (edit("records.0.dataPath", "lib\\model.so"), "plain file name"),
        (edit("records.0.dataPath", ""), "plain file name"),
        (edit("records.0.dataPath", "a\x00b"), "plain file name"),
        (edit("records.0.dataPath", "a\nb"), "plain file name"),
        (edit("records.0.dataPath", "nowhere.bin"), "no such file"),
        (edit("records.1.dataPath", "PARAMS_SHARD_0.bin"), "one entry"),
        (edit("records.0.nbytes", 448), "448 bytes"),
        (edit("records.0.nbytes", 10**30), "bytes"),
        (edit("records.0.nbytes", True), "nbytes"),
        (edit("records.0.md5sum", "x"), "md5sum"),
        (edit("records.0.records", []), "records"),
        (edit(SECOND + "byteOffset", 64 << 20), "an end within"),
        (edit(SECOND + "byteOffset", 2**63), "an end within"),
        (edit(SECOND + "byteOffset", -64), "byteOffset"),
        (edit(SECOND + "byteOffset", 64.5), "byteOffset"),
        (edit(SECOND + "byteOffset", "64"), "byteOffset"),
        (edit(SECOND + "byteOffset", 96), "multiple of 64"),
        (edit(SECOND + "byteOffset", 0), "no overlap"),
        (edit(SECOND + "name", "first"), "one entry"),
        (edit("records.1.records.0.name", "first"), "one entry"),
        (edit(FIRST + "name", ""), "name"),
        (edit(FIRST + "name", "x" * 2000), "name"),
        (edit(FIRST + "shape", [25, 2]), "shape x float16"),
        (edit(FIRST + "shape", [-25, -1]), "positive extents"),
        (edit(FIRST + "shape", [0]), "positive extents"),
        (edit(FIRST + "shape", [2**62, 2**62]), "shape x float16"),
        (edit(FIRST + "shape", [1] * 9), "shape"),
        (edit(FIRST + "shape", "25"), "shape"),
        (edit(FIRST + "nbytes", 0), "nbytes"),
        (merge(edit(FIRST + "nbytes", 80), edit(FIRST + "shape", [40])), "no overlap"),
        (edit("records", {}), "records"),
        (edit("metadata", 3), "metadata"),
    ],
)
def test_hostile_index_is_refused(tmp_path: Path, change: Edit, complaint: str) -> None:
    arrays = {"first": np.ones(25, "float16"), "second": np.ones(50, "float32"), "third": np.ones(90, "float32")}
    write(tmp_path, arrays, max_shard_bytes=500)
    content = index(tmp_path)
    assert [shard["nbytes"] for shard in content["records"]] == [264, 360]
    change(content)
    (tmp_path / "tensor-cache.json").write_text(json.dumps(content))
    with pytest.raises(BundleError) as caught:
        open_params(tmp_path, None)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"records": 1e999}', b"[" * 100_000, b'{"records": NaN}']
)
def test_index_that_is_no_index_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tensor-cache.json").write_bytes(raw)
    with pytest.raises(BundleError, match=r"tensor-cache\.json"):
        open_params(tmp_path, None)


def test_huge_index_is_refused_unparsed(tmp_path: Path) -> None:
    with (tmp_path / "tensor-cache.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match="too large"):
        open_params(tmp_path, None)


def test_missing_index_and_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"(missing|cannot read) file in .*tensor-cache\.json"):
        open_params(tmp_path, None)
    with pytest.raises(BundleError, match=r"(missing|cannot read) file in .*tensor-cache\.json"):
        open_params(tmp_path / "nowhere", None)


@pytest.mark.parametrize("size", [0, 1, 359, 361])
def test_shard_of_a_killed_copy_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path, {"w": np.ones(90, "float32")})
    os.truncate(tmp_path / "params_shard_0.bin", size)
    with pytest.raises(BundleError, match=f"expected 360 bytes; found {size}"):
        open_params(tmp_path, None)


def test_shard_that_is_no_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"w": np.ones(90, "float32")})
    (tmp_path / "params_shard_0.bin").unlink()
    (tmp_path / "params_shard_0.bin").mkdir()
    with pytest.raises(BundleError, match="a regular file"):
        open_params(tmp_path, None)


def test_manifest_and_index_must_agree(bundle: Path, arrays: dict[str, np.ndarray]) -> None:
    manifest = read_manifest(bundle)
    assert list(open_params(bundle, manifest)) == list(arrays)
    less = manifest.model_copy(update={"params": manifest.params[1:]})
    with pytest.raises(BundleError, match="the tensor layer.0.float16"):
        open_params(bundle, less)
    shape = manifest.params[0].model_copy(update={"shape": (5, 3)})
    with pytest.raises(BundleError, match="the tensor layer.0.float16"):
        open_params(bundle, manifest.model_copy(update={"params": (shape, *manifest.params[1:])}))
    files = {path: info for path, info in manifest.files.items() if path != "params_shard_0.bin"}
    with pytest.raises(BundleError, match=r"params_shard_0\.bin.*an entry in the manifest"):
        open_params(bundle, manifest.model_copy(update={"files": files}))


# --- zero copy ---


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_is_the_mapped_memory(tmp_path: Path, dtype: str) -> None:
    array = np.arange(100).astype(dtype).reshape(4, 25)
    write(tmp_path, {"pad": np.ones(3, "uint8"), "w": array})
    view = open_params(tmp_path, None)["w"]
    tensor = to_tvm(view)
    assert str(tensor.dtype) == dtype
    assert tuple(tensor.shape) == (4, 25)
    assert np.from_dlpack(tensor).ctypes.data == view.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_tensor_outlives_everything_else(tmp_path: Path) -> None:
    array = np.arange(1 << 18, dtype="uint32")
    write(tmp_path, {"w": array}, max_shard_bytes=2 << 20)
    tensor = to_tvm(open_params(tmp_path, None)["w"])
    gc.collect()
    (tmp_path / "params_shard_0.bin").unlink()
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_scalar_is_a_tensor_without_dimensions(tmp_path: Path) -> None:
    write(tmp_path, {"w": np.array(2.5, "float32")})
    tensor = to_tvm(open_params(tmp_path, None)["w"])
    assert tuple(tensor.shape) == ()
    assert float(tensor.numpy()) == 2.5


def test_array_that_compiled_code_could_not_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"w": np.ones((64, 64), "float32")}, max_shard_bytes=1 << 20)
    view = open_params(tmp_path, None)["w"]
    with pytest.raises(BundleError, match="C order"):
        to_tvm(view.T)
    with pytest.raises(BundleError, match="multiple of 64"):
        to_tvm(view.reshape(-1)[1:])


def _memory(*fields: str) -> int:
    """Bytes of this process, from the kernel. Anonymous and Private_Dirty are its own: not to be dropped."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return sum(sizes[field] for field in fields) * 1024


needs_smaps = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
SHARD = 32 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """256 MB in 8 shards; every word of shard i is i."""
    directory = tmp_path_factory.mktemp("large")
    with ParamsWriter(directory) as writer:
        for i in range(8):
            writer.add(f"w{i}", np.full(SHARD // 4, i, dtype="uint32"))
        for file in writer.finish():
            # Until it is on the disk, a page counts as dirty, and as private where one process maps it.
            with (directory / file).open("rb") as written:
                os.fsync(written.fileno())
    return directory


@needs_smaps
@pytest.mark.parametrize("preload", ["none", "willneed", "populate"])
def test_256_mb_take_no_private_memory(large: Path, preload: Preload) -> None:
    gc.collect()
    private, resident = _memory("Anonymous", "Private_Dirty"), _memory("Rss")
    params = open_params(large, None, preload=preload)
    tensors = [to_tvm(array) for array in params.values()]
    # One word of every page, read through the tensors: all of it gets resident.
    total = sum(int(np.from_dlpack(tensor)[::1024].sum()) for tensor in tensors)
    assert total == sum(range(8)) * (SHARD // 4096)
    assert _memory("Rss") - resident > 7 * SHARD
    assert _memory("Anonymous", "Private_Dirty") - private < 4 << 20


@needs_smaps
def test_only_populate_reads_before_it_returns(large: Path) -> None:
    before = _memory("Rss")
    params = open_params(large, None, preload="populate")
    assert _memory("Rss") - before > 7 * SHARD
    assert len(params) == 8
    del params
    before = _memory("Rss")
    assert len(open_params(large, None)) == 8
    assert _memory("Rss") - before < SHARD


@pytest.mark.skipif(sys.platform != "linux", reason="counts file descriptors in /proc")
def test_too_many_shards_is_a_resource_error(tmp_path: Path) -> None:
    import resource

    write(tmp_path, {f"w{i}": np.ones(64, "uint8") for i in range(40)}, max_shard_bytes=64)
    used = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        with pytest.raises(ResourceError, match="ulimit -n"):
            open_params(tmp_path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
