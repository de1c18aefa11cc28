"""The version of mlcpipe, and the TVM that it is built for."""

from __future__ import annotations

from importlib import metadata

from mlcpipe.errors import TargetError

__version__ = "0.1.0"

# apache-tvm-ffi 0.1.15 crashes when IR is printed as JSON, 0.1.12 and 0.1.13 do not load with this TVM.
PINNED = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}


def check_tvm() -> None:
    """Raise TargetError unless the pinned pair is installed: another one crashes without a word."""
    for package, wanted in PINNED.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            pair = " ".join(f"{name}=={version}" for name, version in PINNED.items())
            raise TargetError(
                f"{package} has the wrong version", expected=wanted, found=found, next_step=f"pip install {pair}"
            )
