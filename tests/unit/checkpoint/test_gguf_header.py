"""The reader of GGUF headers takes what the format allows and refuses the rest in one line."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="files are written by the gguf package")

from mlcpipe.checkpoint.gguf.header import read_header
from mlcpipe.checkpoint.gguf.metadata import MAX_PAIRS, MAX_STRING_BYTES
from mlcpipe.checkpoint.gguf.shards import read_shards
from mlcpipe.checkpoint.safetensors_reader import MAX_TENSORS
from mlcpipe.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.gguf_files import ARRAY, STRING, U32, entry, pair, raw_file, text

ZEROS = b"\0" * 128  # the data of one tensor of 32 float32
ALIGNMENT = "general.alignment"


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def one(name: str | bytes = "t", extents: tuple[int, ...] = (32,), offset: int = 0, kind: int = 0) -> dict[str, object]:
    return {"entries": [entry(name, extents, offset, kind)], "data": ZEROS}


HOSTILE = {
    "empty": ({"counts": (0, 2**60)}, "too many tensors or keys"),
    "tensors without end": ({"counts": (2**62, 0)}, "too many tensors or keys"),
    "more keys than bytes": ({"counts": (0, MAX_PAIRS)}, "truncated"),
    "more tensors than bytes": ({"counts": (MAX_TENSORS, 0)}, "truncated"),
    "version 1": ({"version": 1}, "found 1"),
    "version 4": ({"version": 4}, "found 4"),
    "big-endian": ({"version": 3 << 24}, "a big-endian file"),
    "string without end": ({"pairs": [text("a") + u32(STRING) + struct.pack("<Q", 2**62)]}, "too long"),
    "string past the end": ({"pairs": [text("a") + u32(STRING) + struct.pack("<Q", 100)]}, "truncated"),
    "long key": ({"pairs": [pair("k" * 300, U32, u32(1))]}, "too long"),
    "no key": ({"pairs": [pair("", U32, u32(1))]}, "bad name"),
    "control characters in a key": ({"pairs": [pair("a\x1b[2J", U32, u32(1))]}, "bad name"),
    "key that is not UTF-8": ({"pairs": [pair(b"\xff", U32, u32(1))]}, "not UTF-8"),
    "key twice": ({"pairs": [pair("a", U32, u32(1))] * 2}, "stored twice"),
    "unknown type": ({"pairs": [pair("a", 13, u32(1))]}, "unknown type of a value"),
    "boolean of 2": ({"pairs": [pair("a", 7, b"\2")]}, "bad boolean"),
    "nested arrays": ({"pairs": [pair("a", ARRAY, array(ARRAY, 1, array(ARRAY, 1)))]}, "nested arrays"),
    "numbers without end": ({"pairs": [pair("a", ARRAY, array(0, 2**40, ZEROS))]}, "truncated"),
    "product past 64 bits": ({"pairs": [pair("a", ARRAY, array(10, 2**61, ZEROS))]}, "truncated"),
    "strings without end": ({"pairs": [pair("a", ARRAY, array(STRING, 2**40, ZEROS))]}, "too many strings"),
    "long string in an array": (
        {"pairs": [pair("a", ARRAY, array(STRING, 2, text("b") + struct.pack("<Q", MAX_STRING_BYTES + 1)))]},
        "too long",
    ),
    "array of unknown type": ({"pairs": [pair("a", ARRAY, array(99, 1, ZEROS))]}, "unknown type of a value"),
    "alignment 0": ({"pairs": [pair(ALIGNMENT, U32, u32(0))], **one()}, "power of two"),
    "alignment 48": ({"pairs": [pair(ALIGNMENT, U32, u32(48))], **one()}, "power of two"),
    "alignment 2^31": ({"pairs": [pair(ALIGNMENT, U32, u32(1 << 31))], **one()}, "power of two"),
    "tensor without name": (one(""), "bad name"),
    "control characters in a tensor": (one("a\r"), "bad name"),
    "rank 0": (one(extents=()), "bad rank"),
    "rank 5": (one(extents=(32, 1, 1, 1, 1)), "bad rank"),
    "rank 2^32 - 1": ({"entries": [text("t") + u32(2**32 - 1)]}, "bad rank"),
    "extent 0": (one(extents=(32, 0)), "bad shape"),
    "extents past 64 bits": (one(extents=(2**33, 2**33)), "truncated"),
    "extents that wrap to 128 bytes": (one(extents=(32, 2**40, 2**24)), "truncated"),
    "extent of 2^63": (one(extents=(2**63,)), "bad shape"),
    "unknown type of tensor": (one(kind=43), "unknown type"),
    "type that was removed": (one(kind=4), "unknown type"),
    "row that is not of whole blocks": (one(extents=(33,), kind=2), "bad row"),
    "offset past the end": (one(offset=2**40), "a gap"),
    "offset past 64 bits": (one(offset=2**64 - 32), "a gap"),
    "misaligned offset": (one(offset=4), "a gap"),
    "size past the end": (one(extents=(64,)), "truncated"),
    "bytes after the last tensor": ({**one(), "data": ZEROS + b"\0"}, "bytes after"),
    "tensor twice": ({"entries": [entry("t", [32], 0), entry("t", [32], 128)], "data": 2 * ZEROS}, "stored twice"),
    "overlap": ({"entries": [entry("a", [32], 0), entry("b", [32], 0)], "data": ZEROS}, "overlaps"),
    "overlap by half": ({"entries": [entry("a", [32], 0), entry("b", [32], 64)], "data": 2 * ZEROS}, "overlaps"),
    "gap": ({"entries": [entry("a", [32], 0), entry("b", [32], 160)], "data": 3 * ZEROS}, "a gap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_one_line(tmp_path: Path, case: str) -> None:
    parts, message = HOSTILE[case]
    path = raw_file(tmp_path / "m.gguf", **parts)  # type: ignore[arg-type]
    tracemalloc.start()
    began = time.process_time()
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value) and "m.gguf" in str(error.value)
    assert peak < 4 << 20  # refused before anything of the stated size is allocated
    assert time.process_time() - began < 5  # of loops, which took for ever elsewhere


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF", b"GGUF\3\0\0\0", b"\x93NUMPY" + ZEROS])
def test_no_gguf_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated GGUF file|not a GGUF file"):
        read_header(path)


def test_every_prefix_is_refused(tmp_path: Path) -> None:
    pairs = [pair("a", ARRAY, array(STRING, 2, text("b") + text("cd"))), pair("e", ARRAY, array(4, 2, u32(1) + u32(2)))]
    whole = raw_file(tmp_path / "whole.gguf", pairs, [entry("t", [32], 0)], ZEROS).read_bytes()
    path = tmp_path / "m.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            read_header(path)


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type(tmp_path: Path, version: int) -> None:
    packed = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    pairs = [pair(f"n{kind}", kind, struct.pack(f"<{code}", 7)) for kind, code in packed.items()]
    pairs += [
        pair(f"a{kind}", ARRAY, array(kind, 3, struct.pack(f"<3{code}", 1, 2, 3))) for kind, code in packed.items()
    ]
    pairs += [pair("yes", 7, b"\1"), pair("text", STRING, text("žluť")), pair("none", ARRAY, array(STRING, 0))]
    pairs += [pair("words", ARRAY, array(STRING, 3, text("a") + text("") + text("▁b")))]
    values = read_header(raw_file(tmp_path / "m.gguf", pairs, version=version)).metadata.values
    assert [values[f"n{kind}"] for kind in packed] == [7] * len(packed)
    assert all(np.array_equal(values[f"a{kind}"], [1, 2, 3]) for kind in packed)  # type: ignore[arg-type]
    assert values["yes"] is True and values["text"] == "žluť"
    assert values["none"] == [] and values["words"] == ["a", "", "▁b"]


def test_tensors_as_the_package_writes_them(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(5, np.float16),
        "c": np.zeros((1, 2, 4), np.float32),
    }
    for name, values in arrays.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_header(tmp_path / "m.gguf").tensors
    assert {one.name: (one.shape, one.dtype) for one in tensors} == {
        "a": ((2, 3), "float32"), "b": ((5,), "float16"), "c": ((1, 2, 4), "float32")
    }  # fmt: skip
    content = (tmp_path / "m.gguf").read_bytes()
    for tensor in tensors:
        assert content[tensor.offset : tensor.offset + tensor.nbytes] == arrays[tensor.name].tobytes()


def test_a_large_vocabulary_is_read_in_seconds(tmp_path: Path) -> None:
    tokens = b"".join(text(f"token {i}") for i in range(256_000))
    pairs = [
        pair("tokens", ARRAY, array(STRING, 256_000, tokens)),
        pair("merges", ARRAY, array(STRING, 512_000, 2 * tokens)),
    ]
    pairs.append(pair("scores", ARRAY, array(6, 256_000, b"\0" * 4 * 256_000)))
    path = raw_file(tmp_path / "m.gguf", pairs)
    began = time.process_time()
    values = read_header(path).metadata.values
    assert time.process_time() - began < 10  # 0.3 s on a quiet machine
    assert [len(values[key]) for key in ("tokens", "merges", "scores")] == [256_000, 512_000, 256_000]  # type: ignore[arg-type]


def parts(folder: Path, count: int = 3, total: int | None = None) -> list[Path]:
    files = []
    for number in range(count):
        keys = [pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))]
        keys.append(pair("split.tensors.count", 5, struct.pack("<i", count if total is None else total)))
        files.append(folder / f"m-{number + 1:05}-of-{count:05}.gguf")
        raw_file(files[-1], keys, [entry(f"t{number}", [32], 0)], ZEROS)
    return files


def test_parts_are_read_as_one(tmp_path: Path) -> None:
    files = parts(tmp_path)
    for given in files:
        header, found = read_shards(given)
        assert list(found) == files
        assert [tensor.name for tensor in header.tensors] == ["t0", "t1", "t2"]
        assert [tensor.file for tensor in header.tensors] == files


def test_metadata_of_later_parts_is_not_kept(tmp_path: Path) -> None:
    """A part is checked before the next one is read: 40 links to one file would take 40 times its memory."""
    long = pair("a", ARRAY, array(0, 1 << 20, bytes(1 << 20)))
    count, files = 40, parts(tmp_path, 40)
    for number, file in enumerate(files):
        keys = [pair("split.no", 2, struct.pack("<H", number)), pair("split.count", 2, struct.pack("<H", count))]
        raw_file(file, [*keys, long], [entry(f"t{number}", [32], 0)], ZEROS)
    tracemalloc.start()
    header, _ = read_shards(files[0])
    assert len(header.tensors) == count and tracemalloc.get_traced_memory()[1] < 10 << 20
    for file in files[1:]:
        file.unlink()
        file.symlink_to(files[0])
    tracemalloc.reset_peak()
    with pytest.raises(CheckpointError, match="found part 1 of 40"):
        read_shards(files[0])
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    files = parts(tmp_path)
    contents = [file.read_bytes() for file in files]
    files[1].unlink()
    with pytest.raises(CheckpointError, match="part 'm-00002-of-00003.gguf' of a split model is missing"):
        read_shards(files[0])
    files[1].write_bytes(contents[0])  # a part twice
    with pytest.raises(CheckpointError, match="found part 1 of 3"):
        read_shards(files[0])
    (tmp_path / "other").mkdir()
    other = parts(tmp_path / "other", total=9)
    files[1].write_bytes(other[1].read_bytes())
    with pytest.raises(CheckpointError, match="a model with 9 tensors"):
        read_shards(files[0])
    with pytest.raises(CheckpointError, match="expected 9"):
        read_shards(other[0])
    same = raw_file(
        files[1],
        [pair("split.no", 2, b"\1\0"), pair("split.count", 2, b"\3\0"), pair("split.tensors.count", 5, u32(3))],
        [entry("t0", [32], 0)],
        ZEROS,
    )
    with pytest.raises(CheckpointError, match="of another part is stored again"):
        read_shards(same)
    alone = raw_file(tmp_path / "alone.gguf", [pair("split.count", 2, b"\3\0")], [entry("t0", [32], 0)], ZEROS)
    with pytest.raises(CheckpointError, match="part 1 of 3"):
        read_shards(alone)
