"""Imports point one way, apps -> mlcpipe -> tir_schedules -> tvm; heavy packages load only where they are needed."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
# Package -> what its files must not import, also inside functions and for type checking.
FORBIDDEN = {"tir_schedules": {"mlcpipe", "apps", "tests"}, "mlcpipe": {"apps", "tests"}, "apps": {"tests"}}
# Parts of mlcpipe that serve hosts without TVM, or before it is checked: nothing at their top level may load it.
LIGHT = (
    *("support", "host", "bundle", "checkpoint", "cli"),
    *("errors.py", "loading.py", "targets.py", "version.py", "__init__.py", "__main__.py"),
)

TABLES = ("tir_schedules.sampling", "tir_schedules.step_layout")  # which need no TVM


def modules(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imports(tree: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes that import, wherever they stand: `import`, `from`, `import_module("...")`."""
    return tuple(
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__") and node.args)
    )


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Dotted names of all modules that nodes of `imports` import."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            names |= {text.split(".{")[0] for text in [_text(node.args[0])] if text}
    return names


def _called(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """A string literal, or the part of an f-string before its first hole."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def tops(names: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def importing(path: Path) -> tuple[ast.AST, ...]:
    """`imports` of a file. All trees together would be a gigabyte, which the garbage collector would read."""
    return imports(parse(path))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """`imported` of a file."""
    return frozenset(imported(importing(path)))


# Rooms of mlcpipe from bottom to top. A room may import those below its own line, and nothing of its line but itself.
LAYERS = (
    ("errors",),
    ("support", "version"),
    ("host",),
    ("targets",),
    ("bundle", "quantization"),
    ("devices",),
    ("nn",),
    ("models",),
    ("encoders", "vision", "sound"),
    ("checkpoint",),
    ("weights", "tuned"),
    ("passes",),
    ("runtime",),
    ("compiler",),
    ("tuning", "pruning"),
    ("api",),  # `mlcpipe` itself and loading.py
    ("web", "server", "quality"),
    ("cli",),
    ("__main__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """The file or folder of mlcpipe that a module is in."""
    return "api" if module in ("mlcpipe", "mlcpipe.loading") else module.split(".")[1]


def imported_modules(nodes: Iterable[ast.AST], known: set[str]) -> set[str]:
    """The modules of mlcpipe that are imported anywhere: `from mlcpipe.support import debug` is debug."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in known else node.module for name in full.values()}
        else:
            names |= imported([node])
    return {name for name in names if tops({name}) == {"mlcpipe"}}


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    files = modules(package)
    assert files
    wrong = {str(p.relative_to(ROOT)): sorted(tops(imports_of(p)) & FORBIDDEN[package]) for p in files}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_layers_point_down() -> None:
    """Every import of mlcpipe, also inside functions and for type checking, is of the same room or a lower one."""
    files = {module_name(path): importing(path) for path in modules("mlcpipe")}
    assert {room(name) for name in files} == set(HEIGHT)
    upward = [
        f"{name} imports {used}"
        for name, nodes in files.items()
        for used in sorted(imported_modules(nodes, set(files)))
        if room(used) != room(name) and HEIGHT[room(used)] >= HEIGHT[room(name)]
    ]
    assert upward == []


# Circles of files that are left: `mlcpipe.load` is where it belongs, the other one is to be cut.
CIRCLES = ({"mlcpipe", "mlcpipe.loading"},)


def test_no_module_imports_itself_through_others() -> None:
    """Wherever imports stand, also inside functions and for type checking: no circles of files but `CIRCLES`."""
    files = {module_name(path): importing(path) for path in modules("mlcpipe")}
    graph = {name: imported_modules(nodes, set(files)) - {name} for name, nodes in files.items()}
    for circle in CIRCLES:
        with pytest.raises(graphlib.CycleError):  # else it leaves the list
            _sorted({name: graph[name] & circle for name in circle})
        graph |= {name: graph[name] - circle for name in circle}
    _sorted(graph)


def _sorted(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules, those that others import first. Raises CycleError, which names a circle."""
    return list(graphlib.TopologicalSorter(graph).static_order())


def test_layers_are_read_from_every_kind_of_import() -> None:
    known = {"mlcpipe", "mlcpipe.support", "mlcpipe.support.debug", "mlcpipe.web", "mlcpipe.web.site", "mlcpipe.cli"}
    text = (
        "from mlcpipe.support import debug\ndef f():\n    from mlcpipe.web.site import write\n    import mlcpipe.cli\n"
    )
    assert imported_modules(imports(ast.parse(text)), known) == {
        "mlcpipe.support.debug",
        "mlcpipe.web.site",
        "mlcpipe.cli",
    }
    assert imported_modules(imports(ast.parse("from mlcpipe import Engine")), known) == {"mlcpipe"}


def test_the_reader_of_imports_sees_all_of_them() -> None:
    text = (
        "import a.b\nfrom c import d\nfrom . import e\n"
        "def f():\n    from g.h import i\n    importlib.import_module(f'j.{x}.k')\n"
    )
    assert tops(imported(imports(ast.parse(text)))) == {"a", "c", "g", "j"}


_GUESSED = {"pillow": {"PIL"}}  # packages of what is not installed, where their name is another


def _declared(*extras: str) -> dict[str, set[str]]:
    """Distributions of pyproject.toml that an installation with these extras has -> the packages they bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for e in extras for line in project["optional-dependencies"][e])]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower().replace("_", "-") for line in wanted} - {"mlcpipe"}
    found: dict[str, set[str]] = {name: set() for name in names}
    for package, distributions in metadata.packages_distributions().items():
        for name in {distribution.lower().replace("_", "-") for distribution in distributions} & names:
            found[name].add(package)
    return {name: packages or _GUESSED.get(name, {name.replace("-", "_")}) for name, packages in found.items()}


