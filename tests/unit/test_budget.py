"""The number of lines only goes down for what exists: [tool.mlcpipe.budget] of pyproject.toml is the limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mlcpipe"]["budget"]


def lines(folders: list[str], suffixes: list[str]) -> dict[str, int]:
    """Lines of each source file, by its path."""
    skipped = {"node_modules", "__pycache__", "build", "dist", "drivers"}
    return {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and path.is_file() and not skipped & set(path.relative_to(ROOT).parts)
    }


@pytest.mark.parametrize("part", BUDGET)
def test_lines_stay_within_the_budget(part: str) -> None:
    limit = BUDGET[part]
    found = lines(limit["folders"], limit["suffixes"])
    total, longest = sum(found.values()), max(found, key=lambda path: found[path])
    assert total > 0.8 * limit["max_lines"], f"{part} has {total} lines: lower its budget"
    assert total <= limit["max_lines"], f"{part} has {total} lines, of {limit['max_lines']}; longest: {longest}"
