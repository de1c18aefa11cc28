"""The ruler's script: what its text is made of, and that a run learns, is saved and continues."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the ruler is trained with torch (dev extra)")
FOLDER = Path(__file__).resolve().parents[2] / "apps" / "demo_model"
SCRIPT = "ruler"


@pytest.fixture(scope="module")
def ruler() -> Iterator[ModuleType]:
    """The script, which imports others of its folder as top-level modules."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(SCRIPT)
    finally:
        sys.path.remove(str(FOLDER))


def documents(folder: Path, count: int = 60) -> None:
    """Files as the packages have them, of 600 letters each."""
    for i in range(count):
        path = folder / f"usr/share/doc/python3.11/html/_sources/library/m{i}.rst.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"module{i}\n\n\n\n\n" + "words of text. " * 40, encoding="utf-8")
    page = folder / "usr/share/doc/debian-handbook/html/en-US/a.html"
    page.parent.mkdir(parents=True)
    page.write_text("<head><style>x</style></head><p>One &amp; two</p>" + "<p>three</p>" * 200, encoding="utf-8")
    (page.parent / "index.html").write_text("<p>short</p>", encoding="utf-8")


def test_the_text_is_plain_and_some_is_held_out(ruler: ModuleType, tmp_path: Path) -> None:
    documents(tmp_path)
    text = ruler.ruler_text.read(tmp_path)
    assert len(text.train) + len(text.held_out) == 61
    assert 0 < len(text.held_out) < 10 and not set(text.train) & set(text.held_out)
    page = next(one for one in text.train + text.held_out if "three" in one)
    assert page.startswith("One & two\nthree\n") and "<" not in page
    assert all("\n\n\n" not in one for one in text.train)
    assert ruler.ruler_text.read(tmp_path) == text
    with pytest.raises(SystemExit, match="python3.11-doc"):
        ruler.ruler_text.read(tmp_path / "nothing")


def test_the_rate_rises_stays_and_falls(ruler: ModuleType) -> None:
    recipe = ruler.Recipe()
    rates = [ruler.rate(share, recipe) / recipe.peak_rate for share in (0, 0.015, 0.3, 0.5, 0.75, 1)]
    assert 0 < rates[0] < rates[1] < 1
    assert rates[2:] == pytest.approx([1, 1, 0.5, 0])


@pytest.mark.full
def test_a_run_learns_and_continues(ruler: ModuleType, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    shape = ruler.llama.Shape(64, 64, hidden=64, inner=64, layers=1, heads=1, kv_heads=1)
    recipe = ruler.Recipe(shape, rows=4, length=16, peak_rate=1e-2)
    tokenizer = Tokenizer.from_file(str(FOLDER / "checkpoint" / "tokenizer.json"))
    batches = iter(ruler.Rows(np.arange(500, dtype=np.uint16) % 64, recipe, 1))
    run = ruler.Run(recipe, tmp_path)
    losses = [run.step(next(batches), 0.3) for _ in range(30)]
    assert losses[0] > 4 and losses[-1] < 1  # ln 64 is 4.2
    run.seconds = 12.5
    run.save(tokenizer)
    again = ruler.Run(recipe, tmp_path)
    assert (again.steps, again.seconds) == (30, 12.5)
    batch = next(batches)
    assert again.step(batch, 0.3) == run.step(batch, 0.3) < 1
    assert (tmp_path / "checkpoint" / "config.json").is_file()
