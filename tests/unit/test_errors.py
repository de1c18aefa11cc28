"""Errors are one line of bounded length, whatever a hostile file put into them."""

from __future__ import annotations

import pytest

from mlcpipe.errors import MlcpipeError, UsageError


@pytest.mark.parametrize("part", ["expected", "found"])
def test_a_long_value_is_cut(part: str) -> None:
    line = str(UsageError("wrong\nvalue", where="here", **{part: [0] * 100_000}, next_step="try another"))
    assert line.startswith(f"wrong value in here; {part} [0, 0, ") and line.endswith("(300000 characters); try another")
    assert len(line) < 600 and "\n" not in line


def test_a_usual_value_is_whole() -> None:
    error = MlcpipeError("wrong", expected="a" * 400, found={"b": 1})
    assert str(error) == f"wrong; expected {'a' * 400}; found {{'b': 1}}"
    assert len(str(MlcpipeError("a" * 1_000_000))) < 500
