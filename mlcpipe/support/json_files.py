"""Untrusted JSON: bounded size and number of values, UTF-8, no duplicate keys, one-line errors."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from mlcpipe.errors import MlcpipeError
from mlcpipe.support.files import read_bounded

SHOWN_CHARACTERS = 80
MAX_VALUES = 1_000_000
"""Python takes about 100 bytes for a value; the largest real index of shards has 2 * 140,000."""

Error = TypeVar("Error", bound=MlcpipeError)
Model = TypeVar("Model", bound=BaseModel)
Item = TypeVar("Item")
Key = TypeVar("Key")
# A JSON array as a tuple, also in strict mode. The first bad item ends it: pydantic would collect an error for each.
Items = Annotated[
    tuple[Item, ...],
    FailFast(),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


def _entry_by_entry(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(value, dict):
        return validate(value)
    return {name: item for entry in value.items() for name, item in validate(dict([entry])).items()}


# A JSON object with any names; its first bad entry ends it, too.
Table = Annotated[dict[Key, Item], WrapValidator(_entry_by_entry)]


class OnlyKnown:
    """The base of models and dataclasses without unknown fields: the first ends the check, however many there are."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, value: Any) -> Any:
        known = cls.model_fields if issubclass(cls, BaseModel) else {field.name for field in fields(cls)}  # type: ignore[arg-type]
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise ValidationError.from_exception_data(
                cls.__name__, [{"type": "extra_forbidden", "loc": (unknown,), "input": value[unknown]}]
            )
        return value


# For pydantic's messages that do not state the expected input.
_EXPECTED = {"missing": "a value", "extra_forbidden": "no such field", "unexpected_keyword_argument": "no such field"}


def shown(value: object) -> str:
    """A quoted, shortened form of an untrusted value, safe for a terminal, on one line."""
    try:
        quoted = ascii(value)
    except RecursionError:  # JSON at the limit of the parser
        return f"a deeply nested {type(value).__name__}"
    if len(quoted) <= SHOWN_CHARACTERS:
        return quoted
    return f"{quoted[:SHOWN_CHARACTERS]}... ({len(quoted)} characters)"


def shown_path(path: Path) -> str:
    """The whole path, quoted: its end matters most. repr escapes unprintable characters."""
    return repr(str(path))


def read_json_object(
    path: Path,
    *,
    limit: int,
    error: type[MlcpipeError],
    what: str = "file",
    next_step: str | None = None,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """The object in the JSON file `path`, at most `limit` bytes long.

    Raises `error` when the file is absent, too large, not UTF-8, not JSON or not an object.
    """
    raw = read_bounded(path, limit, error, what, next_step)
    return parse_json_object(raw, where=shown_path(path), error=error, next_step=next_step, max_values=max_values)


def parse_json_object(
    raw: bytes,
    *,
    where: str,
    error: type[MlcpipeError],
    next_step: str | None = None,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """The JSON object in `raw`. Raises `error` for anything else, naming the problem and `where`.

    NaN and Infinity are accepted, as in transformers (Mamba-2 configurations hold them): readers check types.
    """

    def refusal(what: str, expected: str | None = None, found: object = None) -> MlcpipeError:
        return error(what, where=where, expected=expected, found=found, next_step=next_step)

    repeated: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            repeated.append(counts.most_common(1)[0][0])
        return result

    # Every value follows one of these; punctuation inside strings counts too, so this is an upper bound.
    if (values := sum(map(raw.count, (b"[", b"{", b":", b",")))) > max_values:
        raise refusal("too many values in JSON", f"at most {max_values}", f"up to {values}")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
        if re.search(rb"\\u[dD][89a-fA-F]", raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as problem:
        raise refusal("not UTF-8", "JSON in UTF-8", f"a bad byte at offset {problem.start}") from problem
    except UnicodeEncodeError as problem:
        raise refusal("half of a surrogate pair", "text", shown(problem.object[problem.start])) from problem
    except RecursionError as problem:
        raise refusal("JSON nested too deeply", "a plain JSON object") from problem
    except ValueError as problem:  # JSONDecodeError, and integers past Python's digit limit
        raise refusal("not valid JSON", found=problem) from problem
    if not isinstance(value, dict):
        raise refusal("wrong type of JSON", "an object", f"a {type(value).__name__}")
    if repeated:
        raise refusal(f"duplicate key {shown(repeated[0])}", "each key once", "several")
    return value


def validated(
    model: type[Model], value: Any, *, what: str, where: object, error: type[MlcpipeError], next_step: str | None = None
) -> Model:
    """`value`, parsed from JSON, as a pydantic `model`. Raises `error` with the first of its defects."""
    try:
        return model.model_validate(value)
    except ValidationError as problem:
        raise invalid(problem, error, what, where, next_step) from None


def invalid(
    problem: ValidationError, error: type[Error], what: str, where: object, next_step: str | None = None
) -> Error:
    """The first of pydantic's errors as one line: `what` is not valid at this field."""
    first = problem.errors(include_url=False, include_context=False)[0]
    field = ascii(".".join(map(str, first["loc"])))[1:-1][:120]
    expected = _EXPECTED.get(first["type"]) or re.sub("^(Value error, |Input should be )", "", first["msg"])[:200]
    found = None if first["type"] == "missing" else shown(first["input"])
    what += " is not valid" + (f" at {field}" if field else "")
    return error(what, where=where, expected=expected, found=found, next_step=next_step)
