"""The command line as a user meets it: help, mistakes in one line, exit codes, a quick start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from mlcpipe import version
from mlcpipe.cli import app, main
from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.support import env
from mlcpipe.support.resources import demo_model_path
from tests.unit.cli.conftest import ROOT, Run

VERBS = [str(command.name) for command in app.registered_commands]


def test_help_teaches(mlcpipe_program: Run) -> None:
    done = mlcpipe_program("--help")
    assert done.returncode == 0 and "tune" in VERBS and all(verb in done.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Examples" in shown and f"mlcpipe {verb}" in shown


@pytest.mark.alone
def test_help_is_quicker_than_to_import_tvm(cli_environment: dict[str, str]) -> None:
    def spent_s(*arguments: str) -> float:
        began = _processor_s()
        subprocess.run([sys.executable, *arguments], env=cli_environment, check=True, capture_output=True)
        return _processor_s() - began

    rounds = [(spent_s("-m", "mlcpipe", "--help"), spent_s("-c", "import tvm")) for _ in range(3)]
    assert min(own for own, _ in rounds) < 0.5 * min(tvm for _, tvm in rounds), rounds


def _processor_s() -> float:
    """What ended children used: others may have the processor meanwhile."""
    used = os.times()
    return used.children_user + used.children_system


@pytest.mark.full
def test_torch_is_left_out_of_the_program_alone(cli_environment: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "torch"  # stands for an installed torch: TVM's FFI would import it
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    program = "import sys; sys.path.insert(0, {!r}); from mlcpipe.cli import main; sys.argv[1:] = ['doctor']; main({})"
    program += "; assert 'torch' not in sys.modules"  # not even None, which SciPy takes for torch
    for arguments, imported in (("", False), ("['doctor']", True)):
        command = [sys.executable, "-c", program.format(str(tmp_path), arguments)]
        done = subprocess.run(command, env=cli_environment, capture_output=True, text=True, check=False)
        assert ("torch was imported" in done.stdout + done.stderr) == imported
        assert bool(done.returncode) == imported


def test_nothing_heavy_is_imported(cli_environment: dict[str, str]) -> None:
    program = "import sys, mlcpipe.cli; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=cli_environment, check=True, capture_output=True, text=True
    )
    heavy = {"tvm", "numpy", "tokenizers", "torch", "pydantic", "prompt_toolkit", "jinja2", "huggingface_hub"}
    assert not heavy & set(done.stdout.split())


def test_version(mlcpipe_program: Run) -> None:
    done = mlcpipe_program("--version")
    assert done.returncode == 0 and "apache-tvm 0." in done.stdout
    first = done.stdout.splitlines()[0]
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"mlcpipe \S+ \([0-9a-f]{12,}(-dirty)?\)", first)


def test_a_wheel_says_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "__file__", str(tmp_path / "mlcpipe" / "version.py"))
    assert version.commit() == ""
    (tmp_path / "mlcpipe" / "data").mkdir(parents=True)
    (tmp_path / "mlcpipe" / "data" / "commit.txt").write_text("0123456789ab\n")
    assert version.commit() == "0123456789ab"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["chat", "--nonsense"],
        ["chat", "--temperature", "warm", "-p", "x"],
        ["chat", "--temperature", "-1", "-p", "x"],
        ["chat", "--top-p", "nan", "-p", "x"],
        ["chat", "--context", "0", "-p", "x"],
        ["chat", "--max-tokens", "0", "-p", "x"],
        ["chat", "--raw", "--system", "s", "-p", "x"],
        ["chat", "--raw", "--allow-control-tokens", "-p", "x"],
        ["chat", "no/such/folder", "-p", "x"],
        ["chat", "--quantization", "q9", "-p", "x"],
        ["chat", "--target", "toaster", "-p", "x"],
        ["chat"],  # stdin is empty and no terminal
        ["compile"],
        ["compile", ".", "-o", "out", "--best", "--method", "rtn"],
        ["compile", "no/such/folder", "-o", "out"],
        ["compile", ".", "-o", "out", "--context", "-3"],
        ["compile", "hf://", "-o", "out"],
        ["convert", "no/such/folder", "-o", "out"],
        ["inspect", "no/such/bundle"],
        ["inspect", "."],
        ["bench", "--prefill", "16,x"],
        ["bench", "--decode-depth", "-1"],
        ["bench", "--repeats", "0"],
        ["bench", "no/such/bundle"],
        ["chat", "--web", "--prompt", "x"],
        ["chat", "--web", "--target", "cpu"],
        ["chat", "--port", "80"],
        ["chat", "--device", "toaster", "-p", "x"],
        ["chat", "--presence-penalty", "3", "-p", "x"],
        ["chat", "--web", "--frequency-penalty", "1"],
        ["package"],
        ["package", "no/such/bundle", "-o", "site"],
        ["package", "bundle", "-o", "site", "--app", "toaster"],
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull, encoding="utf-8") as empty:
        monkeypatch.setattr("sys.stdin", empty)
        assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert out == ""


@pytest.mark.parametrize(("verb", "meant"), [("run", "chat"), ("ls", "list"), ("servr", "serve"), ("show", "inspect")])
def test_verbs_that_are_meant(verb: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "qwen3"]) == 2 and f"Did you mean '{meant}'?; `mlcpipe --help`" in capsys.readouterr().err


def test_debug_adds_the_traceback(mlcpipe_program: Run) -> None:
    done = mlcpipe_program("inspect", "no/such/bundle", env={"MLCPIPE_DEBUG": "1"})
    assert done.returncode == 2 and "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_bad_environment_is_one_line(mlcpipe_program: Run) -> None:
    for name, value in (("MLCPIPE_DEBUG", "yes"), ("MLCPIPE_THREADS", "0")):
        done = mlcpipe_program("doctor", env={name: value})
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and name in done.stderr


def test_each_variable_is_described() -> None:
    source = Path(env.__file__).read_text(encoding="utf-8")
    read = set(re.findall(r'(?:environ\.get|_integer)\("(\w+)"', source)) - {"VK_INSTANCE_LAYERS"}
    assert read and read == set(env.VARIABLES) - {"HF_HOME"}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MLCPIPE_THREAD", "MLCPIPE_THREADS"),
        ("MLCPIPE_CACHE_DIR", "MLCPIPE_CACHE"),
        ("mlcpipe_cache", "MLCPIPE_CACHE"),
        ("MLCPIPE_TEST_TIMES", None),
        ("MLCPIPE_THREADS", None),
    ],
)
def test_misspelt_variables(name: str, meant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for known in [one for one in os.environ if one.startswith("MLCPIPE_")]:
        monkeypatch.delenv(known)
    monkeypatch.setenv(name, "1")
    assert env.misspelt() == ([(name, meant)] if meant else [])


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLCPIPE_THREAD", "1")
    assert main(["--version"]) == 0
    line = "note: the environment variable MLCPIPE_THREAD has no effect; MLCPIPE_THREADS is one\n"
    assert capsys.readouterr().err == line


def test_a_cache_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLCPIPE_CACHE", str(tmp_path / "file" / "cache"))
    assert main(["pull", str(demo_model_path())]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: the cache cannot be used in ") and "set MLCPIPE_CACHE to another folder" in line


def raising(error: BaseException) -> int:
    """The exit code when a verb raises."""
    from unittest.mock import patch

    with patch("mlcpipe.cli.app", side_effect=error):
        return main([])


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(UsageError("bad \x1b[31m\nthing")) == 2
    assert capsys.readouterr().err == "error: bad [31m thing\n"
    assert raising(KeyboardInterrupt()) == 130
    assert raising(type("Other", (MlcpipeError,), {"exit_code": 7})("x")) == 7
    assert capsys.readouterr().err == "error: x\n"
    assert raising(ZeroDivisionError("oops")) == 70
    assert "bug" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="pipes end otherwise on Windows")
def test_a_reader_that_leaves(cli_environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "mlcpipe", "doctor", "--json"]
    with subprocess.Popen(
        command, env=cli_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # long before there is anything to write
        assert process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.full
def test_doctor(mlcpipe_program: Run) -> None:
    done = mlcpipe_program("doctor", "--json")
    assert done.returncode == 0
    report = json.loads(done.stdout)
    states = {finding["name"]: finding["state"] for finding in report["findings"]}
    assert report["cpu_usable"] and states["tvm"] == states["tools"] == states["target cpu"] == "ok"
    assert report["verdict"].startswith("Ready: the CPU")


@pytest.mark.full
def test_doctor_measures_the_bandwidth(mlcpipe_program: Run) -> None:
    assert "GB/s" in mlcpipe_program("doctor", "--bandwidth").stdout


def test_doctor_names_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mlcpipe.cli import doctor

    monkeypatch.setattr(
        doctor, "package_version", lambda name: "0.1.15" if name == "apache-tvm-ffi" else "0.27.0.post1"
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "Not ready: apache-tvm 0.27.0.post1, apache-tvm-ffi 0.1.15; only one pair works together. Try: "
    )
    assert "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1" in shown
    assert "pip install 'mlcpipe[zig]'" in shown


def test_ctrl_c_that_pydantic_made_words_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(str):
        __hash__ = str.__hash__

        def __eq__(self, _: object) -> bool:
            raise KeyboardInterrupt

    class Text:
        @classmethod
        def __get_pydantic_core_schema__(cls, *_: object) -> dict[str, object]:
            return {"type": "str", Interrupted("strict"): True}

    def build(_: object) -> int:
        TypeAdapter(Text)
        return 0

    monkeypatch.setattr("mlcpipe.cli._run", build)
    assert main(["doctor"]) == 130 and capsys.readouterr().err == ""
