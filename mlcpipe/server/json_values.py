"""JSON that is counted before it is parsed: a value takes some 100 bytes, 50 times its text."""

from __future__ import annotations

import json
from typing import Any

from mlcpipe.server.errors import ApiError

MAX_VALUES = 1 << 18
_STRUCTURE = b'"[{:,'
_TEXT = bytes(set(range(256)) - set(_STRUCTURE))


def check_values(data: bytes, most: int) -> None:
    """Raises ApiError for JSON of more values than so many, before it takes the memory.

    A value follows one of `[{:,`, of which only those outside of strings count. In what is no JSON, that is so up to
    the place where a parser stops.
    """
    if sum(map(data.count, (b"[", b"{", b":", b","))) <= most:
        return
    bare = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _TEXT)
    # Each string is a value or the name of one.
    if bare.count(b'"') > 4 * most or len(b"".join(bare.split(b'"')[::2])) > most:
        raise ApiError(400, f"the body has too many values; expected at most {most}", code="invalid_body")


def value_in(text: str) -> Any:
    """The value that a text of a body has as JSON. Raises ApiError for too many values, ValueError for no JSON."""
    check_values(text.encode(errors="surrogatepass"), MAX_VALUES)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
