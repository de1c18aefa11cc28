"""The embedded model as a GGUF file: the commands do with it what they do with the checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the files are written by the gguf package")

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.support.resources import demo_model_path
from tests.conftest import QUICK
from tests.unit.checkpoint.gguf_files import write_gguf
from tests.unit.cli.conftest import Run

PRE = "gpt-2"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "demo.Q8_0.gguf"
    return write_gguf(open_checkpoint(demo_model_path()), path, gguf.GGMLQuantizationType.Q8_0, PRE)


@pytest.mark.full
def test_chat_answers_as_the_checkpoint_does(mlcpipe_run: Run, tmp_path: Path) -> None:
    file = write_gguf(
        open_checkpoint(demo_model_path()), tmp_path / "demo.F16.gguf", gguf.GGMLQuantizationType.F16, PRE
    )
    options = ["--prompt", "What is mlcpipe?", "--temperature", "0"]
    expected, found = (mlcpipe_run("chat", model, *options) for model in (demo_model_path(), file))
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout and "mlcpipe" in found.stdout


def test_browsers_get_the_formats_of_the_file(mlcpipe_run: Run, quantized: Path, tmp_path: Path) -> None:
    done = mlcpipe_run("convert", quantized, "-o", tmp_path / "out", "--target", "webgpu")
    assert done.returncode == 0 and "second time" not in done.stderr, done.stderr
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("params_shard_*.bin"))
    assert size == pytest.approx(quantized.stat().st_size, rel=0.05)


@pytest.mark.full
def test_quantized_weights_are_kept(mlcpipe_run: Run, quantized: Path, tmp_path: Path) -> None:
    done = mlcpipe_run("compile", quantized, "-o", tmp_path / "out", "--target", QUICK)
    assert done.returncode == 0 and "second time" not in done.stderr, done.stderr
    shown = mlcpipe_run("inspect", tmp_path / "out").stdout
    assert "keep" in shown and "Q8_0" in shown


@pytest.mark.full
def test_kernels_of_kept_weights_are_tuned(mlcpipe_run: Run, quantized: Path, tmp_path: Path) -> None:
    """Without --quantization, as `compile` does it; only of the file: a bundle does not say what was joined."""
    options = ["--target", "cpu-native", "--kernels", "gemv", "--trials", "2", "--budget", "1s", "--json"]
    done = mlcpipe_run("tune", quantized, *options, "--records", tmp_path / "records.json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)["kernels"][0]
    assert first["bucket"] == "gemv" and first["default_us"] > 0 and first["trials"] >= 1
    bundle = tmp_path / "out"
    assert mlcpipe_run("compile", quantized, "-o", bundle, "--target", "cpu-native").returncode == 0
    done = mlcpipe_run("tune", bundle)
    assert done.returncode == 2 and "kernels of kept weights are tuned from their GGUF file" in done.stderr


@pytest.mark.full
def test_weights_that_are_rounded_twice_are_announced(mlcpipe_run: Run, quantized: Path, tmp_path: Path) -> None:
    for scheme, note in (("q8f16_1", True), ("q0f32", False)):
        done = mlcpipe_run("convert", quantized, "-o", tmp_path / scheme, "--quantization", scheme)
        assert done.returncode == 0, done.stderr
        assert ("weights of Q8_0 are rounded a second time, to q8f16_1" in done.stderr) is note
        assert (tmp_path / scheme / "tokenizer.json").is_file()


def test_a_damaged_file_is_one_line(mlcpipe_run: Run, quantized: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "demo.gguf"
    damaged.write_bytes(quantized.read_bytes()[:-100_000])
    done = mlcpipe_run("compile", damaged, "-o", tmp_path / "out", "--quantization", "q4f16_1")
    assert (
        done.returncode == 2 and done.stderr.startswith("error: truncated GGUF file") and done.stderr.count("\n") == 1
    )
