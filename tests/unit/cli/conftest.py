"""What the tests of the command line share: running it with an environment and a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mlcpipe.cli import main
from tests.conftest import linked_cache

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def cli_environment(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment for a run: nothing of the user's settings, a cache that the session's tests share."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLCPIPE_")}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        kept.pop(name, None)
    paths = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {
        **kept,
        "PYTHONPATH": paths,
        "MLCPIPE_CACHE": str(linked_cache(tmp_path_factory.mktemp("cache"), shared)),
        "MLCPIPE_CONFIG": str(tmp_path_factory.mktemp("config")),
        "TERM": "xterm-256color",
        "PYTHONUTF8": "1",
    }


@pytest.fixture(scope="session")
def mlcpipe_program(cli_environment: dict[str, str]) -> Run:
    """Runs `mlcpipe ARGUMENTS…` as `mlcpipe_run` does, in a process of its own."""

    def run(*arguments: object, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mlcpipe", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=cli_environment | (env or {}),
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def mlcpipe_run(cli_environment: dict[str, str]) -> Run:
    """Runs `mlcpipe ARGUMENTS…` in this process, with `stdin` as its input and the variables in `env` added."""

    def run(*arguments: object, stdin: str = "", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        words, variables = list(map(str, arguments)), cli_environment | (env or {})
        file = partial(tempfile.TemporaryFile, "w+", encoding="utf-8", newline="")
        with file() as given, file() as out, file() as err, pytest.MonkeyPatch.context() as patch:
            given.write(stdin)
            given.seek(0)
            for name in os.environ.keys() - variables.keys():
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            code = main(words)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(words, code, out.read(), err.read())

    return run
