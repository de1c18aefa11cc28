"""JSON from outside: bounded size, UTF-8, no duplicate keys, one-line errors."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from mlcpipe.errors import CheckpointError, MlcpipeError

SHOWN_CHARACTERS = 80


def shown(value: object) -> str:
    """A quoted, shortened form of something from outside, safe for a terminal and for one line."""
    try:
        quoted = ascii(value)
    except RecursionError:  # JSON just shallow enough for its parser
        return f"a deeply nested {type(value).__name__}"
    if len(quoted) <= SHOWN_CHARACTERS:
        return quoted
    return f"{quoted[:SHOWN_CHARACTERS]}... ({len(quoted)} characters)"


def shown_path(path: Path) -> str:
    """A quoted path, whole: its end tells the most. repr escapes what is not printable."""
    return repr(str(path))


def require_regular_file(path: Path) -> int:
    """The size of `path` in bytes. Links are followed; a pipe or device would block a reader: refused.

    Raises CheckpointError when the file is absent, unreadable or not a regular file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise CheckpointError(
            "missing file",
            where=shown_path(path),
            expected="a file (or a link to one that exists)",
            found="nothing",
            next_step="download the checkpoint again",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError("cannot look at a file", where=shown_path(path), found=error) from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(
            "not a regular file",
            where=shown_path(path),
            expected="a file",
            found="a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device",
        )
    return status.st_size


def read_json_object(path: Path, *, limit: int, error: type[MlcpipeError]) -> dict[str, Any]:
    """The object in the JSON file `path`, at most `limit` bytes long.

    Raises `error` when the file is absent, too large, not UTF-8, not JSON or not an object.
    """
    try:
        size = require_regular_file(path)
        with path.open("rb") as file:
            raw = file.read(min(size, limit) + 1)
    except CheckpointError as problem:
        raise error(
            problem.what,
            where=problem.where,
            expected=problem.expected,
            found=problem.found,
            next_step=problem.next_step,
        ) from None
    except OSError as problem:
        raise error("cannot read a file", where=shown_path(path), found=problem) from problem
    if max(size, len(raw)) > limit:
        raise error(
            "file too large", where=shown_path(path), expected=f"at most {limit} bytes", found=f"{size} bytes"
        )
    return parse_json_object(raw, where=shown_path(path), error=error)


def parse_json_object(raw: bytes, *, where: str, error: type[MlcpipeError]) -> dict[str, Any]:
    """The JSON object in `raw`. Raises `error` for anything else, naming the offence and `where`.

    NaN and Infinity are accepted, as in transformers (Mamba-2 configurations hold them): readers check types.
    """
    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.append(counts.most_common(1)[0][0])
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as problem:
        raise error(
            "not UTF-8", where=where, expected="JSON in UTF-8", found=f"a bad byte at offset {problem.start}"
        ) from problem
    except RecursionError as problem:
        raise error("JSON nested too deeply", where=where, expected="a plain JSON object") from problem
    except ValueError as problem:  # JSONDecodeError, and integers past Python's digit limit
        raise error("not valid JSON", where=where, found=problem) from problem
    if not isinstance(value, dict):
        raise error(
            "wrong kind of JSON", where=where, expected="an object", found=f"a {type(value).__name__}"
        )
    if repeated:
        raise error(
            f"duplicate key {shown(repeated[0])}",
            where=where,
            expected="each key once",
            found="it twice or more",
        )
    return value
