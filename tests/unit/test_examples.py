"""The programs in examples/ run on the embedded model and print what they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from mlcpipe.support.resources import demo_model_path

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 25


def run(name: str, arguments: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What an example prints."""
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def bundle(demo_bundles: dict[str, Path]) -> Path:
    return demo_bundles["q4f16_1"]


def test_chat(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "compile" in run("chat", [bundle], monkeypatch, capsys)


def test_stream(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run("stream", [bundle], monkeypatch, capsys)
    assert "[0 of " in shown and shown.count("prompt tokens were in the KV cache]") == 2


def test_compile_without_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"compile\.py CHECKPOINT OUTPUT"):
        run("compile", [], monkeypatch, capsys)


@pytest.mark.full
def test_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run("compile", [demo_model_path(), tmp_path / "bundle"], monkeypatch, capsys)
    assert shown.startswith(f"{tmp_path / 'bundle'}: ") and "MiB of weights on CPU" in shown
    with pytest.raises(SystemExit, match="error: .*--overwrite|error: .*not empty"):
        run("compile", [demo_model_path(), tmp_path / "bundle"], monkeypatch, capsys)


def test_logits(bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, *rows = run("logits", [bundle], monkeypatch, capsys).splitlines()
    assert first.startswith("perplexity ") and float(first.split()[1]) > 1
    shares = [float(row.split("%")[0]) for row in rows]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.1
    assert "'compile'" in rows[0].replace(" ", "") or "compile" in "".join(rows)


def test_all_examples_are_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"chat", "stream", "compile", "logits"}
