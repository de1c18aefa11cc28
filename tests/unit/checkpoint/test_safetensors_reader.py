from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlcpipe.checkpoint.safetensors_reader import (
    CHUNK_ELEMENTS,
    MAX_HEADER_BYTES,
    TensorInfo,
    read_bytes,
    read_float32,
    read_header,
)
from mlcpipe.errors import CheckpointError, ConfigError, ResourceError
from mlcpipe.support.json_files import read_json_object, shown
from tests.unit.checkpoint.helpers import numbers, write_header, write_raw, write_tensors


def only(path: Path) -> TensorInfo:
    (info,) = read_header(path)
    return info


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_finite_bfloat16_is_widened_as_torch_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    bits = np.arange(2**16, dtype=np.uint32)
    finite = bits[(bits & 0x7F80) != 0x7F80].astype(np.uint16)
    values = torch.from_numpy(finite.view(np.int16)).view(torch.bfloat16).reshape(-1, 2)
    save_file({"w": values}, tmp_path / "m.safetensors")
    read = read_float32(only(tmp_path / "m.safetensors"))
    assert read.dtype == np.float32 and read.flags.c_contiguous and read.flags.writeable
    np.testing.assert_array_equal(read.view(np.uint32), values.float().numpy().view(np.uint32))


def test_every_finite_float16_is_widened_as_numpy_does(tmp_path: Path) -> None:
    values = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    values = values[np.isfinite(values)].reshape(2, -1)
    read = read_float32(only(write_tensors(tmp_path / "m.safetensors", {"w": values})))
    np.testing.assert_array_equal(read, values.astype(np.float32))


