"""distill.toml: what is written is read, and a wrong file is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.pruning.recipe import Recipe, read_recipe
from mlcpipe.support.defaults import DISTILL_RECIPE

RECIPE = Recipe('a "folder"\\with é🦙\n\x7f', "wanda", "2:4", steps=7, peak_rate=1e-5)


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    RECIPE.write(tmp_path)
    assert read_recipe(tmp_path) == RECIPE


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("steps = 7", "steps = '7'", "steps"),
        ("steps = 7", "steps = true", "steps"),
        ("steps = 7", "steps = 0", "steps"),
        ("steps = 7", "stepps = 7", "stepps"),
        ("peak_rate = 1e-05", "peak_rate = nan", "peak_rate"),
        ("peak_rate = 1e-05", "peak_rate = inf", "peak_rate"),
        ("steps = 7", f"steps = {'7' * 5000}", "not TOML"),
        ("steps = 7", f"steps = {'[' * 5000}", "not TOML"),
        ('method = "wanda"', "", "method"),
        ('method = "wanda"', "method = ", "not TOML"),
        ('pattern = "2:4"', 'pattern = "1:4"', "pattern"),
    ],
)
def test_a_wrong_recipe_is_refused_by_the_field(tmp_path: Path, old: str, new: str, named: str) -> None:
    RECIPE.write(tmp_path)
    path = tmp_path / DISTILL_RECIPE
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageError, match=named):
        read_recipe(tmp_path)


def test_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mlcpipe prune"):
        read_recipe(tmp_path)
