"""Bounded forms of what a template can call: operators, methods of text and lists, filters, tests.

An operation that can make something much larger than its arguments computes the size first. The others are let
through and their result is counted, since it is at most a few times the size of arguments that were counted before.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS, sync_do_slice
from jinja2.runtime import Context
from jinja2.tests import TESTS

from mlcpipe.runtime.template_budget import MAX_BITS, MAX_WIDTH, Budget, LimitError

BUDGET = "mlcpipe budget"  # a key of the context that no template can write: names have no spaces

_MAX_CHARS_TO_STRIP = 256  # str.strip(chars) costs len(text) * len(chars)
_MAX_REVERSE_SEARCH = 100_000_000  # str.rfind costs len(text) * len(needle) at worst
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_NUMBER = re.compile(r"\d{5,}")

_PLAIN_METHODS = (
    "startswith endswith lower upper capitalize casefold swapcase title find index count partition removeprefix "
    "removesuffix isdigit isalpha isalnum isspace isnumeric isdecimal isupper islower istitle isascii"
)
# Filters of jinja2 that need no more than the count of what they take and give. Not here: attr (reaches around the
# checks), random and pprint (not reproducible), urlencode and the HTML helpers (many bytes for a character).
_CONSTANT_FILTERS = "abs count d default length items"  # their cost does not depend on the length
_TEXT_FILTERS = "capitalize e escape forceescape lower safe string truncate upper"
_ITEM_FILTERS = (
    "dictsort first groupby last list map max min reject rejectattr reverse select selectattr sort unique"
)
CONSTANT_METHODS = frozenset(["get", "items", "keys", "values", "startswith", "endswith"])


def budget_of(context: Context) -> Budget:
    """The budget of the rendering that `context` belongs to."""
    budget: Budget = context.resolve_or_missing(BUDGET)
    return budget


# ---- operators -----------------------------------------------------------------------------------------------

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


# ---- methods -------------------------------------------------------------------------------------------------


def _width(budget: Budget, bound: Callable[..., Any], width: int, *fill: str) -> Any:
    _check_width(width)
    return bound(width, *fill)


def _check_width(width: Any) -> None:
    if not isinstance(width, int) or abs(width) > MAX_WIDTH:
        raise LimitError(f"a width over {MAX_WIDTH}")


def _strip(budget: Budget, bound: Callable[..., Any], chars: str | None = None) -> Any:
    if chars is not None and len(chars) > _MAX_CHARS_TO_STRIP:
        raise LimitError(f"strip of more than {_MAX_CHARS_TO_STRIP} characters")
    return bound(chars)


def _replace(budget: Budget, bound: Any, old: str, new: str, count: int = -1) -> Any:
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
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _strip),
    **dict.fromkeys(("split", "rsplit"), _split),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _reverse_search),
    "replace": _replace,
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


# ---- filters and tests ---------------------------------------------------------------------------------------


def _filter_center(budget: Budget, value: Any, width: int = 80) -> Any:
    _check_width(width)
    return FILTERS["center"](value, width)


def _filter_indent(
    budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> Any:
    size = width if isinstance(width, int) else len(width)
    _check_width(size)
    text = str(value)
    budget.fits_text(
        len(text) + (len(text.splitlines()) if len(text) < 1 << 20 else len(text)) * max(size, 0)
    )
    return FILTERS["indent"](text, width, first, blank)


def _filter_replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = value if isinstance(value, str) else str(value)
    return _replace(budget, text.replace, str(old), str(new), -1 if count is None else count)


def _filter_join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> Any:
    if not hasattr(value, "__len__"):
        raise LimitError(f"join of a {type(value).__name__}")
    budget.fits_items(len(value))
    parts = list(value)
    if attribute is not None:
        raise LimitError("join with attribute; use map(attribute=...)")
    weight = budget.weigh(parts)
    budget.fits_text(weight.text + len(str(d)) * weight.items)
    return str(d).join(map(str, parts))


def _filter_trim(budget: Budget, value: Any, chars: str | None = None) -> Any:
    text = value if isinstance(value, str) else str(value)
    return _strip(budget, text.strip, chars)


def _filter_round(budget: Budget, value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 100:
        raise LimitError("round to more than 100 digits")
    return FILTERS["round"](value, precision, method)


def _filter_int(budget: Budget, value: Any, default: int = 0, base: int = 10) -> Any:
    if isinstance(value, str) and len(value) > MAX_BITS:
        raise LimitError(f"a number of {len(value)} digits")
    return FILTERS["int"](value, default, base)


def _filter_float(budget: Budget, value: Any, default: float = 0.0) -> Any:
    if isinstance(value, str) and len(value) > MAX_BITS:
        raise LimitError(f"a number of {len(value)} digits")
    return FILTERS["float"](value, default)


def _filter_batch(budget: Budget, value: Any, linecount: int, fill_with: Any = None) -> Any:
    _check_width(linecount)
    _scan_items(budget, value)
    return FILTERS["batch"](value, linecount, fill_with)


def _filter_slice(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> Any:
    _check_width(slices)
    _scan_items(budget, value)
    return sync_do_slice(value, slices, fill_with)


def _filter_sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    if attribute is not None or not isinstance(start, (int, float)):
        raise LimitError("sum of anything but numbers")
    _scan_items(budget, value)
    return sum(part if isinstance(part, (int, float)) else _not_a_number(part) for part in value)


def _scan_items(budget: Budget, value: Any) -> None:
    """Before a loop over `value` in a filter; a text is a list of characters there."""
    if isinstance(value, str):
        budget.fits_items(len(value))
        budget.tick(len(value))
    else:
        budget.scan(value)


def _not_a_number(value: Any) -> float:
    raise LimitError(f"sum over a {type(value).__name__}")


def _filter_title(budget: Budget, value: Any) -> Any:
    text = str(value)
    budget.fits_items(len(text))  # the library cuts it into words
    return FILTERS["title"](text)


def _filter_format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise LimitError("format with both positional and named values")
    return percent(budget, str(value), kwargs or args)


def tojson(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, with the arguments that transformers' filter of this name has."""
    step = indent if isinstance(indent, int) else len(indent or "")
    if step > 16 or any(len(part) > 16 for part in separators or ()):
        raise LimitError("tojson with an indent or separator over 16 characters")
    weight = budget.weigh(value)
    budget.fits_text(weight.text + weight.items * weight.depth * max(step, 0))
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_BOUNDED_FILTERS: Mapping[str, Callable[..., Any]] = {
    "center": _filter_center,
    "indent": _filter_indent,
    "replace": _filter_replace,
    "join": _filter_join,
    "trim": _filter_trim,
    "round": _filter_round,
    "int": _filter_int,
    "float": _filter_float,
    "batch": _filter_batch,
    "slice": _filter_slice,
    "sum": _filter_sum,
    "title": _filter_title,
    "format": _filter_format,
    "tojson": tojson,
}


