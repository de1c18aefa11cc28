"""The native runtime's parts, built for tests."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mlcpipe.errors import CompileError, TargetError
from mlcpipe.host.cpu_features import architecture
from tests.conftest import DEMO, UNOPTIMIZED, Bundles, private_cache
from tests.native.cxx import Build, Cxx, find_cxx
from tests.native.engine import Runtime
from tests.once import Once, shared_work

if TYPE_CHECKING:
    from mlcpipe.compiler.native_runtime import DevicePlugin


@pytest.fixture(scope="session")
def cxx(once: Once) -> Cxx:
    """The compiler of small libraries and programs."""
    return find_cxx(once)


@pytest.fixture(scope="session")
def native_library(cxx: Cxx) -> Build:
    """Builds a shared library of sources of the runtime and of tests, and loads it."""
    return cxx.library


@pytest.fixture(scope="session")
def runtime(shared: Path) -> Runtime:
    """The native runtime with TVM's, compiled once for all of pytest's workers: it takes most of a minute."""
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import shared_library

    with shared_work():
        return Runtime(shared_library(find_cxx(), private_cache(shared)))


@pytest.fixture(scope="session")
def vulkan_plugin(shared: Path) -> DevicePlugin:
    """What the native runtime is built with for Vulkan."""
    from mlcpipe.compiler.backends.spirv.native import plugin

    try:
        return plugin(private_cache(shared))
    except CompileError as error:
        pytest.skip(f"needs Vulkan's headers, Debian's libvulkan-dev: {error}")


@pytest.fixture(scope="session")
def vulkan_runtime(shared: Path, vulkan_plugin: DevicePlugin) -> Runtime:
    """The native runtime with Vulkan."""
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import shared_library

    with shared_work():
        return Runtime(shared_library(find_cxx(), private_cache(shared), vulkan_plugin))


@pytest.fixture(scope="session")
def vulkan_bundle(own_cache: Path, shared: Path) -> Path:
    """The demo model for Vulkan, compiled once for all of pytest's workers. Read only."""
    from mlcpipe.devices import vulkan

    try:
        vulkan.choose()
    except TargetError as error:
        pytest.skip(f"needs a Vulkan driver, Debian's mesa-vulkan-drivers: {error}")
    (shared / "demo-vulkan").mkdir(exist_ok=True)
    return Bundles(DEMO, shared / "demo-vulkan", "vulkan")["q4f16_1"]


@pytest.fixture(scope="session")
def program(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime's command line, which loads bundles."""
    from mlcpipe.compiler.link import find_cxx
    from mlcpipe.compiler.native_runtime import write_program

    path = tmp_path_factory.mktemp("program") / "chat"
    with shared_work():
        write_program(find_cxx(), private_cache(shared), None, path)
    return path


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a bundle. Compiled code keeps what it calls of TVM's in variables of its file: Python's TVM and that of the
    native runtime may not load the same one."""
    numbers = itertools.count()
    return lambda bundle: Path(shutil.copytree(bundle, tmp_path / f"bundle{next(numbers)}"))


@pytest.fixture(scope="session")
def sdk_bundles(once: Once, tiny_bundles: Bundles) -> list[Path]:
    """Bundles of two models with static libraries: the demo's for this CPU, the random one for all of its architecture."""
    import mlcpipe
    from mlcpipe.compiler.link import find_zig

    target = {"x86_64": "x86_64-linux", "aarch64": "arm64-linux"}.get(architecture())
    if find_zig() is None or target is None:
        pytest.skip("static libraries need ziglang")

    def work(folder: Path) -> list[str]:
        made = []
        for name, source, scheme, tvm in (
            ("chat", DEMO, "q4f16_1", (UNOPTIMIZED or "[tvm]\n") + 'mcpu = "native"\n'),
            ("tiny-model", tiny_bundles.checkpoint, "q0f32", UNOPTIMIZED),
        ):
            board = folder / f"{name}.toml"
            board.write_text(f'base = "{target}"\n{tvm}', encoding="utf-8")
            made.append(mlcpipe.compile(source, target=str(board), quantization=scheme, output=folder / name))
        return list(map(str, made))

    return list(map(Path, once("sdk-bundles", work)))


@pytest.fixture(scope="session")
def sdk(sdk_bundles: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `mlcpipe package --app native` makes of these bundles."""
    from mlcpipe.cli import main

    output = tmp_path_factory.mktemp("sdk") / "mlcpipe"
    assert main(["package", *map(str, sdk_bundles), "--app", "native", "-o", str(output)]) == 0
    return output
