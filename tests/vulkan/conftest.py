"""What tests of the Vulkan plugin share. Without a loader, a device, headers or glslang they skip and say which.

All of them run under the validation layer where it is installed: its messages, synchronization hazards too, are errors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import TargetError
from tests.once import shared_work
from tests.vulkan.kernels import Kernel, module_bytes
from tests.vulkan.watch import has_layer, watching

ROOT = Path(__file__).parents[2]
Start = Callable[..., dict[str, Any]]
Compiled = Callable[[Sequence[Kernel]], Any]


@pytest.fixture(scope="session")
def plugin(own_cache: Path) -> Path:
    """The plugin, which the first of all workers compiles."""
    from mlcpipe.devices.support import vulkan_plugin

    try:
        with shared_work():
            return vulkan_plugin.build()
    except TargetError as error:
        pytest.skip(f"needs a C++ compiler and Vulkan's headers: {error}")


@pytest.fixture(scope="session")
def gpu(plugin: Path) -> Iterator[Any]:
    """The device that tests of this process use, watched by the validation layer."""
    from mlcpipe.devices import vulkan

    try:
        device = vulkan.choose()
    except TargetError as error:
        pytest.skip(f"needs a Vulkan driver, Debian's mesa-vulkan-drivers: {error}")
    if has_layer() and sys.platform == "linux":  # or nothing watches, and the last line means nothing
        assert "VkLayer_khronos_validation" in Path("/proc/self/maps").read_text()
    yield device
    assert list(vulkan.function("validation_messages")()) == []


@pytest.fixture(scope="session")
def beside_fake(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """`start(module, argument, ..., watched=True, FAKE_...="")`: what `python -m module argument ...` prints as JSON.

    `fake_loader.c` lies between the plugin and the system's loader there; `watched` is under the validation layer.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    folder = tmp_path_factory.mktemp("fake")
    source, library = Path(__file__).with_name("fake_loader.c"), folder / "libvulkan.so.1"
    flags = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-o", str(library), str(source), "-ldl"]
    subprocess.run([str(compiler), *flags], check=True, timeout=120)
    lines = Path("/proc/self/maps").read_text().splitlines()
    real = next(line.split()[-1] for line in lines if "/libvulkan.so.1" in line)

    def start(module: str, *arguments: str, watched: bool = True, **changes: str) -> dict[str, Any]:
        environment = {
            **os.environ,
            **(watching() if watched else {}),
            "LD_LIBRARY_PATH": str(folder),
            "FAKE_REAL": real,
            **changes,
        }
        command = [sys.executable, "-m", module, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        # TVM's pool tells of a failure before it raises it.
        said = [line for line in done.stderr.splitlines() if "pooled_allocator.h" not in line]
        assert (done.returncode, said) == (0, [])
        printed: dict[str, Any] = json.loads(done.stdout)
        return printed

    return start


@pytest.fixture(scope="session")
def compiled(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Kernels in GLSL to a runtime module."""
    if shutil.which("glslangValidator") is None:
        pytest.skip("needs glslangValidator, Debian's glslang-tools")
    from mlcpipe.devices import vulkan

    folder = tmp_path_factory.mktemp("glsl")
    return lambda kernels: vulkan.function("create_module")(module_bytes(kernels, folder))


@pytest.fixture
def kernels_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What a test compiles passes Khronos' tools, where they are installed."""
    from mlcpipe.compiler.backends.spirv import codegen
    from tests.spirv import validity

    written: list[Any] = []
    container = codegen.container

    def keep(kernels: Sequence[Any]) -> bytes:
        written.extend(kernels)
        return container(kernels)

    monkeypatch.setattr(codegen, "container", keep)
    yield
    if written and validity.AVAILABLE:
        validity.check(written, tmp_path)
