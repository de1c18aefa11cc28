"""`mlcpipe embed`, and the verbs that an encoder's bundle is not for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="tiny models are made by torch")
pytest.importorskip("transformers", reason="tiny models are transformers models")

import mlcpipe
from mlcpipe.cli import main
from tests.conftest import QUICK
from tests.models import tiny_encoders as tiny


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    _, checkpoint = tiny.write("bert", folder / "checkpoint", "mean", normalize=True, num_hidden_layers=1)
    return mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")


def test_texts_of_arguments_and_a_file(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lines.txt").write_text("rain\n\nbirds sang\n", encoding="utf-8")
    expected = mlcpipe.Embedder(bundle).embed(["a cat", "rain", "birds sang"])
    arguments = ["embed", str(bundle), "a cat", "--file", str(tmp_path / "lines.txt")]
    assert main(arguments) == 0
    lines = [[float(number) for number in line.split()] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(lines, expected, rtol=1e-5)
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["text"] for one in found] == ["a cat", "rain", "birds sang"]
    np.testing.assert_array_equal(np.array([one["embedding"] for one in found], np.float32), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed"], "no texts"),
        (["embed", "a", "--query", "b"], "scores no documents"),
        (["embed", "a", "--query", "b", "--dimensions", "3"], "--dimensions has no effect"),
        (["embed", "a", "--dimensions", "65"], "from 1 to 64"),
        (["embed", "cat " * 300], "at most 160 tokens"),
        (["serve", "--sequences", "2", "--port", "0"], "--sequences has no effect"),
        (["bench"], "the model embeds texts and writes none"),
    ],
)
def test_refusals(bundle: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main([arguments[0], str(bundle), *arguments[1:]]) == 2
    assert message in capsys.readouterr().err
