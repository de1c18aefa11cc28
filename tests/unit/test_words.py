"""Words and phrases that are not plain English here. The list is short, so that each hit is one to replace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BETTER = {
    r"anew": "again",
    r"besides": "also, in addition to",
    r"of itself|by itself": "automatically, separately",
    r"(go|goes|going|went) on": "continue, resume, run",
    r"(give|gives|giving|gave) way": "is preempted, evicted",
    r"under way": "running",
}
SAID = re.compile(r'"go on"')  # by users, in tests
FOLDERS = ("apps", "bench", "docs", "examples", "mlcpipe", "targets", "tests", "tir_schedules")
SUFFIXES = {".py", ".md", ".toml", ".c", ".cc", ".h", ".mm", ".ts", ".tsx", ".kt", ".swift"}
SKIPPED = {"node_modules", "build", "dist", "__pycache__"}


def found(text: str) -> list[str]:
    """The words in a text, with better ones; line breaks and comment signs may be between two words."""
    hits, text = [], SAID.sub("", text)
    for words, better in BETTER.items():
        pattern = words.replace(" ", r"[\s#/*]+")
        hits += [f"{hit[0]!r}: {better}" for hit in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE)]
    return hits


def hits(*folders: str) -> list[str]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    own = (path for path in files if path != Path(__file__) and not SKIPPED & {*path.relative_to(ROOT).parts})
    return [f"{path.relative_to(ROOT)}: {hit}" for path in own for hit in found(path.read_text(encoding="utf-8"))]


def test_words_are_replaced() -> None:
    top = [f"{path.name}: {hit}" for path in sorted(ROOT.glob("*.md")) for hit in found(path.read_text("utf-8"))]
    assert [*top, *hits(*FOLDERS)] == []


@pytest.mark.parametrize("text", ["Made anew.", "It goes\n    # on", "the step under\nway", "Besides, x"])
def test_a_word_is_found_over_lines(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize("text", ["beside it", "give_way", "an ongoing step", "a renewed step", "goes onto the stack"])
def test_other_words_are_left_alone(text: str) -> None:
    assert found(text) == []
