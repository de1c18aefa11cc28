"""Adds to packages the commit that they are built from, all of the chat page if `make page` built it, and an SBOM.

`wheels/build.py` names a folder of native code and a platform's tag for a wheel that has them, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement

_NATIVE = "MLCPIPE_WHEEL_FOLDER"
# The embedded models by their names there, which are made here (apps/demo_model/README.md).
_MODELS = {"demo": "checkpoint", "seeing": "seeing"}
_LICENSE = "Apache-2.0"
# The part of the page that git does not have.
_IN_WORKER = (
    "@huggingface/jinja",
    "@huggingface/tokenizers",
    "@mlc-ai/web-llm",
    "@mlc-ai/web-runtime",
    "loglevel",
    "tslib",
)
_OF_DEVELOPERS = ("dev", "docs")  # extras that no code of the wheel asks for


class Build(BuildHookInterface[Any]):
    """A wheel without the page works, except for `package --app web` and `chat --web`, which say so."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """An editable installation asks the source tree for both, and has no SBOM."""
        self._folder = tempfile.TemporaryDirectory()
        if version == "editable":
            return
        root = Path(self.root)
        # A wheel made from an sdist has the file that the sdist got.
        if commit := _commit(root):
            file = Path(self._folder.name, "commit.txt")
            file.write_text(f"{commit}\n", encoding="ascii")
            build_data["force_include"][str(file)] = "mlcpipe/data/commit.txt"
        if self.target_name != "wheel":
            return
        page, core = root / "apps" / "chat-web" / "dist", self.metadata.core
        with_page = (page / "index.html").is_file()
        if with_page:
            build_data["force_include"][str(page)] = "mlcpipe/data/chat_page"
        bill = Path(self._folder.name, "mlcpipe.cdx.json")
        native = sorted(Path(os.environ[_NATIVE]).iterdir()) if _NATIVE in os.environ else []
        for path in native:
            build_data["force_include"][str(path)] = f"mlcpipe/data/compiled/{path.name}"
        if native:
            build_data["tag"], build_data["pure_python"] = os.environ["MLCPIPE_WHEEL_TAG"], False
        parts = sbom(root, self.metadata.version, core.dependencies, core.optional_dependencies, with_page, native)
        bill.write_text(f"{json.dumps(parts, indent=1)}\n", encoding="ascii")
        build_data["sbom_files"].append(str(bill))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The package has its files."""
        self._folder.cleanup()


def sbom(
    root: Path,
    version: str,
    required: Sequence[str],
    extras: Mapping[str, Sequence[str]],
    with_page: bool,
    native: Sequence[Path] = (),
) -> dict[str, Any]:
    """A wheel's contents and requirements, as CycloneDX 1.6 (ECMA-424). PEP 770 defines its place.

    No time and no random number is in it: the same tree has the same.
    """
    optional = [text for extra, texts in extras.items() if extra not in _OF_DEVELOPERS for text in texts]
    parts = [
        *(_requirement(text, "optional") for text in optional),
        *(_requirement(text, "required") for text in required),
        *_npm(root, () if with_page else _IN_WORKER),
        *(_embedded_model(root, version, name, folder) for name, folder in _MODELS.items()),
        *(_native(path, version) for path in native),
    ]
    components = {part["bom-ref"]: part for part in parts}
    own = _component("application", f"pkg:pypi/mlcpipe@{version}", "mlcpipe", version, _LICENSE)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [components[ref] for ref in sorted(components)],
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": sorted(components)}],
    }


def _component(kind: str, purl: str, name: str, version: str, licence: str, *hashes: tuple[str, str]) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "purl": purl}
    if version:
        part["version"] = version
    if licence:
        part["licenses"] = [{"expression": licence.removeprefix("(").removesuffix(")")}]
    if hashes:
        part["hashes"] = [{"alg": name, "content": digits} for name, digits in hashes]
    return part


def _requirement(text: str, scope: str) -> dict[str, Any]:
    """A distribution that pip installs beside the wheel; its version is known where it is exact."""
    asked = Requirement(text)
    exact = [one.version for one in asked.specifier if one.operator == "=="]
    purl = f"pkg:pypi/{asked.name.lower().replace('_', '-')}{f'@{exact[0]}' if exact else ''}"
    part = _component("library", purl, asked.name, exact[0] if exact else "", "")
    return {**part, "scope": scope, "properties": [{"name": "mlcpipe:requirement", "value": text}]}


def _npm(root: Path, absent: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The packages in the chat page but the absent: those of the lock file that are not only for building and types."""
    lock = json.loads((root / "apps" / "chat-web" / "package-lock.json").read_text(encoding="utf-8"))
    for place, facts in lock["packages"].items():
        if place and not facts.get("dev") and not facts.get("optional"):
            name, version = place.rpartition("node_modules/")[2], facts["version"]
            if name in absent:
                continue
            digits = base64.b64decode(facts["integrity"].removeprefix("sha512-")).hex()
            purl = f"pkg:npm/{quote(name)}@{version}"
            yield _component("library", purl, name, version, facts["license"], ("SHA-512", digits))


def _embedded_model(root: Path, version: str, name: str, folder: str) -> dict[str, Any]:
    """A model that `mlcpipe chat` takes where none is named."""
    weights = root / "apps" / "demo_model" / folder / "model.safetensors"
    digits, name = hashlib.sha256(weights.read_bytes()).hexdigest(), f"mlcpipe-{name}-model"
    purl = f"pkg:generic/{name}@{version}"
    return _component("machine-learning-model", purl, name, version, _LICENSE, ("SHA-256", digits))


def _native(path: Path, version: str) -> dict[str, Any]:
    """A file that `wheels/build.py` compiled."""
    digits = hashlib.sha256(path.read_bytes()).hexdigest()
    purl = f"pkg:generic/{path.name}@{version}"
    return _component("library", purl, path.name, version, _LICENSE, ("SHA-256", digits))


def _commit(root: Path) -> str:
    """The tree's commit, "-dirty" where files differ; "" where the folder is no clone or git is missing."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
