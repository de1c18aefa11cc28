"""Each block of code in README.md and docs/ is checked line by line, or says what runs it or why nothing does.

Such a note stands before the block: `<!-- run by tests/… -->` or `<!-- not run: the reason -->`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import mlcpipe
from mlcpipe.cli import app, main
from mlcpipe.targets import load_target
from tests.conftest import Bundles

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS_OF_MAKE = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
ELSEWHERE = {"cli.md", "families.md"}  # generated from the code
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in ELSEWHERE)]
NOTE = re.compile(r"<!-- (?:run by (?P<test>tests/\S+)|not run: (?P<reason>.{10,})) -->")
# The tests have an environment and no board.
SHELL = {"python3 -m venv .venv", "py -m venv .venv", ". .venv/bin/activate", "scp chat pi@raspberrypi.local:"}


@dataclass(frozen=True)
class Block:
    """Lines of code, the language of a fence ("" for indented lines), and the note before it."""

    line: int
    language: str
    note: str
    lines: tuple[str, ...]


def blocks(path: Path) -> Iterator[Block]:
    lines, note, index = path.read_text(encoding="utf-8").splitlines(), "", 0
    while index < len(lines):
        first, begin = lines[index], index
        if first.startswith("```"):
            index = lines.index("```", index + 1)
            yield Block(begin + 1, first[3:], note, tuple(lines[begin + 1 : index]))
        elif first.startswith("    ") and not lines[index - 1].strip():
            while index < len(lines) and (lines[index].startswith("    ") or not lines[index]):
                index += 1
            yield Block(begin + 1, "", note, tuple(line[4:] for line in lines[begin:index] if line))
            index -= 1
        note = first if first.startswith("<!--") else note if not first else ""
        index += 1


def commands(block: Block) -> Iterator[str]:
    """The commands of a block: without prompts, comments and output; `\\` joins lines."""
    shown = [line for line in block.lines if line.startswith("$ ")] or block.lines
    for line in "\n".join(shown).replace("\\\n", "").splitlines():
        for part in re.split(r" && ", re.sub(r"(^|\s)# .*", "", line.removeprefix("$ "))):
            if part.strip():
                yield part.strip()


def check(line: str) -> None:
    """Raise what is wrong with a command."""
    words = shlex.split(line, posix="\\" not in line)
    program, rest = re.sub(r".*[/\\]", "", words[0]), words[1:]
    if program == "mlcpipe":
        rest = rest[: rest.index(">")] if ">" in rest else rest
        group = typer.main.get_command(app)
        command = group.get_command(None, rest[0])  # type: ignore[attr-defined]
        given = command.make_context(rest[0], rest[1:]).params
        for target in (given.get("target") or "").split(","):  # of each stage
            load_target(target or "cpu")
    elif program == "pip":
        for extra in re.findall(r"\[(.*)\]", rest[-1]):
            assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()
    elif program == "make":
        assert rest[0] in TARGETS_OF_MAKE
    elif program == "curl":
        json.loads(rest[rest.index("-d") + 1]) if "-d" in rest else None
    elif program == "python" and not rest[0].startswith("-"):
        assert (ROOT / rest[0]).is_file()
    else:
        assert line in SHELL, "nothing runs this"


def refuse(text: str) -> None:
    raise ValueError("nothing runs this")


CHECKS = {"": check, "sh": check, "toml": tomllib.loads, "python": lambda text: compile(text, "block", "exec")}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_are_right_or_say_why_nothing_runs_them(path: Path) -> None:
    wrong = []
    for block in blocks(path):
        if found := NOTE.fullmatch(block.note):
            assert found["test"] is None or (ROOT / found["test"]).is_file(), found["test"]
            continue
        for line in commands(block) if block.language in ("", "sh") else ["\n".join(block.lines)]:
            try:
                CHECKS.get(block.language, refuse)(line)
            except Exception as error:
                wrong.append(f"{path.name}:{block.line}: {line}: {str(error).splitlines()[0]}")
    assert wrong == []


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/python.md"])
def test_python_runs(
    name: str,
    demo_bundles: Bundles,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The embedded model stands for the others; the blocks of a page run one after the other."""
    load, bundle = mlcpipe.load, demo_bundles["q4f16_1"]
    monkeypatch.setattr(mlcpipe, "load", lambda model=None, **options: load(bundle, **options))
    monkeypatch.chdir(tmp_path)
    found = [line for block in blocks(ROOT / name) if block.language == "python" for line in block.lines]
    (tmp_path / "blocks.py").write_text("\n".join(found), encoding="utf-8")
    runpy.run_path("blocks.py")
    assert capsys.readouterr().out.strip()


def test_other_pages_have_no_python_that_nothing_runs() -> None:
    run = {"README.md", "tutorial.md", "python.md"}
    left = [
        (path.name, one.line) for path in PAGES for one in blocks(path) if one.language == "python" and not one.note
    ]
    assert [where for where in left if where[0] not in run] == []


@pytest.mark.full
def test_the_tutorial_on_its_bundle(
    demo_bundles: Bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model's stands for it; the server, the GPU and the browser have tests of their own."""
    (tmp_path / "qwen3").symlink_to(demo_bundles["q4f16_1"])
    monkeypatch.chdir(tmp_path)
    steps = [line for block in blocks(ROOT / "docs" / "tutorial.md") for line in commands(block)]
    steps = [line for line in steps if line.endswith(" qwen3") and not re.search("compile|serve", line)]
    assert [line.split()[1] for line in steps] == ["inspect", "chat", "bench"]
    more = {"chat": "--prompt hi --max-tokens 4", "bench": "--repeats 1 --prefill 16 --decode-depth 0"}
    with open(os.devnull, encoding="ascii") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        for _, verb, model in map(str.split, steps):
            assert main([verb, model, *more.get(verb, "").split()]) == 0, capsys.readouterr().err