def filters() -> dict[str, Callable[..., Any]]:
    """Every filter a template may use, counted. All take the context, so that none runs while compiling."""
    table = {name: _counted(_bounded(function)) for name, function in _BOUNDED_FILTERS.items()}
    for name in _CONSTANT_FILTERS.split():
        table[name] = _counted(_library(FILTERS[name]), data_only=name not in ("d", "default"))
    for name in _TEXT_FILTERS.split():
        table[name] = _counted(_scanned(_library(FILTERS[name])))
    for name in _ITEM_FILTERS.split():
        table[name] = _counted(_itemized(_library(FILTERS[name])))
    return table


def tests() -> dict[str, Callable[..., Any]]:
    """Every test a template may use (`is …`), counted."""
    table = {name: _counted(_library(function), data_only=False) for name, function in TESTS.items()}
    for name in ("lower", "upper"):
        table[name] = _counted(_scanned(_library(TESTS[name])))
    table["in"] = _counted(_bounded(_test_in))
    return table


def _test_in(budget: Budget, value: Any, seq: Any) -> bool:
    budget.scan(seq)
    return value in seq


Inner = Callable[..., Any]


def _bounded(function: Callable[..., Any]) -> Inner:
    """A filter of this module, which takes the budget first."""

    def call(context: Context, budget: Budget, *args: Any, **kwargs: Any) -> Any:
        return function(budget, *args, **kwargs)

    return call


def _library(function: Any) -> Inner:
    """A filter of jinja2 itself, with the first argument that it asks for."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    def call(context: Context, budget: Budget, *args: Any, **kwargs: Any) -> Any:
        if wanted == "context":
            return function(context, *args, **kwargs)
        if wanted == "eval_context":
            return function(context.eval_ctx, *args, **kwargs)
        if wanted == "environment":
            return function(context.environment, *args, **kwargs)
        return function(*args, **kwargs)

    return call


def _scanned(inner: Inner) -> Inner:
    def call(context: Context, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget.scan(value)
        return inner(context, budget, value, *args, **kwargs)

    return call


def _itemized(inner: Inner) -> Inner:
    """For filters over items, to which a text is a list of characters."""

    def call(context: Context, budget: Budget, value: Any, *args: Any, **kwargs: Any) -> Any:
        _scan_items(budget, value)
        return inner(context, budget, value, *args, **kwargs)

    return call


def _counted(inner: Inner, *, data_only: bool = True) -> Callable[..., Any]:
    @pass_context
    def call(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(context)
        budget.tick()
        if data_only:
            budget.plain(*args, *kwargs.values())
        return budget.take(inner(context, budget, *args, **kwargs))

    return call
