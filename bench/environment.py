"""Separate environments for other projects' packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlcpipe.errors import ResourceError

_READY = "ready"  # a file that is written when every package is installed


def make_environment(home: Path, packages: Sequence[str], *, without: Sequence[str] = ()) -> Path:
    """The Python of the environment `home`, made if it is not there; packages `without` which it works are removed.

    Raises ResourceError if a step fails.
    """
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not (home / _READY).is_file():
        run([sys.executable, "-m", "venv", str(home)])
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
        run([*pip, "install", *packages])
        if without:
            run([*pip, "uninstall", "-y", *without])
        (home / _READY).write_text("\n".join(packages) + "\n", encoding="utf-8")
    return python


def run(command: Sequence[str]) -> None:
    """Run a step; its output goes to stderr. Raises ResourceError if it fails."""
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # checkpoints are folders: nothing is to be fetched
    status = subprocess.run(command, stdout=sys.stderr, env=offline, check=False).returncode
    if status:
        raise ResourceError(" ".join(command[:5]) + " failed", found=f"exit status {status}")
