"""The filters and tests that a template can use, each counted; those that amplify compute the size first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import pass_context
from jinja2.filters import FILTERS, sync_do_slice
from jinja2.runtime import Context
from jinja2.tests import TESTS

from mlcpipe.runtime.template_budget import MAX_BITS, Budget, LimitError, budget_of
from mlcpipe.runtime.template_methods import check_width, percent, replace, strip

# Filters of jinja2 that need no more than the count of what they take and give. Not here: attr (reaches around the
# checks), random and pprint (not reproducible), urlencode and the HTML helpers (many bytes for a character).
_CONSTANT_FILTERS = "abs count d default length items"  # their cost does not depend on the length
_TEXT_FILTERS = "capitalize e escape forceescape lower safe string truncate upper"
_ITEM_FILTERS = (
    "dictsort first groupby last list map max min reject rejectattr reverse select selectattr sort unique"
)


def _filter_center(budget: Budget, value: Any, width: int = 80) -> Any:
    check_width(width)
    return FILTERS["center"](value, width)


def _filter_indent(
    budget: Budget, value: Any, width: Any = 4, first: bool = False, blank: bool = False
) -> Any:
    size = width if isinstance(width, int) else len(width)
    check_width(size)
    text = str(value)
    budget.fits_text(
        len(text) + (len(text.splitlines()) if len(text) < 1 << 20 else len(text)) * max(size, 0)
    )
    return FILTERS["indent"](text, width, first, blank)


def _filter_replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text = value if isinstance(value, str) else str(value)
    return replace(budget, text.replace, str(old), str(new), -1 if count is None else count)


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
    return strip(budget, text.strip, chars)


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
    check_width(linecount)
    _scan_items(budget, value)
    return FILTERS["batch"](value, linecount, fill_with)


def _filter_slice(budget: Budget, value: Any, slices: int, fill_with: Any = None) -> Any:
    check_width(slices)
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
