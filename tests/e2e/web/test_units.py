"""The page's types and its own unit tests."""

from __future__ import annotations

from pathlib import Path

from tests.page_build import npm


def test_types(packages: Path) -> None:
    npm("run", "check")


def test_units(packages: Path) -> None:
    npm("test")
