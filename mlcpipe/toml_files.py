"""Untrusted TOML: bounded size and depth, one-line errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.files import read_bounded
from mlcpipe.json_files import shown_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DOTS = 32
"""In a line: tomllib keeps every beginning of a key, so that one of 50,000 parts takes 10 GB."""


def read_toml(
    path: Path, limit: int, error: type[MlcpipeError], what: str, next_step: str | None = None
) -> dict[str, Any]:
    """The table in the TOML file `path`, of at most `limit` bytes. Raises `error` for anything else."""
    raw = read_bounded(path, limit, error, what, next_step)

    def refusal(found: object) -> MlcpipeError:
        return error(f"the {what} is not TOML", where=shown_path(path), found=found, next_step=next_step)

    if (dots := max((line.count(b".") for line in raw.splitlines()), default=0)) > MAX_DOTS:
        raise refusal(f"a line with {dots} dots, more than {MAX_DOTS}")
    try:
        values: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise refusal("tables too deep") from None
    except ValueError as problem:  # also not UTF-8, and integers past Python's digit limit
        raise refusal(problem) from None
    return values
