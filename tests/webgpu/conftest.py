"""Every test here links a library for browsers."""

from __future__ import annotations

import pytest

from tests.page_build import installed_packages  # noqa: F401  a fixture
from tests.webgpu import dawn


@pytest.fixture(scope="session", autouse=True)
def shared_runtime(request: pytest.FixtureRequest) -> None:
    """The runtime that libraries are linked with, unless all tests are skipped."""
    if not dawn.missing():
        request.getfixturevalue("wasm_runtime")
