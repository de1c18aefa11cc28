"""What tests of the Vulkan plugin share. Without a loader, a device, headers or glslang they skip and say which.

All of them run under the validation layer where it is installed: its messages, synchronization hazards too, are errors.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.errors import TargetError
from tests.vulkan.kernels import Kernel, module_bytes

LAYER = "VK_LAYER_KHRONOS_validation"
SHARED = Path(__file__).parents[2] / "build" / "vulkan"


def has_layer() -> bool:
    """Whether the loader finds the validation layer (VkLayerProperties: char[256], u32, u32, char[256])."""
    try:
        loader = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return False
    count = ctypes.c_uint32(0)
    loader.vkEnumerateInstanceLayerProperties(ctypes.byref(count), None)
    found = ctypes.create_string_buffer(520 * max(count.value, 1))
    loader.vkEnumerateInstanceLayerProperties(ctypes.byref(count), found)
    return LAYER in {ctypes.string_at(ctypes.addressof(found) + 520 * i).decode() for i in range(count.value)}


@pytest.fixture(scope="session")
def plugin(own_cache: Path) -> Path:
    """The compiled plugin, in this session's cache. One compilation serves all workers and later sessions."""
    from mlcpipe.runtime import vulkan_plugin

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLCPIPE_CACHE", str(SHARED))
        try:
            built = vulkan_plugin.build()
        except TargetError as error:
            pytest.skip(f"needs a C++ compiler and Vulkan's headers: {error}")
    target = own_cache / "vulkan" / built.name
    target.parent.mkdir(exist_ok=True)
    if not target.exists():
        shutil.copy2(built, target)
    return target


@pytest.fixture(scope="session")
def gpu(plugin: Path) -> Iterator[Any]:
    """The device that tests of this process use, watched by the validation layer."""
    if has_layer():
        os.environ.setdefault("VK_INSTANCE_LAYERS", LAYER)
    from mlcpipe.runtime import vulkan

    try:
        device = vulkan.choose()
    except TargetError as error:
        pytest.skip(f"needs a Vulkan driver, Debian's mesa-vulkan-drivers: {error}")
    yield device
    assert list(vulkan.function("validation_messages")()) == []


@pytest.fixture(scope="session")
def compiled(gpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[Kernel]], Any]:
    """Kernels in GLSL to a runtime module."""
    if shutil.which("glslangValidator") is None:
        pytest.skip("needs glslangValidator, Debian's glslang-tools")
    from mlcpipe.runtime import vulkan

    folder = tmp_path_factory.mktemp("glsl")
    return lambda kernels: vulkan.function("create_module")(module_bytes(kernels, folder))
