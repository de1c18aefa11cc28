"""`mlcpipe tune` as a user runs it, with the real compiler, on a model of one layer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlcpipe.cli import main
from mlcpipe.errors import CompileError, UsageError
from mlcpipe.host import cpu_features
from mlcpipe.tuned.records import merged, read_records, write_records
from tests.conftest import TinyLlama, write_llama

ROOT = Path(__file__).resolve().parents[3]


def mlcpipe(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "mlcpipe", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": paths, "MLCPIPE_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.full
def test_a_tiny_model_is_tuned(tmp_path: Path) -> None:
    model, records = write_llama(tmp_path / "model", TinyLlama(layers=1)), tmp_path / "records.json"
    options = ("--target", "cpu-native", "--kernels", "gemv", "--trials", "2", "--budget", "1s", "--records", records)
    done = mlcpipe("tune", model, *options, "--json", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first = found["kernels"][0]
    assert found["records"] == str(records) and found["variant"] and first["bucket"] == "gemv" and first["rows"] == 1
    assert 1 <= first["trials"] <= 2 and first["default_us"] > 0 and first["best_ratio"] > 0  # one, however slow
    kept = [kernel["record"] for kernel in found["kernels"] if kernel["record"]]
    assert [json.loads(record.model_dump_json()) for record in read_records(records)] == merged_json(kept)
    assert f"{first['name']} gemv: " in done.stderr and len(list((tmp_path / "cache" / "tuning").iterdir())) == 1


def merged_json(records: list[dict[str, object]]) -> list[dict[str, object]]:
    from mlcpipe.tuned.records import Record

    return [json.loads(one.model_dump_json()) for one in merged(Record(**record) for record in records)]


@pytest.mark.parametrize(
    "options, words",
    (
        (("--budget", "soon"), "10m"),
        (("--budget", "0s"), "10m"),
        (("--kernels", "gemv,conv"), "attention, gemv, gemm, experts"),
        (("--trials", "0"), "integer >= 1"),
    ),
)
def test_mistakes_are_told_before_anything_is_measured(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    assert main(["tune", str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_target_of_other_machines_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    other = "aarch64" if cpu_features.architecture() == "x86_64" else "x86_64"
    board = tmp_path / "board.toml"
    board.write_text(f'base = "cpu"\n[tvm]\nmtriple = "{other}-unknown-linux-gnu"\n')
    assert main(["tune", str(tmp_path), "--target", str(board)]) == 2
    assert "no device of this machine runs the target's kernels" in capsys.readouterr().err


@pytest.mark.full
def test_what_keeps_all_kernels_from_being_measured_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a GPU whose compiler is not installed."""
    reason = CompileError("NVIDIA's compiler is not installed")
    monkeypatch.setattr("mlcpipe.tuning.pool.WorkerProcess.open", Mock(side_effect=reason))
    model = write_llama(tmp_path / "model", TinyLlama(layers=1))
    assert main(["tune", str(model), "--target", "cpu-native", "--records", str(tmp_path / "r.json")]) == 2
    assert re.search("^error: no kernel could be measured in .*is not installed", capsys.readouterr().err, re.M)


def test_a_broken_record_file_is_told_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    model = write_llama(tmp_path / "model", TinyLlama(layers=1))
    path = tmp_path / "records.json"
    path.write_text('{"version": 9}')
    options = ["--target", "cpu-native", "--kernels", "gemv", "--records", str(path)]
    assert main(["tune", str(model), *options]) == 2
    assert "unsupported version" in capsys.readouterr().err and path.read_text() == '{"version": 9}'
    write_records(path, [])


def test_a_bundle_is_tuned_for_its_own_target(tmp_path: Path) -> None:
    from mlcpipe import compile
    from mlcpipe.cli.tune.command import target_and_quantization

    model = write_llama(tmp_path / "model", TinyLlama(layers=1))
    bundle = compile(model, target="cpu-native", quantization="q0f32", output=tmp_path / "bundle")
    assert target_and_quantization(bundle, None, None) == ("cpu-native", "q0f32")
    assert target_and_quantization(bundle, "cpu", "q0f32") == ("cpu", "q0f32")
    assert target_and_quantization(model, None, None) == ("cpu", None)
    with pytest.raises(UsageError, match="the bundle has another quantization .* leave --quantization out"):
        target_and_quantization(bundle, None, "q4f16_1")


def test_verifying_needs_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, records = write_llama(tmp_path / "model", TinyLlama(layers=1)), tmp_path / "records.json"
    command = ["tune", str(model), "--target", "cpu-native", "--records", str(records), "--verify"]
    assert main(command) == 2 and "no kernel of this model has a record" in capsys.readouterr().err
    assert main([*command, "--budget", "1s"]) == 2 and "--budget has no effect" in capsys.readouterr().err
