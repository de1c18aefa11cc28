"""Write libraries: `<kind>.py` is the backend for one kind of device, found by its file name."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mlcpipe.errors import TargetError, UsageError

if TYPE_CHECKING:
    from mlcpipe.compiler.backends.base import Backend, LibraryWriter
    from mlcpipe.targets import Target


@functools.cache
def backends() -> tuple[str, ...]:
    """The names of all backends."""
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(module.name for module in modules if not module.ispkg and module.name != "base"))


def backend(name: str) -> Backend:
    """The module of one of `backends()`."""
    return cast("Backend", importlib.import_module(f"mlcpipe.compiler.backends.{name}"))


def backend_of(target: Target) -> Backend:
    """The module of a target's backend. Raises TargetError for an unknown name."""
    if target.backend not in backends():
        known = " or ".join(backends())
        raise TargetError("target file backend", where=target.name, expected=known, found=target.backend)
    return backend(target.backend)


def native_sources(system: str) -> list[Path]:
    """Folders of what the native runtime is built with to run on devices of a system: "android", "ios", "linux"."""
    modules = [backend(name) for name in backends()]
    built = [module for module in modules if system in getattr(module, "NATIVE_SYSTEMS", ())]
    return [module.NATIVE_SOURCES for module in built if hasattr(module, "NATIVE_SOURCES")]


def find_writer(target: Target, **options: bool) -> LibraryWriter:
    """What writes a target's library. Raises CompileError for a missing tool, UsageError for an unused option."""
    module, given = backend_of(target), {name: value for name, value in options.items() if value}
    if unused := sorted(set(given) - set(module.OPTIONS)):
        raise UsageError(
            f"--{unused[0]} has no effect for the target", where=target.name, next_step=f"leave --{unused[0]} out"
        )
    return module.find(target, **given)
