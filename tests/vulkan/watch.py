"""Vulkan's validation layer, under which tests run where it is installed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LAYER = "VK_LAYER_KHRONOS_validation"


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


def watching() -> dict[str, str]:
    """What the environment of a process has beside, so that its use of Vulkan is watched."""
    return {"VK_INSTANCE_LAYERS": LAYER} if has_layer() else {}


@contextmanager
def watched() -> Iterator[None]:
    """The plugin that is loaded inside is watched, whichever test is the first to load it.

    The environment is changed only while the plugin makes its one instance: browsers that tests start stay as they are.
    """
    from mlcpipe.devices.support import tvm_runtime, vulkan_plugin

    load = vulkan_plugin.load

    def load_watched() -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in watching().items():
                patch.setenv(name, value)
            load()
            tvm_runtime.function("mlcpipe.vulkan.describe")()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vulkan_plugin, "load", load_watched)
        yield
