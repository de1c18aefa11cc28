"""A Vulkan device for models of all kinds."""

from __future__ import annotations

from tests.vulkan.conftest import gpu, plugin

__all__ = ["gpu", "plugin"]