@pytest.mark.parametrize("count", [0, 1, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_chunks_meet_without_a_seam(tmp_path: Path, count: int, dtype: str) -> None:
    base = numbers(count)
    stored = (base.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else base.astype(dtype)
    path = write_tensors(tmp_path / "m.safetensors", {"before": numbers(3), "w": stored, "z": numbers(5)})
    (info,) = (tensor for tensor in read_header(path) if tensor.name == "w")
    expected = (stored.astype(np.uint32) << 16).view(np.float32) if dtype == "uint16" else stored.astype("f4")
    np.testing.assert_array_equal(read_float32(info), expected)


def test_a_scalar_and_an_empty_tensor(tmp_path: Path) -> None:
    arrays = {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float32), "x": numbers(2)}
    read = {info.name: read_float32(info) for info in read_header(write_tensors(tmp_path / "m", arrays))}
    assert read["scalar"].shape == () and read["scalar"] == 2.5
    assert read["empty"].shape == (0, 4)


def test_info_says_where_the_bytes_lie(tmp_path: Path) -> None:
    array = numbers(3, 4)
    path = write_tensors(tmp_path / "m.safetensors", {"a": numbers(7), "w": array})
    info = next(tensor for tensor in read_header(path) if tensor.name == "w")
    assert (info.shape, info.dtype, info.nbytes, info.file) == ((3, 4), "float32", 48, path)
    assert path.read_bytes()[info.offset : info.offset + info.nbytes] == array.tobytes()
    assert read_bytes(info) == array.tobytes()
    assert read_bytes(info).readonly


def test_reading_takes_one_copy_and_little_more(tmp_path: Path) -> None:
    stored = np.ones((2048, 4096), np.uint16)
    info = only(write_tensors(tmp_path / "m.safetensors", {"w": stored}))
    tracemalloc.start()
    try:
        read = read_float32(info)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read.nbytes <= peak < read.nbytes + 3 * 2**20


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("index", [(0, 0), (2, 1), (2, CHUNK_ELEMENTS - 1)])
def test_the_first_number_that_is_not_finite_is_named(
    tmp_path: Path, value: float, dtype: str, index: tuple[int, int]
) -> None:
    array = np.zeros((3, CHUNK_ELEMENTS), np.float32)
    array[index] = value
    array[2, CHUNK_ELEMENTS - 1] = value
    stored = (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "uint16" else array.astype(dtype)
    info = only(write_tensors(tmp_path / "m.safetensors", {"layer.w": stored}))
    with pytest.raises(CheckpointError, match=r"'layer\.w' is not finite .*" + f"{value} at index.*") as caught:
        read_float32(info)
    assert f"[{index[0]}, {index[1]}]" in str(caught.value)


@pytest.mark.parametrize(("dtype", "name"), [("I64", "int64"), ("F64", "float64"), ("F8_E4M3", "float8_e4m3fn")])
def test_other_dtypes_are_listed_and_refused_when_read(tmp_path: Path, dtype: str, name: str) -> None:
    info = only(write_header(tmp_path / "m", {"ids": entry(0, 8, [8] if "F8" in dtype else [1], dtype)}, bytes(8)))
    assert info.dtype == name
    assert read_bytes(info) == bytes(8)
    with pytest.raises(CheckpointError, match=f"'ids' has an unsupported dtype .* found {name}"):
        read_float32(info)


@pytest.mark.parametrize("read", [read_float32, read_bytes])
def test_a_file_cut_after_it_was_opened(tmp_path: Path, read: Any) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": numbers(100)})
    info = only(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="the file ends inside tensor 'w'"):
        read(info)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read tensor 'w'"):
        read(info)


def test_no_memory_for_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = only(write_tensors(tmp_path / "m.safetensors", {"w": numbers(10, 10)}))

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", no_memory)
    with pytest.raises(ResourceError, match="memory for tensor 'w' .*expected 400 free bytes"):
        read_float32(info)


GOOD = entry(0, 8)
HOSTILE: dict[str, tuple[Any, int, str]] = {
    # name: (header, bytes of data, message)
    "data cut short": ({"a": GOOD}, 7, "truncated.*expected .* the end of tensor 'a'"),
    "tail": ({"a": GOOD}, 9, "bytes after the last tensor"),
    "tail without tensors": ({}, 1, "bytes after the last tensor"),
    "hole at the start": ({"a": entry(4, 8)}, 8, "unused bytes between the header and tensor 'a'"),
    "hole": ({"a": GOOD, "b": entry(12, 16)}, 16, "unused bytes between tensor 'a' and tensor 'b'"),
    "overlap": ({"a": GOOD, "b": entry(4, 12)}, 12, "tensor 'b' overlaps tensor 'a'"),
    "the same bytes twice": ({"a": GOOD, "b": GOOD}, 8, "overlaps"),
    "out of range": ({"a": entry(0, 2**40, [2**38])}, 8, "truncated"),
    "negative offset": ({"a": entry(-8, 0, [2])}, 8, "'a' has bad data_offsets"),
    "offsets swapped": ({"a": entry(8, 0, [2])}, 8, "'a' has bad data_offsets"),
    "three offsets": ({"a": {**GOOD, "data_offsets": [0, 4, 8]}}, 8, "'a' has bad data_offsets"),
    "offsets of text": ({"a": {**GOOD, "data_offsets": ["0", "8"]}}, 8, "'a' has bad data_offsets"),
    "offsets of truth": ({"a": {**GOOD, "data_offsets": [False, 8]}}, 8, "'a' has bad data_offsets"),
    "offsets not a list": ({"a": {**GOOD, "data_offsets": 8}}, 8, "'a' has bad data_offsets"),
    "wrong size": ({"a": entry(0, 8, [3])}, 8, r"'a' has the wrong size.*expected 12 bytes for float32\[3\]"),
    "overflowing shape": ({"a": entry(0, 0, [2**33, 2**33])}, 0, "'a' has the wrong size"),
    "absurd dimension": ({"a": entry(0, 0, [0, 10**30])}, 0, "'a' has a bad shape"),
    "absurd rank": ({"a": entry(0, 4, [1] * 1000)}, 4, "'a' has a bad shape"),
    "negative dimension": ({"a": entry(0, 8, [-1, -2])}, 8, "'a' has a bad shape"),
    "fractional dimension": ({"a": entry(0, 8, [2.0])}, 8, "'a' has a bad shape"),  # type: ignore[list-item]
    "shape not a list": ({"a": {**GOOD, "shape": "2"}}, 8, "'a' has a bad shape"),
    "half a byte": ({"a": entry(0, 1, [1], "F4")}, 1, "'a' has the wrong size"),
    "unknown dtype": ({"a": {**GOOD, "dtype": "Q7"}}, 8, "'a' has an unknown dtype.*found 'Q7'"),
    "dtype not text": ({"a": {**GOOD, "dtype": ["F32"]}}, 8, "'a' has an unknown dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "'a' has an incomplete entry"),
    "entry not an object": ({"a": [GOOD]}, 8, "'a' has an incomplete entry"),
    "empty name": ({"": GOOD}, 8, "bad tensor name ''"),
    "endless name": ({"a" * 5000: GOOD}, 8, "bad tensor name 'aaa"),
    "name with an escape sequence": ({"a\x1b[2J\n": GOOD}, 8, r"bad tensor name 'a\\x1b"),
    "name with half a surrogate": ({"a\ud800": GOOD}, 8, r"half of a surrogate pair.*; found '\\ud800'"),
    "metadata not text": ({"__metadata__": {"a": 1}, "a": GOOD}, 8, "bad __metadata__"),
    "metadata not an object": ({"__metadata__": "x", "a": GOOD}, 8, "bad __metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    header, size, message = HOSTILE[case]
    path = write_header(tmp_path / "bad.safetensors", header, bytes(size))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    line = str(caught.value)
    assert "bad.safetensors" in line
    assert "\n" not in line and "\x1b" not in line and len(line) < 600


RAW: dict[str, tuple[bytes, int | None, str]] = {
    # name: (header, length field if it lies, message)
    "empty header": (b"", None, "not a safetensors header"),
    "not an object": (b"[]", None, "not a safetensors header"),
    "leading space": (b" {}", None, "not a safetensors header"),
    "not JSON": (b"{'a': 1}", None, "not valid JSON"),
    "two values": (b"{} {}", None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', None, "not UTF-8.*a bad byte at offset 2"),
    "deep": (b'{"a":' * 200_000, None, "nested too deeply"),
    "deep lists": (b'{"a":' + b"[" * 200_000, None, "nested too deeply"),
    "number without end": (b'{"a": ' + b"9" * 10_000 + b"}", None, "not valid JSON"),
    "duplicate tensor": (
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        None,
        "duplicate key 'a'",
    ),
    "duplicate dtype": (
        b'{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}',
        None,
        "duplicate key 'dtype'",
    ),
    "longer than the file": (b"{}", 3, "truncated.*expected 11 bytes for the header.*found 10"),
    "longer than allowed": (b"{}", MAX_HEADER_BYTES + 1, "header too long.*expected at most 33554432"),
    "longest length": (b"{}", 2**64 - 1, "header too long"),
}


@pytest.mark.parametrize("case", RAW)
def test_hostile_bytes(tmp_path: Path, case: str) -> None:
    header, length, message = RAW[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(write_raw(tmp_path / "bad.safetensors", header, length=length))
    assert "bad.safetensors" in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "short").write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=f"expected at least 8 bytes; found {size}"):
        read_header(tmp_path / "short")


def test_a_sparse_file_with_an_allowed_but_absent_header_is_not_believed(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "sparse", b"{}", length=MAX_HEADER_BYTES - 1)
    with path.open("r+b") as file:
        file.truncate(60_000_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_header(path)


def test_padding_after_the_header_is_part_of_the_format(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m", b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}    ', bytes(4))
    assert only(path).name == "a"


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    arrays = {"b": numbers(3, 5), "a": numbers(7).astype(np.float16), "c": numbers(2, 0)}
    save_file(arrays, tmp_path / "m.safetensors")
    read = {info.name: read_float32(info) for info in read_header(tmp_path / "m.safetensors")}
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array.astype(np.float32))


def test_nesting_just_shallow_enough_for_the_parser(tmp_path: Path) -> None:
    for depth in range(700, 1100, 5):
        header = b'{"a":' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(CheckpointError, match="nested too deeply|'a' has an incomplete entry"):
            read_header(write_raw(tmp_path / "bad.safetensors", header))


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tensors(tmp_path / "m.safetensors", {"w": numbers(1)})

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(CheckpointError, match=r"cannot read a shard in .*m\.safetensors.*Permission denied"):
        read_header(path)
    with pytest.raises(ConfigError, match=r"cannot read file in .*m\.safetensors.*Permission denied"):
        read_json_object(path, limit=1000, error=ConfigError)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_a_name_that_the_system_refuses(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot read weight file|missing weight file"):
        read_header(tmp_path / name)


def test_shown_is_short_and_printable_whatever_it_gets() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert shown(nested) == "a deeply nested list"
    assert shown("\x1b[2J\n\u202e") == r"'\x1b[2J\n\u202e'"
    assert len(shown("a" * 10**6)) < 120
