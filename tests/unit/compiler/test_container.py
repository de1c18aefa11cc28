"""A bundle's data as one file: what is in it, where, and behind a program."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from mlcpipe.bundle import read_manifest
from mlcpipe.cli import main
from mlcpipe.compiler.container import write_container
from mlcpipe.errors import BundleError
from mlcpipe.support.progress import SilentProgress
from tests.conftest import Bundles


def read(path: Path) -> tuple[int, dict[str, bytes]]:
    """Where the container of a file begins, and its files, by the description in mlcpipe/compiler/container.py."""
    data = path.read_bytes()
    magic, length, at, size, digest = struct.unpack("<8s3Q64s", data[-96:])
    begin = len(data) - length
    container = data[begin:]
    index = container[at : at + size]
    assert magic == b"mlcpipe\x01" and hashlib.sha256(index).hexdigest().encode() == digest
    kind, version, count, *sections = struct.unpack_from("<8sII8Q", index)
    assert (kind, version, count) == (b"mlcfiles", 1, 4)
    ends, text, places, manifest = (index[o : o + n] for o, n in zip(sections[::2], sections[1::2]))
    stops = np.frombuffer(ends, np.uint32).tolist()
    names = [text[a:b].decode() for a, b in zip([0, *stops], stops)]
    files = {}
    for name, (offset, nbytes) in zip(names, np.frombuffer(places, np.uint64).reshape(-1, 2).tolist()):
        assert offset % 4096 == 0
        files[name] = container[offset : offset + nbytes]
    assert hashlib.sha256(files["mlcpipe.json"]).hexdigest().encode() == manifest
    return begin, files


def test_data_without_code(tiny_bundles: Bundles, tmp_path: Path) -> None:
    bundle, output = tiny_bundles["q4f16_1"], tmp_path / "model.mlcp"
    assert main(["package", str(bundle), "--app", "weights", "-o", str(output)]) == 0
    begin, files = read(output)
    listed = read_manifest(bundle).files
    assert begin == 0 and set(files) == {"mlcpipe.json", *(name for name in listed if not name.startswith("lib/"))}
    assert all(content == (bundle / name).read_bytes() for name, content in files.items())


def test_behind_a_program(tiny_bundles: Bundles, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF" + bytes(70_000))
    output = write_container(tiny_bundles["q4f16_1"], tmp_path / "chat", SilentProgress(), program=program)
    begin, files = read(output)
    assert begin == 2 << 16 and output.read_bytes().startswith(program.read_bytes()) and "tensor-cache.json" in files
    assert os.access(output, os.X_OK) and [path.name for path in tmp_path.iterdir()] == ["program", "chat"]


def test_a_damaged_bundle_and_a_file_in_the_way(
    tiny_bundles: Bundles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, output = tmp_path / "bundle", tmp_path / "model.mlcp"
    shutil.copytree(tiny_bundles["q4f16_1"], bundle)
    output.write_text("mine")
    assert main(["package", str(bundle), "--app", "weights", "-o", str(output)]) == 2
    assert "the file exists" in capsys.readouterr().err and output.read_text() == "mine"
    with (bundle / "params_shard_0.bin").open("r+b") as shard:
        shard.write(b"\xff")
    with pytest.raises(BundleError, match="params_shard_0.bin"):
        write_container(bundle, tmp_path / "new.mlcp", SilentProgress())
    assert not (tmp_path / "new.mlcp").exists()


@pytest.mark.parametrize(
    ("app", "triple", "library", "words"),
    [
        ("android", "riscv64-linux-android", "lib/model.so", "no code for Android"),
        ("android", "aarch64-linux-android", "lib/model.a", "no code for Android"),
        ("ios", "arm64-apple-ios", "lib/model.a", "no static library of mlcpipe"),
    ],
)
def test_a_manifest_that_does_not_tell_the_truth(
    app: str, triple: str, library: str, words: str, tiny_bundles: Bundles, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bundle = Path(shutil.copytree(tiny_bundles["q4f16_1"], tmp_path / "bundle"))
    (code,) = (bundle / "lib").iterdir()
    code.rename(bundle / library)
    manifest = json.loads((bundle / "mlcpipe.json").read_text())
    manifest["files"][library] = manifest["files"].pop(f"lib/{code.name}")
    manifest["target"]["triple"] = triple
    (bundle / "mlcpipe.json").write_text(json.dumps(manifest))
    assert main(["package", str(bundle), "--app", app, "-o", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()
