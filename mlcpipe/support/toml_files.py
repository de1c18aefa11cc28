"""Untrusted TOML: bounded size and depth, one-line errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.support.files import read_bounded
from mlcpipe.support.json_files import shown_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_DOTS = 32
"""Of a key: tomllib keeps every beginning of one, so that 50,000 parts take 10 GB."""
# Comments, and strings of one and of several lines, which may end with two quotes of their own.
_NO_CODE = re.compile(
    rb"""\#[^\n]*
    | "{3} (?: \\. | "{1,2}(?!") | [^"\\] )* (?: "{3,5} | \\?\Z )
    | '{3} (?: '{1,2}(?!') | [^'] )* (?: '{3,5} | \Z )
    | " (?: \\[^\n] | [^"\\\n] )* "
    | ' [^'\n]* '""",
    re.DOTALL | re.VERBOSE,
)
_NO_KEY = re.compile(rb"[^\w. \t-]")


def read_toml(
    path: Path, limit: int, error: type[MlcpipeError], what: str, next_step: str | None = None
) -> dict[str, Any]:
    """The table in the TOML file `path`, of at most `limit` bytes. Raises `error` for anything else."""
    raw = read_bounded(path, limit, error, what, next_step)

    def refusal(found: object) -> MlcpipeError:
        return error(f"the {what} is not TOML", where=shown_path(path), found=found, next_step=next_step)

    if (dots := max(part.count(b".") for part in _NO_KEY.split(_NO_CODE.sub(b"", raw)))) > MAX_DOTS:
        raise refusal(f"a key with {dots} dots, more than {MAX_DOTS}")
    try:
        values: dict[str, Any] = tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise refusal("tables too deep") from None
    except ValueError as problem:  # also not UTF-8, and integers past Python's digit limit
        raise refusal(problem) from None
    return values
