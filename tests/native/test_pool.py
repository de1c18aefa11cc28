"""The thread pool in C: each task once whatever threads do, under ThreadSanitizer too, and the threads of decode steps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("pool.c")
FLAGS = ("-DMLCPIPE_RUNTIME", "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")


def _built(folder: Path, *flags: str) -> Path:
    if (compiler := shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")) is None:
        pytest.skip("the thread pool's tests need a C compiler, such as that of g++")
    program = folder / "pool"
    command = [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr:
        pytest.skip(f"{compiler} has no sanitizers here")
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize(("flags", "rounds"), [((), 20000), (("-fsanitize=thread",), 1500)], ids=["plain", "tsan"])
def test_each_task_runs_once(tmp_path: Path, flags: tuple[str, ...], rounds: int) -> None:
    done = subprocess.run(
        [str(_built(tmp_path, *flags)), str(rounds)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_children_of_a_fork_during_a_loop_run_loops(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(_built(tmp_path)), "forks", "10"], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_decode_steps_take_as_many_threads_as_are_fastest(tmp_path: Path) -> None:
    """Of 16: all, one, four; with 64 rows, or where the user said how many, all. Of 15: seven."""
    done = subprocess.run([str(_built(tmp_path))], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "16 1 4 16\n7\n16\n"
