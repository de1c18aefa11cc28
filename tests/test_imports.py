"""Imports point one way, apps -> mlcpipe -> tir_schedules -> tvm; heavy packages load only where they are needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Package -> what its files must not import, also inside functions and for type checking.
FORBIDDEN = {
    "tir_schedules": {"mlcpipe", "apps", "tests"},
    "mlcpipe": {"apps", "tests"},
    "apps": {"tests"},
}
# Parts of mlcpipe that serve hosts without TVM, or before it is checked: nothing at their top level may load it.
LIGHT = ("checkpoint", "bundle", "cli", "env.py", "errors.py", "progress.py", "targets.py", "atomic.py", "version.py",
         "bandwidth.py", "files.py", "resources.py", "__init__.py", "__main__.py")  # fmt: skip


def modules(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imported(tree: ast.AST) -> set[str]:
    """Dotted names of all imported modules, wherever the statement stands, and of `import_module("...")`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__") and node.args:
            names |= {text.split(".{")[0] for text in [_text(node.args[0])] if text}
    return names


def _called(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """A string literal, or the part of an f-string before its first hole."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    files = modules(package)
    assert files
    wrong = {str(p.relative_to(ROOT)): sorted(tops(imported(parse(p))) & FORBIDDEN[package]) for p in files}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_the_reader_of_imports_sees_all_of_them() -> None:
    text = (
        "import a.b\nfrom c import d\nfrom . import e\n"
        "def f():\n    from g.h import i\n    importlib.import_module(f'j.{x}.k')\n"
    )
    assert tops(imported(ast.parse(text))) == {"a", "c", "g", "j"}


def test_only_env_reads_the_environment() -> None:
    readers = set()
    for path in [*modules("mlcpipe"), *modules("tir_schedules")]:
        for node in ast.walk(parse(path)):
            attribute = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv", "environb")
            name = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and {"environ", "getenv"} & {alias.name for alias in node.names}
            )
            if attribute or name:
                readers.add(str(path.relative_to(ROOT)))
    assert readers == {"mlcpipe/env.py"}


def test_passes_do_not_order_each_other() -> None:
    """Only pipeline.py imports passes; a pass that called another would order them too."""
    passes = {path.stem for path in modules("mlcpipe/passes")} - {"__init__", "lowering", "pipeline", "plan_memory"}
    users = {}
    for path in modules("mlcpipe"):
        names = imported(parse(path))
        used = sorted(name for name in passes if f"mlcpipe.passes.{name}" in names)
        if used and path.name != "pipeline.py":
            users[str(path.relative_to(ROOT))] = used
    assert users == {}


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_do_not_load_tvm_at_the_top(part: str) -> None:
    where = ROOT / "mlcpipe" / part
    wrong = {}
    for path in [where] if where.is_file() else modules(f"mlcpipe/{part}"):
        statements = [node for node in parse(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        found = tops(imported(ast.Module(list(statements), []))) & {"tvm", "tir_schedules", "torch", "transformers"}
        if found:
            wrong[str(path.relative_to(ROOT))] = sorted(found)
    assert wrong == {}


@pytest.mark.parametrize("module", ["mlcpipe", "mlcpipe.cli", "mlcpipe.bundle", "mlcpipe.checkpoint"])
def test_importing_does_not_load_tvm(module: str) -> None:
    """In a fresh interpreter, through whatever these modules import."""
    heavy = "{'tvm', 'tvm_ffi', 'torch', 'transformers', 'tir_schedules'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")
