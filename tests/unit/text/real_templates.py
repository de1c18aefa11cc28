"""The chat templates and vocabularies that llama.cpp keeps as examples.

They are in the source package of llama-cpp-python, which pip downloads once into the cache (77 MB).
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import platformdirs
import pytest

from mlcpipe.errors import last_line

VERSION = "0.3.36"
COUNT = 70  # in the package of this version
DOWNLOAD_S = 300


def package() -> Path:
    """The source package. Skips the test where pip cannot download it."""
    folder = platformdirs.user_cache_path("mlcpipe") / "tests"
    path = folder / f"llama_cpp_python-{VERSION}.tar.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        command += ["--dest", str(folder), f"llama-cpp-python=={VERSION}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
            problem = last_line(done.stderr) if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no end within {DOWNLOAD_S} s"
        if problem or not path.exists():
            pytest.skip(f"pip cannot download the source package llama-cpp-python {VERSION}: {problem}")
    return path


def sources() -> dict[str, str]:
    """Each template by its name. Skips the test where pip cannot download the package."""
    with tarfile.open(package()) as archive:
        members = [one for one in archive if "/models/templates/" in one.name and one.name.endswith(".jinja")]
        files = {Path(one.name).stem: archive.extractfile(one) or io.BytesIO() for one in members}
        return {name: file.read().decode() for name, file in files.items()}
