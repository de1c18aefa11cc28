"""Emscripten's `emcc`: compiles C++ to WebAssembly and links it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlcpipe.errors import CompileError

INSTALL = "apt-get install --no-install-recommends emscripten"
_COMPILE_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Emscripten:
    """The command and its version, which the manifest and the runtime's cache key contain."""

    command: str
    version: str
    name: str = "emcc"

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        """Run emcc in `folder`. Raises CompileError with its first error line."""
        try:
            done = subprocess.run(
                [self.command, *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError("emcc cannot run", found=error, next_step="see `mlcpipe doctor`") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines or ["no message"]
            raise CompileError("emcc failed", found=errors[0][:500], next_step="see `mlcpipe doctor`")


def find_emcc() -> Emscripten:
    """`emcc` on the path. Raises CompileError with the command to install it."""
    path = shutil.which("emcc")
    version = _version(path) if path is not None else None
    if path is None or version is None:
        raise CompileError(
            "no compiler for WebAssembly", expected="emcc on the path", next_step=f"on Debian or Ubuntu: {INSTALL}"
        )
    return Emscripten(path, version)


def _version(command: str) -> str | None:
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or ["unknown"])[0] if done.returncode == 0 else None
