"""The Swift package and its tests, built once, on Linux."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlcpipe.compiler.swift_package import write_package_sources
from tests.once import Once
from tests.swift.swift import LINKER, WORK, swift

HERE = Path(__file__).parent


def write_sources(folder: Path) -> Path:
    """The package without a model."""
    folder.mkdir()
    write_package_sources(folder, "mlcpipe_0123456789abcdef_code")
    return folder


@pytest.fixture(scope="session")
def built(once: Once) -> Path:
    """A folder with the package, `Mlcpipe`, and the package of its tests, `tests`, which is built."""

    def work(folder: Path) -> str:
        write_sources(folder / "Mlcpipe")
        shutil.copytree(HERE / "package", folder / "tests")
        said = swift(folder, "swift-build", "--build-tests", "--package-path", f"{WORK}/tests", *LINKER)
        assert "warning:" not in said, said[-6000:]
        return str(folder)

    return Path(once("swift-package", work))
