"""Bounded forms of the operators and methods that a template can use on text, lists and mappings.

What can make something much larger than its arguments computes the size first. The rest is let through: the caller
counts the result, which is at most a few times the size of arguments that were counted before.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlcpipe.runtime.template_budget import MAX_BITS, MAX_WIDTH, Budget, LimitError

_MAX_CHARS_TO_STRIP = 256  # str.strip(chars) costs len(text) * len(chars)
_MAX_REVERSE_SEARCH = 100_000_000  # str.rfind costs len(text) * len(needle) at worst
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NUMBER = re.compile(r"\d{5,}")

_PLAIN_METHODS = (
    "startswith endswith lower upper capitalize casefold swapcase title find index count partition removeprefix "
    "removesuffix isdigit isalpha isalnum isspace isnumeric isdecimal isupper islower istitle isascii"
)
# Their cost does not depend on the length of the text or list.
CONSTANT_METHODS = frozenset(["get", "items", "keys", "values", "startswith", "endswith"])


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


def binary(budget: Budget, symbol: str, left: Any, right: Any) -> Any:
    """`left symbol right`, refused where it would be too large."""
    budget.tick()
    if symbol == "%" and isinstance(left, str):
        return percent(budget, left, right)
    if symbol == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.fits_items(len(left) + len(right))
    elif symbol == "+" and isinstance(left, str) and isinstance(right, str):
        budget.fits_text(len(left) + len(right))
    elif symbol == "*":
        _check_product(budget, left, right)
        _check_product(budget, right, left)
    elif symbol == "**" and isinstance(left, int) and isinstance(right, int):  # noqa: SIM102
        if right > MAX_BITS or left.bit_length() * max(right, 1) > MAX_BITS:
            raise LimitError(f"an integer of more than {MAX_BITS} bits")
    return budget.take(_OPERATORS[symbol](left, right), fresh=False)


def _check_product(budget: Budget, value: Any, times: Any) -> None:
    if isinstance(times, int) and isinstance(value, str):
        budget.fits_text(len(value) * times)
    elif isinstance(times, int) and isinstance(value, (list, tuple)):
        budget.fits_items(len(value) * times)


def percent(budget: Budget, text: str, values: Any) -> Any:
    """printf-style `text % values` with bounded widths."""
    if "*" in text or _NUMBER.search(text):
        raise LimitError(f"a format wider than {MAX_WIDTH}")
    parts = values if isinstance(values, tuple) else (values,)
    budget.plain(*parts)
    # A mapping's entry can be named again and again, so each conversion may cost the largest.
    largest = max((budget.weigh(part).text for part in parts), default=0)
    budget.fits_text(len(text) + text.count("%") * largest)
    return budget.take(text % values)


def _width(budget: Budget, bound: Callable[..., Any], width: int, *fill: str) -> Any:
    check_width(width)
    return bound(width, *fill)


def check_width(width: Any) -> None:
    if not isinstance(width, int) or abs(width) > MAX_WIDTH:
        raise LimitError(f"a width over {MAX_WIDTH}")


def strip(budget: Budget, bound: Callable[..., Any], chars: str | None = None) -> Any:
    if chars is not None and len(chars) > _MAX_CHARS_TO_STRIP:
        raise LimitError(f"strip of more than {_MAX_CHARS_TO_STRIP} characters")
    return bound(chars)


def replace(budget: Budget, bound: Any, old: str, new: str, count: int = -1) -> Any:
    text: str = bound.__self__
    times = text.count(old) if count < 0 else min(count, text.count(old))
    budget.fits_text(len(text) + times * (len(new) - len(old)))
    return bound(old, new, count)


def _join(budget: Budget, bound: Any, parts: Any) -> Any:
    budget.plain(parts)
    weight = budget.weigh(parts)
    budget.fits_text(weight.text + len(bound.__self__) * weight.items)
    return bound(parts)


def _split(budget: Budget, bound: Any, sep: str | None = None, maxsplit: int = -1) -> Any:
    if bound.__name__ == "rsplit" and sep is not None:
        _check_reverse(bound, sep)
    if maxsplit < 0 or maxsplit > budget.max_items:
        maxsplit = budget.max_items  # one more piece than allowed, for take() to refuse
    return bound(sep, maxsplit)


def _splitlines(budget: Budget, bound: Any, keepends: bool = False) -> Any:
    text: str = bound.__self__
    budget.fits_items(sum(text.count(end) for end in _LINE_ENDS))
    return bound(keepends)


def _reverse_search(budget: Budget, bound: Any, needle: str, *span: int) -> Any:
    _check_reverse(bound, needle)
    return bound(needle, *span)


def _check_reverse(bound: Any, needle: str) -> None:
    if len(bound.__self__) * len(needle) > _MAX_REVERSE_SEARCH:
        raise LimitError("a search from the right in too long a text")


def _call(budget: Budget, bound: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return bound(*args, **kwargs)


Method = Callable[..., Any]

STR_METHODS: Mapping[str, Method] = {
    **dict.fromkeys(_PLAIN_METHODS.split(), _call),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _width),
    **dict.fromkeys(("strip", "lstrip", "rstrip"), strip),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _reverse_search),
    "replace": replace,
    "join": _join,
    "splitlines": _splitlines,
}
METHODS: Mapping[type, Mapping[str, Method]] = {
    str: STR_METHODS,
    dict: dict.fromkeys(("get", "items", "keys", "values", "copy"), _call),
    list: dict.fromkeys(("index", "count", "copy"), _call),
    tuple: dict.fromkeys(("index", "count"), _call),
}


def method_of(owner: Any, name: str) -> Method | None:
    """The bounded form of `owner.name(...)`, None for a method that templates may not call."""
    for kind, methods in METHODS.items():
        if isinstance(owner, kind):
            return methods.get(name)
    return None
