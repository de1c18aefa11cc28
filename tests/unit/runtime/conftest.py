"""Bundles that were changed after they were compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Bundles

TEXTS = ("tokenizer.json", "tokenizer_config.json", "mlc-chat-config.json")


def edit_manifest(bundle: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Applies `change` to the parsed mlcpipe.json."""
    path = bundle / "mlcpipe.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    return bundle


@pytest.fixture
def copied(tiny_bundles: Bundles, tmp_path: Path) -> Path:
    """A copy of the random model's bundle, to be broken."""
    return Path(shutil.copytree(tiny_bundles["q0f32"], tmp_path / "bundle"))


@pytest.fixture
def manifest_with(copied: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """Gives the copied bundle with an edited manifest."""
    return lambda change: edit_manifest(copied, change)


@pytest.fixture
def bare_bundle(copied: Path) -> Path:
    """A bundle of a checkpoint that had no tokenizer."""
    for name in TEXTS:
        (copied / name).unlink()
    return edit_manifest(copied, lambda manifest: [manifest["files"].pop(name) for name in TEXTS])  # type: ignore[func-returns-value]
