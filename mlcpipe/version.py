"""The versions of mlcpipe and of the TVM that it requires."""

from __future__ import annotations

from pathlib import Path

from mlcpipe.errors import TargetError

__version__ = "0.1.0"

# apache-tvm-ffi 0.1.15 crashes when printing IR as JSON; 0.1.12 and 0.1.13 do not load with this TVM.
PINNED = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}

RAY = "2.60"  # of `mlcpipe serve --ray`, which needs a module of it that other versions have elsewhere


def commit() -> str:
    """The commit of the wheel or source tree, with "-dirty" if files differ; "" if unknown."""
    package = Path(__file__).resolve().parent
    if (built := package / "data" / "commit.txt").is_file():
        return built.read_text(encoding="ascii").strip()
    if not (package.parent / ".git").exists():
        return ""
    import subprocess

    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def check_tvm() -> None:
    """Raise TargetError unless the pinned versions are installed: others crash without a message."""
    from importlib import metadata

    for package, pinned in PINNED.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed != pinned:
            pair = " ".join(f"{name}=={version}" for name, version in PINNED.items())
            raise TargetError(
                f"{package} has the wrong version", expected=pinned, found=installed, next_step=f"pip install {pair}"
            )
