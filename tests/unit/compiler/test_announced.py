"""Lines before the work: matrices that the default cannot hold in blocks, and how long gptq takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mlcpipe
from mlcpipe.compiler.calibration import duration
from mlcpipe.support.progress import SilentProgress
from mlcpipe.weights.table import Weight
from tests.conftest import TinyLlama, write_llama


class Notes(SilentProgress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (TinyLlama(layers=1), r"4 of 5 matrices are stored as q4f16_1: .*multiple of 256 numbers, .*have 64, 104"),
        (TinyLlama(hidden_size=256, intermediate_size=264, layers=1, head_dim=64), "1 of 5 matrices .* have 264"),
        (TinyLlama(hidden_size=256, intermediate_size=512, layers=1, head_dim=64), None),
    ],
)
def test_what_the_default_cannot_hold_is_said(tmp_path: Path, sizes: TinyLlama, expected: str | None) -> None:
    notes = Notes()
    mlcpipe.convert(write_llama(tmp_path / "checkpoint", sizes), output=tmp_path / "out", progress=notes)
    found = [line for line in notes.lines if "matrices" in line]
    assert len(found) == (expected is not None)
    assert expected is None or re.search(expected, found[0])


def test_the_operations_of_gptq(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer twice 2 n k for each token, of each matrix 2 k^2, then k^2 (n + k)."""
    monkeypatch.setattr(duration, "CALIBRATION_TOKENS", 10)
    weights = [
        Weight("model.layers.0.mlp.up_proj.weight", (3, 5), "float32", "scheme"),
        Weight("lm_head.weight", (7, 5), "float32", "scheme"),
        Weight("model.norm.weight", (5,), "float32", "vector"),
    ]
    layer, output = 10 * (2 * 2 * 3 * 5 + 2 * 5 * 5) + 5 * 5 * (3 + 5), 10 * 2 * 5 * 5 + 5 * 5 * (7 + 5)
    assert duration.operations(weights) == layer + output
    assert re.match(
        r"gptq will take about 10 seconds: 10 seconds .* 2\.1e\+03 operations, at \d+%",
        duration.expected_duration(weights),
    )
