"""Tests stand alone: what several need is in a module of its own, not in a test file, and nothing of it is patched; none ends early."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py"))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(dotted module, name that it is bound to) of each import of `tests`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((f"{module}.{alias.name}", alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names)


def _problems(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    names = {name: module for module, name in _imports(tree)}
    for module in names.values():
        if module.startswith("."):
            found.append(f"imports {module} by a relative name")
        if any(part.startswith("test_") for part in module.split(".")):
            found.append(f"imports {module}, a file of tests")
    own = {name for name, module in names.items() if module.startswith("tests.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in own:
                    found.append(f"patches {names[target.value.id]}.{target.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Name) and first.id in own:
                found.append(f"patches {names[first.id]}")
            if isinstance(first, ast.Constant) and str(first.value).startswith("tests."):
                found.append(f"patches {first.value}")
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found += [
                f"{node.name} ends early: skip with a reason" for one in _own(node) if isinstance(one, ast.Return)
            ]
    return found


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _own(node)


def test_no_file_borrows_from_a_test_and_no_test_ends_early() -> None:
    found = {str(path.relative_to(ROOT)): _problems(path.read_text(encoding="utf-8")) for path in FILES}
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from tests.vulkan.test_kernels import Compiled", "a file of tests"),
        ("from .test_kernels import Compiled", "a relative name"),
        ("from tests.vulkan import cases\ncases.run = print", "patches tests.vulkan.cases.run"),
        ("from tests.vulkan import cases\npatch.setattr(cases, 'run', print)", "patches tests.vulkan.cases"),
        ("patch.setattr('tests.vulkan.cases.run', print)", "patches tests.vulkan.cases.run"),
        ("def test_a():\n    def b(): return 1\n    if b():\n        return\n    assert 0", "test_a ends early"),
    ],
)
def test_each_problem_is_found(source: str, words: str) -> None:
    assert any(words in problem for problem in _problems(source))
