"""The operating system, and the installed packages that influence results."""

from __future__ import annotations

import platform

from mlcpipe.version import PINNED, __version__


def package_version(name: str) -> str | None:
    """The installed version of a package, None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """mlcpipe, Python, TVM and numpy."""
    return {
        "mlcpipe": __version__,
        "python": platform.python_version(),
        **{name: package_version(name) for name in PINNED},
        "numpy": package_version("numpy"),
    }


def system_name() -> str:
    """Operating system, release and architecture."""
    return f"{platform.system()} {platform.release()} {platform.machine()}"
