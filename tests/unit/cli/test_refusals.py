"""What the system refuses: no home, unreadable folders, long names, a full or closed stdout, Ctrl-C before the start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlcpipe.cli import main
from tests.conftest import Bundles

if sys.platform != "linux":
    pytest.skip("Linux: user namespaces, /dev/full", allow_module_level=True)

# A user whom the system does not know, and who may read what its folders' modes allow.
STRANGER = ("unshare", "--user", "--map-user=54321")
Program = Callable[..., "subprocess.CompletedProcess[str]"]
FULL_STDOUT, CLOSED_STDOUT, CLOSED_STDERR = '"$@" > /dev/full', '"$@" >&-', '"$@" 2>&-'


@pytest.fixture(scope="module")
def program(cli_environment: dict[str, str]) -> Program:
    """Runs `mlcpipe ARGUMENTS…` behind the command `before`; a variable that is None is taken away."""
    if subprocess.run([*STRANGER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("unshare --user is not permitted here")

    def run(
        *arguments: object, before: tuple[str, ...] = (), env: Mapping[str, str | None] = {}
    ) -> subprocess.CompletedProcess[str]:
        command = [*before, sys.executable, "-m", "mlcpipe", *map(str, arguments)]
        variables = {key: value for key, value in (cli_environment | env).items() if value is not None}
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)  # fmt: skip

    return run


def one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2 and one line, which has all of `words`; a note about a bundle from elsewhere may precede it."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("note: this runs the native code")]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "bug" not in lines[0] and all(word in lines[0] for word in words), done.stderr


HOMELESS: Mapping[str, str | None] = {"HOME": None, "MLCPIPE_CACHE": None, "XDG_CACHE_HOME": None}


@pytest.mark.full
def test_a_bundle_runs_without_a_home(program: Program, demo_bundles: Bundles) -> None:
    done = program("chat", demo_bundles["q4f16_1"], "-p", "hi", "--max-tokens", "2", before=STRANGER, env=HOMELESS)
    assert done.returncode == 0 and done.stdout and "error" not in done.stderr, done.stderr


def test_a_damaged_bundle_is_noticed_without_a_home(program: Program, demo_bundles: Bundles, tmp_path: Path) -> None:
    """Stamps of weights that were hashed need a cache: without one they are hashed each time."""
    import shutil

    bundle = Path(shutil.copytree(demo_bundles["q4f16_1"], tmp_path / "bundle"))
    shard = bundle / "params_shard_0.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    done = program("chat", bundle, "-p", "hi", before=STRANGER, env=HOMELESS)
    one_line(done, "params_shard_0.bin has changed")


@pytest.mark.full
def test_a_checkpoint_without_a_home(program: Program, demo_bundles: Bundles, tmp_path: Path) -> None:
    """There is no cache, but a bundle can be made: TVM's import asks for a home that it does not use."""
    one_line(program("chat", "-p", "hi", before=STRANGER, env=HOMELESS), "set MLCPIPE_CACHE")
    converted = program("convert", demo_bundles.checkpoint, "-o", tmp_path / "out", before=STRANGER, env=HOMELESS)
    assert converted.returncode == 0 and (tmp_path / "out" / "tensor-cache.json").exists(), converted.stderr


@pytest.mark.full
def test_doctor_without_a_home(program: Program) -> None:
    done = program("doctor", before=STRANGER, env=HOMELESS)
    assert done.returncode == 0 and "none: no home folder" in done.stdout, done.stdout


@pytest.mark.full
def test_homes_of_nobody(program: Program, demo_bundles: Bundles) -> None:
    one_line(program("chat", "~nosuchuser/m", "-p", "hi"), "~nosuchuser/m")
    one_line(program("compile", "~nosuchuser/m", "-o", "out"), "~nosuchuser/m")
    bundle = demo_bundles["q4f16_1"]
    one_line(program("chat", bundle, "-p", "hi", env={"MLCPIPE_CACHE": "~nosuchuser/c"}), "~nosuchuser/c")


