"""The Vulkan plugin as a part of the native runtime."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlcpipe.compiler.native_runtime import DevicePlugin
from mlcpipe.devices.support.vulkan_plugin import install_command
from mlcpipe.errors import CompileError
from mlcpipe.support.private import private_folder
from mlcpipe.support.resources import native_path

SOURCES = native_path() / "vulkan"
_PLACES = tuple(map(Path, ("/usr/include", "/usr/local/include")))
_FOLDERS = (
    "vulkan",
    "vk_video",
)  # of Vulkan's headers, alone: a compiler for another machine has a C library of its own


def plugin(cache: Path) -> DevicePlugin:
    """The plugin with this system's Vulkan headers, copied to `cache`. Raises CompileError without any."""
    place = next((place for place in _PLACES if (place / "vulkan" / "vulkan.h").is_file()), None)
    if place is None:
        raise CompileError("the runtime with Vulkan", expected="Vulkan's headers", next_step=install_command())
    headers = private_folder(cache / "vulkan-headers")
    for folder in _FOLDERS:
        if (place / folder).is_dir():
            shutil.copytree(place / folder, headers / folder, dirs_exist_ok=True)
    return DevicePlugin(SOURCES / "plugin.cc", "MLCPIPE_VULKAN", "c++20", headers)
