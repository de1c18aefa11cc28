"""The native runtime opens a bundle's data in one file; a damaged one is refused in words."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mlcpipe.compiler.container import write_container
from mlcpipe.support.progress import SilentProgress
from tests.conftest import Bundles
from tests.native.engine import BUNDLE, NativeError, Runtime

pytestmark = pytest.mark.full  # compiles TVM's runtime


@pytest.fixture
def container(tiny_bundles: Bundles, tmp_path: Path) -> Path:
    return write_container(tiny_bundles["q4f16_1"], tmp_path / "model.mlcp", SilentProgress())


def test_the_plan_is_that_of_the_folder(runtime: Runtime, container: Path, tiny_bundles: Bundles) -> None:
    folder, file = runtime.plan(tiny_bundles["q4f16_1"]), runtime.plan(container)
    assert (file.weights_bytes, file.kv_bytes) == (folder.weights_bytes, folder.kv_bytes)


def test_data_without_code(runtime: Runtime, container: Path) -> None:
    with pytest.raises(NativeError, match="the bundle has no code for this program in .*model.mlcp") as caught:
        runtime.open(container)
    assert caught.value.code == BUNDLE


def test_inside_another_file(runtime: Runtime, container: Path, tmp_path: Path) -> None:
    data = container.read_bytes()
    for before, words in ((4096, "no code for this program"), (100, "a multiple of 64")):
        package = tmp_path / f"package{before}"
        package.write_bytes(bytes(before) + data + bytes(77))
        with package.open("rb") as file, pytest.raises(NativeError, match=words):
            runtime.open_descriptor(file.fileno(), before, len(data))
        with package.open("rb") as file, pytest.raises(NativeError, match="no model in the file"):
            runtime.open_descriptor(file.fileno(), before, len(data) + 78)
    reader, writer = os.pipe()
    with pytest.raises(NativeError, match="expected a regular file"):
        runtime.open_descriptor(reader, 0, 1000)
    os.close(reader), os.close(writer)


def damaged(data: bytes) -> Callable[[random.Random], bytes]:
    def change(draw: random.Random) -> bytes:
        changed = bytearray(data)
        for _ in range(draw.randint(1, 3)):  # most of them in the index and the trailer
            changed[draw.randrange(len(data)) if draw.random() < 0.2 else -draw.randrange(1, 700)] = draw.randrange(256)
        return bytes(changed) if draw.random() < 0.8 else bytes(changed[: draw.randrange(len(data))])

    return change


def test_damaged_ones_are_refused(runtime: Runtime, container: Path, tmp_path: Path) -> None:
    change, draw, refused, path = damaged(container.read_bytes()), random.Random(3), 0, tmp_path / "damaged.mlcp"
    for _ in range(300):
        path.write_bytes(change(draw))
        try:
            runtime.plan(path)
        except NativeError as error:
            assert error.code == BUNDLE, error
            refused += 1
    assert 150 < refused < 300  # a byte of the weights is no matter of the plan


def test_an_empty_file_and_none(runtime: Runtime, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(NativeError, match="no model in the file in .*empty; expected a container of mlcpipe; found 0"):
        runtime.plan(tmp_path / "empty")
    with pytest.raises(NativeError, match="no bundle in .*none; found No such file"):
        runtime.plan(tmp_path / "none")