def _foreign(*folders: str) -> set[str]:
    names: set[str] = set().union(*(tops(imports_of(path)) for folder in folders for path in modules(folder)))
    return (
        names
        - {"mlcpipe", "tir_schedules", "tests", "bench", "apps", "wheels", "hatch_build"}
        - {"tomllib", *sys.stdlib_module_names}
    )


def test_what_is_imported_is_declared() -> None:
    for folders, extras in (
        (("mlcpipe", "tir_schedules"), ("ray", "sign", "sound", "vision")),
        (("tests",), ("ray", "sign", "sound", "vision", "cuda", "zig", "dev")),
    ):
        assert _foreign(*folders) - set().union(*_declared(*extras).values()) == set()


def test_what_is_required_is_imported() -> None:
    """A dependency that nothing imports costs everybody who installs mlcpipe."""
    used = _foreign("mlcpipe", "tir_schedules") | {"ziglang"}  # a program
    assert {name: sorted(brings) for name, brings in _declared().items() if not brings & used} == {}


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
    assert readers == {"mlcpipe/support/env.py"}


def test_nothing_is_a_client_of_tvm_s_rpc() -> None:
    """A server of TVM's RPC can run any program on its client."""
    users = [path for path in modules("mlcpipe") for name in imports_of(path) if name.startswith("tvm.rpc")]
    assert users == []


def test_passes_do_not_order_each_other() -> None:
    """Only pipeline.py imports passes; a pass that called another would order them too."""
    passes = {path.stem for path in modules("mlcpipe/passes")} - {"__init__", "lowering", "pipeline"}
    users = {}
    for path in modules("mlcpipe"):
        names = imports_of(path)
        used = sorted(name for name in passes if f"mlcpipe.passes.{name}" in names)
        if used and path.name != "pipeline.py":
            users[str(path.relative_to(ROOT))] = used
    assert users == {}


def test_devices_do_not_need_the_compiler() -> None:
    """A host that only runs bundles loads TVM's runtime library, and no more of TVM."""
    wrong = {}
    for path in modules("mlcpipe/devices"):
        names = imports_of(path)
        heavy = tops(names) & {"tvm", "tir_schedules"} | {n for n in names if n.startswith("mlcpipe.compiler")}
        if heavy:
            wrong[str(path.relative_to(ROOT))] = sorted(heavy)
    assert wrong == {}


@pytest.mark.parametrize("part", LIGHT)
def test_light_parts_do_not_load_tvm_at_the_top(part: str) -> None:
    where = ROOT / "mlcpipe" / part
    wrong = {}
    files = [where] if where.is_file() else modules(f"mlcpipe/{part}")
    assert files
    for path in files:
        statements = [node for node in parse(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {name for name in imported(statements) if not name.startswith(TABLES)}
        found = tops(names) & {"tvm", "tir_schedules", "torch", "transformers"}
        if found:
            wrong[str(path.relative_to(ROOT))] = sorted(found)
    assert wrong == {}


@pytest.mark.parametrize("module", ["mlcpipe", "mlcpipe.cli", "mlcpipe.bundle", "mlcpipe.checkpoint"])
def test_importing_does_not_load_tvm(module: str) -> None:
    """In a fresh interpreter, through whatever these modules import."""
    heavy = "{'tvm', 'tvm_ffi', 'torch', 'transformers'}"
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")