@pytest.mark.parametrize(
    "verb", ["inspect", "chat -p hi", "compile -o out", "package -o out", "convert -o out", "bench"]
)
@pytest.mark.fast_cases("inspect", "chat -p hi")
def test_folders_that_may_not_be_read(program: Program, tmp_path: Path, verb: str) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    name, *rest = verb.split()
    done = program(name, tmp_path / "locked" / "model", *rest, before=STRANGER)
    one_line(done, "Permission denied", "check the permissions", "locked/model")


@pytest.mark.full
def test_a_cache_that_may_not_be_read(program: Program, tmp_path: Path, demo_bundles: Bundles) -> None:
    (tmp_path / "locked").mkdir(mode=0)
    env = {"MLCPIPE_CACHE": str(tmp_path / "locked" / "cache")}
    one_line(program("chat", "-p", "hi", before=STRANGER, env=env), "Permission denied")
    assert program("doctor", before=STRANGER, env=env).returncode == 0
    bundle = demo_bundles["q4f16_1"]
    assert program("chat", bundle, "-p", "hi", "--max-tokens", "2", before=STRANGER, env=env).returncode == 0


@pytest.mark.parametrize("verb", ["inspect", "chat -p hi", "compile -o out", "package -o out", "bench"])
def test_a_question_in_the_place_of_the_model(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *rest = verb.split()
    with open(os.devnull, encoding="utf-8") as empty:
        monkeypatch.setattr("sys.stdin", empty)
        code = main([name, "why is the sky blue " * 20, *rest])
    out, err = capsys.readouterr()
    one_line(subprocess.CompletedProcess([], code, out, err), "name too long", "--prompt")
    assert len(err) < 300


def shell(line: str) -> tuple[str, ...]:
    """A command that runs what follows it as the shell would run `line`."""
    return ("sh", "-c", line, "sh")


@pytest.mark.parametrize("verb", ["--version", "--help", "inspect", "chat -p hi"])
def test_a_full_stdout(program: Program, demo_bundles: Bundles, verb: str) -> None:
    name, *rest = verb.split()
    model = [] if name.startswith("--") else [demo_bundles["q4f16_1"]]
    one_line(program(name, *model, *rest, before=shell(FULL_STDOUT)), "No space left on device")


@pytest.mark.parametrize("verb", ["--help", "inspect", "chat -p hi"])
def test_a_closed_stdout(program: Program, demo_bundles: Bundles, verb: str) -> None:
    name, *rest = verb.split()
    model = [] if name.startswith("--") else [demo_bundles["q4f16_1"]]
    one_line(program(name, *model, *rest, before=shell(CLOSED_STDOUT)), "nowhere to write")


def test_a_closed_stderr(program: Program) -> None:
    done = program("inspect", "no/such/folder", before=shell(CLOSED_STDERR))
    assert done.returncode == 2 and done.stdout == done.stderr == ""


@pytest.mark.fast_cases("psutil")
@pytest.mark.parametrize("module", ["typer", "filelock", "rich", "psutil"])
def test_ctrl_c_while_packages_are_imported(cli_environment: dict[str, str], tmp_path: Path, module: str) -> None:
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{module}.py").write_text(interrupt + "raise SystemExit('imported further')\n", encoding="utf-8")
    env = cli_environment | {"PYTHONPATH": f"{tmp_path}:{cli_environment['PYTHONPATH']}"}
    arguments = [sys.executable, "-m", "mlcpipe", "doctor"]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_ctrl_c_stays_ignored(cli_environment: dict[str, str], tmp_path: Path) -> None:
    """As `nohup` and shells with `&` do."""
    interrupt = "import os, signal, sys\nos.kill(os.getpid(), signal.SIGINT)\nsys.exit('imported further')\n"
    (tmp_path / "typer.py").write_text(interrupt, encoding="utf-8")
    env = cli_environment | {"PYTHONPATH": f"{tmp_path}:{cli_environment['PYTHONPATH']}"}
    arguments = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "mlcpipe", "doctor"]
    done = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "imported further" in done.stderr
