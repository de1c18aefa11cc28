"""`mlcpipe prune` as a user meets it: the table of what is saved, JSON, and what is said where nothing is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlcpipe.cli import main
from mlcpipe.pruning.prune import Cost, Pruned
from mlcpipe.quality.measure import OWN_TEXT

BEFORE, AFTER = Cost(4000, 3000, 2000, 512), Cost(3000, 2250, 1000, 256)
LAYERS = Pruned(Path("out"), Path("in"), "layers", "layers", 3, 4, BEFORE, AFTER)
PATTERN = Pruned(Path("out"), Path("in"), "wanda", "", 0, 0, BEFORE, BEFORE)


def shown(made: Pruned, *options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    asked: dict[str, Any] = {}

    def prune(model: str, **given: Any) -> Pruned:
        asked.update(given, model=model)
        return made

    monkeypatch.setattr("mlcpipe.pruning.prune.prune", prune)
    assert main(["prune", "in", "-o", "absent", "--method", made.method, *options]) == 0
    assert asked["model"] == "in" and asked["method"] == made.method and asked["output"] == Path("absent")
    return capsys.readouterr().out


def test_the_table_says_what_is_saved(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(LAYERS, "--keep", "3", monkeypatch=monkeypatch, capsys=capsys).splitlines()
    table = {line[:24].strip(): line[24:].split() for line in lines[2:]}
    assert table["layers"] == ["4", "3", "75.0", "%"]
    assert table["parameters"] == ["4,000", "3,000", "75.0", "%"]
    assert table["bytes read for a token"][-2:] == ["50.0", "%"]
    assert table["decode, by bytes read"] == ["2.00", "x", "as", "fast"]


def test_a_pattern_saves_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(PATTERN, monkeypatch=monkeypatch, capsys=capsys)
    assert "1.00 x as fast" in out and "saves no byte and no time" in out and "5.12" in out and "11.02" in out
    assert "saves no byte" not in shown(LAYERS, monkeypatch=monkeypatch, capsys=capsys)


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(LAYERS, "--json", monkeypatch=monkeypatch, capsys=capsys))
    assert found["after"]["parameters"] == 3000 and found["kept"] == 3 and found["quality"] is None


def test_quality_is_not_measured_on_the_text_that_prunes(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before the work."""
    assert main(["prune", "in", "-o", "absent", "--method", "wanda", "--quality", "--calibration", str(OWN_TEXT)]) == 2
    assert "the text of --calibration is one that quality is measured on" in capsys.readouterr().err
