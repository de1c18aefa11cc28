"""What builds, tests and releases mlcpipe is named exactly; the wheel says what is in it."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

import hatch_build
from hatch_build import Requirement
from mlcpipe.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, LOCK = PYPROJECT["project"], (ROOT / ".ci" / "requirements.lock").read_text(encoding="utf-8")
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
HASH = r" \\\n    --hash=sha256:[0-9a-f]{64}"
BLOCK = re.compile(rf"^(?P<name>[a-z0-9-]+)==(?P<version>[^ ;]+)( ; [^\n]+?)?({HASH})+$", re.M)


def canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def test_actions_are_named_by_their_commits() -> None:
    used = [
        line
        for path in (ROOT / ".github" / "workflows").iterdir()
        for line in path.read_text().splitlines()
        if "uses:" in line
    ]
    assert used
    assert [line for line in used if not re.fullmatch(r" *- uses: [a-z-]+/[a-z-]+@[0-9a-f]{40} # v[0-9.]+", line)] == []


def test_the_lock_file_is_exact() -> None:
    """Versions and hashes alone, of everything that is asked for but torch, and as it is asked for."""
    assert BLOCK.sub("", LOCK).strip() == ""
    locked = [(found["name"], found["version"]) for found in BLOCK.finditer(LOCK)]
    assert len(locked) > 100
    wanted = [*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"], *PYPROJECT["build-system"]["requires"]]
    own = [
        extra for text in wanted for extra in Requirement(text).extras if canonical(Requirement(text).name) == "mlcpipe"
    ]
    for one in map(Requirement, [*wanted, *(text for extra in own for text in EXTRAS[extra])]):
        versions = [version for name, version in locked if name == canonical(one.name)]
        if one.name not in ("mlcpipe", "torch") and (one.marker is None or "3.11" not in str(one.marker)):
            assert versions and all(one.specifier.contains(version) for version in versions), one


@pytest.mark.parametrize("with_page", [False, True])
def test_the_sbom_lists_what_is_in_a_wheel_and_what_it_asks_for(with_page: bool) -> None:
    bill = hatch_build.sbom(ROOT, "1.2.3", PROJECT["dependencies"], EXTRAS, with_page)
    assert bill == hatch_build.sbom(ROOT, "1.2.3", PROJECT["dependencies"], EXTRAS, with_page)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["purl"]: part for part in bill["components"]}
    assert all(part["bom-ref"] == purl for purl, part in parts.items())
    page = json.loads((ROOT / "apps" / "chat-web" / "package.json").read_text())["dependencies"]
    npm = {part["name"]: part["version"] for purl, part in parts.items() if purl.startswith("pkg:npm/")}
    engines = [name for name in page if name.startswith(("@mlc-ai/", "@huggingface/"))]
    worker = {name: npm.get(name) for name in ("loglevel", "tslib")}  # which the engines bring
    worker |= {name: page.pop(name) for name in engines}
    assert npm == page | (worker if with_page else {})
    assert all(len(part["hashes"][0]["content"]) == 128 for purl, part in parts.items() if purl.startswith("pkg:npm/"))
    asked = {canonical(part["name"]): part["scope"] for purl, part in parts.items() if purl.startswith("pkg:pypi/")}
    required = {canonical(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert {name for name, scope in asked.items() if scope == "required"} == required
    assert {"huggingface-hub", "fastapi", "cryptography"} <= set(asked) and not {"pytest", "mkdocs-material"} & set(
        asked
    )
    assert "pkg:pypi/apache-tvm@0.27.0.post1" in parts and {
        "pkg:generic/mlcpipe-demo-model@1.2.3",
        "pkg:generic/mlcpipe-seeing-model@1.2.3",
    } <= set(parts)
    assert bill["dependencies"] == [{"ref": "pkg:pypi/mlcpipe@1.2.3", "dependsOn": sorted(parts)}]


def test_a_wheel_has_its_sbom(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        bill = json.loads(archive.read(f"mlcpipe-{__version__}.dist-info/sboms/mlcpipe.cdx.json"))
        page = [name for name in archive.namelist() if name.startswith("mlcpipe/data/chat_page/")]
    assert bill["metadata"]["component"]["version"] == __version__
    assert bool(page) == any("web-llm" in part["purl"] for part in bill["components"])
