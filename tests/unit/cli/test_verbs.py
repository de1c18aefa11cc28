"""Every verb on the embedded model, with the real compiler and engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlcpipe.support.resources import demo_model_path
from tests.conftest import QUICK
from tests.unit.cli.conftest import Run


@pytest.fixture(scope="module")
def bundle(mlcpipe_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, compiled."""
    path = tmp_path_factory.mktemp("bundles") / "demo"
    options = ["--json", "--target", "cpu-native", "--quantization", "q4f16_1"]
    done = mlcpipe_run("compile", demo_model_path(), "-o", path, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bundle"] == str(path) and report["bytes"] > 0
    assert 4.5 <= report["bits_per_weight"] < 4.6  # 4 bits and a float16 scale for 32 weights, norms in float16
    assert [stage["name"] for stage in report["stages"]][0] == "lower the model"
    assert "convert weights" in done.stderr
    return path


@pytest.mark.full
def test_compile_does_not_replace_by_accident(mlcpipe_run: Run, bundle: Path, tmp_path: Path) -> None:
    done = mlcpipe_run("compile", demo_model_path(), "-o", bundle)
    assert done.returncode == 2 and "--overwrite" in done.stderr
    (tmp_path / "thesis.txt").write_text("years of work")
    done = mlcpipe_run("compile", demo_model_path(), "-o", tmp_path, "--overwrite")
    assert done.returncode == 2 and (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.full
def test_compile_shows_what_came_out(mlcpipe_run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "mlcpipe.json").write_text("an older bundle")
    options = ["--target", QUICK, "--quantization", "q8f32_1", "--context", "256", "--overwrite"]
    done = mlcpipe_run("compile", demo_model_path(), "-o", path, *options)
    assert done.returncode == 0, done.stderr
    for words in ("bits per weight", "KV cache", "for all 256", "workspace", f"mlcpipe chat {path}"):
        assert words in done.stdout


@pytest.mark.full
def test_convert(mlcpipe_run: Run, tmp_path: Path) -> None:
    done = mlcpipe_run("convert", demo_model_path(), "-o", tmp_path / "weights", "--quantization", "q8f16_1")
    assert done.returncode == 0 and "q8f16_1" in done.stdout
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert {"tensor-cache.json", "params_shard_0.bin", "config.json"} <= names
    assert not (tmp_path / "weights" / "lib").exists()
    again = ["convert", demo_model_path(), "-o", tmp_path / "weights", "--quantization", "q4f16_1"]
    assert mlcpipe_run(*again).returncode == 2
    done = mlcpipe_run(*again, "--overwrite")
    assert done.returncode == 0 and "q4f16_1" in done.stdout, done.stderr


def test_inspect(mlcpipe_run: Run, bundle: Path) -> None:
    overview = mlcpipe_run("inspect", bundle).stdout
    for words in (
        f"llama: {json.loads((bundle / 'config.json').read_text())['num_hidden_layers']} layers",
        "q4f16_1",
        "KV cache",
        "workspace of",
        "kernels by rule",
        "fits this installation",
    ):
        assert words in overview
    manifest = json.loads(mlcpipe_run("inspect", bundle, "--json").stdout)
    kernels = mlcpipe_run("inspect", bundle, "--kernels", env={"COLUMNS": "300"}).stdout
    assert len(kernels.splitlines()) == len(manifest["kernels"]) + 1
    assert all(kernel["reason"] in kernels for kernel in manifest["kernels"])
    params = mlcpipe_run("inspect", bundle, "--params", env={"COLUMNS": "300"}).stdout
    assert len(params.splitlines()) == len(manifest["params"]) + 1
    assert "model.layers.0.self_attn.q_proj.weight" in params


@pytest.mark.full
def test_inspect_does_not_pass_on_control_sequences(mlcpipe_run: Run, bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((bundle / "mlcpipe.json").read_text(encoding="utf-8"))
    manifest["kernels"][0]["reason"] = "\x1b]0;title\x07[bold]evil[/]"
    manifest["linker"]["name"] = "\x1b[2J"
    (tmp_path / "mlcpipe.json").write_text(json.dumps(manifest), encoding="utf-8")
    for extra in ([], ["--kernels"]):
        done = mlcpipe_run("inspect", tmp_path, *extra, env={"COLUMNS": "300"})
        assert done.returncode == 0 and "\x1b" not in done.stdout and "\x07" not in done.stdout
    assert "[bold]evil[/]" in done.stdout


def test_chat_once(mlcpipe_run: Run, bundle: Path) -> None:
    done = mlcpipe_run("chat", bundle, "-p", "Hello, who are you?", "--temperature", "0", "--max-tokens", "40")
    assert done.returncode == 0 and done.stdout.strip() and "tok/s" not in done.stdout
    assert "prefill" in done.stderr and "decode" in done.stderr
    quiet = mlcpipe_run(
        "chat", bundle, "-p", "Hello, who are you?", "--temperature", "0", "--max-tokens", "40", "--no-stats"
    )
    assert quiet.stdout == done.stdout and quiet.stderr == ""


@pytest.mark.full
def test_chat_json_and_stdin(mlcpipe_run: Run, bundle: Path) -> None:
    common = ["chat", bundle, "--max-tokens", "8", "--json"]  # generation_config.json says temperature 0
    one = json.loads(mlcpipe_run(*common, "-p", "Hello\n\nthere").stdout)
    two = json.loads(mlcpipe_run(*common, "-p", "Hello", stdin="there\n").stdout)
    three = json.loads(mlcpipe_run(*common, stdin="Hello\n\nthere\n").stdout)
    assert one["text"] == two["text"] == three["text"]
    assert one["stats"]["completion_tokens"] <= 8 and one["settings"]["temperature"] == 0
    assert one["finish_reason"] in ("stop", "length")


@pytest.mark.full
def test_chat_goes_on_in_a_file(mlcpipe_run: Run, bundle: Path, tmp_path: Path) -> None:
    common = ["chat", bundle, "--session", tmp_path / "chat", "--max-tokens", "8", "--json"]
    first = json.loads(mlcpipe_run(*common, "--temperature", "0", "-p", "Hello").stdout)
    second = json.loads(mlcpipe_run(*common, "-p", "And then?").stdout)
    known = first["stats"]["prompt_tokens"] + first["stats"]["completion_tokens"] - 1
    assert second["stats"]["cached_tokens"] == known < second["stats"]["prompt_tokens"]
    assert second["settings"]["temperature"] == 0
    (tmp_path / "chat").write_text("something else")
    refused = mlcpipe_run(*common, "-p", "Hello")
    assert refused.returncode == 2 and "not valid JSON" in refused.stderr
    assert (tmp_path / "chat").read_text() == "something else"


@pytest.mark.full
def test_lines_on_stdin_are_one_prompt_and_a_note_says_so(mlcpipe_run: Run, bundle: Path) -> None:
    common = ["chat", bundle, "--max-tokens", "2", "--no-stats"]
    assert mlcpipe_run(*common, stdin="one\ntwo\nthree\n").stderr == "The 3 lines on stdin are one prompt.\n"
    assert mlcpipe_run(*common, stdin="one\n").stderr == ""
    assert mlcpipe_run(*common, "-p", "Summarize:", stdin="one\ntwo\n").stderr == ""


def test_chat_with_bytes_that_are_no_text(bundle: Path, cli_environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlcpipe", "chat", str(bundle), "-p", b"caf\xe9", "--max-tokens", "4"],
        input=b"\xff\xfe\x00hello\xc3",
        capture_output=True,
        env=cli_environment | {"LC_ALL": "C.UTF-8"},
    )
    assert done.returncode == 0, done.stderr
    done.stdout.decode("utf-8")


@pytest.mark.full
def test_chat_raw_and_system_change_the_prompt(mlcpipe_run: Run, bundle: Path) -> None:
    common = ["chat", bundle, "-p", "Hello", "--temperature", "0", "--max-tokens", "4", "--json"]
    tokens = [
        json.loads(mlcpipe_run(*common, *extra).stdout)["stats"]["prompt_tokens"]
        for extra in (["--raw"], [], ["--system", "You are brief, friendly and precise."])
    ]
    assert tokens[0] < tokens[1] and tokens[1] != tokens[2]


@pytest.mark.full
def test_the_same_seed_gives_the_same_answer(mlcpipe_run: Run, bundle: Path) -> None:
    common = ["chat", bundle, "-p", "Hello", "--raw", "--temperature", "2", "--max-tokens", "24", "--no-stats"]
    one, again, other = (mlcpipe_run(*common, "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert one == again != other


@pytest.mark.parametrize(
    "arguments",
    [
        ["--quantization", "q0f32", "-p", "x"],
        ["--target", "toaster", "-p", "x"],
        ["--context", "100000", "-p", "x"],
        ["-p", "word " * 3000],
        ["-p", " \n"],
        ["--top-k", "1.5", "-p", "x"],
    ],
)
def test_chat_mistakes(mlcpipe_run: Run, bundle: Path, arguments: list[str]) -> None:
    done = mlcpipe_run("chat", bundle, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_small_context_runs_full(mlcpipe_run: Run, bundle: Path) -> None:
    done = mlcpipe_run(
        "chat", bundle, "-p", "Once", "--raw", "--context", "32", "--temperature", "10", "--top-p", "1", "--json",
        "--seed", "1",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["finish_reason"] == "length"
    assert report["stats"]["prompt_tokens"] + report["stats"]["completion_tokens"] <= 33


@pytest.mark.full
def test_compiled_once(mlcpipe_run: Run, cli_environment: dict[str, str]) -> None:
    arguments = ["chat", "-p", "Hello", "--max-tokens", "4"]
    assert mlcpipe_run(*arguments).returncode == 0
    bundles = sorted(Path(cli_environment["MLCPIPE_CACHE"], "bundles").iterdir())
    done = mlcpipe_run("chat", str(demo_model_path()), "-p", "Hello", "--max-tokens", "4", "--quantization", "q4f16_m")
    assert done.returncode == 0 and "compile" not in done.stderr
    assert sorted(Path(cli_environment["MLCPIPE_CACHE"], "bundles").iterdir()) == bundles


@pytest.mark.full
def test_bench(mlcpipe_program: Run, bundle: Path) -> None:
    common = ["bench", bundle, "--decode-tokens", "8", "--threads", "1"]
    every = ["--prefill", "4,32,9999", "--decode-depth", "0,64,9999", "--repeats", "2", "--batch", "1,4,65"]
    report = json.loads(mlcpipe_program(*common, *every, "--json").stdout)
    results = {(r["kind"], r["tokens"]): r for r in report["results"]}
    assert len(results) == 9 and report["threads"] == 1 and report["load_s"] > 0
    assert "at most 64 sequences" in results.pop(("batch", 65))["skipped"]
    for result in results.values():
        if result["tokens"] == 9999:
            assert result["speed"] is None and "2048 tokens" in result["skipped"]
        else:
            speed = result["speed"]
            assert 0 < speed["low"] <= speed["median"] <= speed["high"] and result["skipped"] == ""
        assert (result["gb_s"] is not None) == (result["kind"] == "decode" and result["tokens"] != 9999)
    assert all(value > 0 for value in report["read_gb_s"])
    assert 0 < report["first_token_s"]["low"] <= report["first_token_s"]["median"] < 60
    memory = report["memory"]
    assert 50 << 20 < memory["resident"] < 2 << 30
    if sys.platform == "linux":
        assert memory["base"] < memory["private"] < memory["resident"]
        # the deepest was 64 tokens and 8 decoded ones
        assert memory["beyond"] == memory["private"] - 72 * report["kv_bytes_per_token"]
    assert report["versions"]["apache-tvm"] and report["cpu"]
    shown = mlcpipe_program(*common, "--prefill", "4,9999", "--decode-depth", "0", "--repeats", "1")
    for words in ("median tok/s", "read bandwidth", "peak memory", "was skipped", "1 threads"):
        assert words in shown.stdout


@pytest.mark.alone
def test_sixteen_answers_at_once_are_written_faster(mlcpipe_run: Run, bundle: Path) -> None:
    options = ["--prefill", "4", "--decode-depth", "0", "--decode-tokens", "8", "--threads", "1", "--batch", "1,16"]
    report = json.loads(mlcpipe_run("bench", bundle, *options, "--repeats", "3", "--json").stdout)
    one, sixteen = (r["speed"] for r in report["results"] if r["kind"] == "batch")
    assert sixteen["high"] > 1.2 * one["low"]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for one child on Windows")
def test_ctrl_c_ends_a_compile_without_leftovers(cli_environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlcpipe", "compile", str(demo_model_path()), "-o", str(tmp_path / "out")]
    with subprocess.Popen(
        command, env=cli_environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first stage is over, the kernels are being compiled
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_a_bundle_from_elsewhere_is_told_on_stderr_in_one_line(
    mlcpipe_program: Run, bundle: Path, tmp_path: Path
) -> None:
    question = ("chat", bundle, "--prompt", "What is mlcpipe?", "--temperature", 0, "--no-stats")
    own = mlcpipe_program(*question)
    foreign = mlcpipe_program(*question, env={"MLCPIPE_CONFIG": str(tmp_path)})
    assert own.returncode == foreign.returncode == 0 and own.stdout == foreign.stdout != ""
    assert "native code" not in own.stderr
    (line,) = [line for line in foreign.stderr.splitlines() if "native code" in line]
    assert line.startswith(f"note: this runs the native code of {bundle}, for ") and "not signed" in line
