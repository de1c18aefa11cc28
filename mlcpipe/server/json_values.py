"""Counts the values of JSON before parsing: a value takes some 100 bytes, 50 times its text."""

from __future__ import annotations

import json
import math
from typing import Any

from mlcpipe.server.errors import ApiError

MAX_VALUES = 1 << 18
_STRUCTURE = b'"[{:,'
_TEXT = bytes(set(range(256)) - set(_STRUCTURE))


def check_values(data: bytes, most: int) -> None:
    """Raises ApiError for JSON of more than `most` values, before it takes the memory.

    A value follows one of `[{:,` outside of strings. In malformed JSON that holds up to the place where a parser
    stops.
    """
    if sum(map(data.count, (b"[", b"{", b":", b","))) <= most:
        return
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _TEXT)
    # Each string is a value or the name of one.
    if bare.count(b'"') > 4 * most or len(b"".join(bare.split(b'"')[::2])) > most:
        raise ApiError(400, f"the body has too many values; expected at most {most}", code="invalid_body")


def values_of(data: Any) -> int:
    """How many values plain JSON data has, the names of an object's among them. Raises ApiError for numbers that JSON
    has no words for: 1e999 is read as infinity.
    """
    count, left = 0, [data]
    while left:
        part = left.pop()
        count += 1
        if isinstance(part, dict):
            count += len(part)
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, float) and not math.isfinite(part):
            raise ApiError(400, f"the body: expected finite numbers, found {part}", code="invalid_body")
    return count


def object_in(text: str) -> dict[str, Any]:
    """The object of a text that a model wrote; {} for one that was cut off, or has numbers beyond JSON's."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value, allow_nan=False)  # JSON has no infinity, but 1e999
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def value_in(text: str) -> Any:
    """Parse a text of a body as JSON. Raises ApiError for too many values, ValueError for malformed JSON."""
    check_values(text.encode(errors="surrogatepass"), MAX_VALUES)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
