"""The form of a whole answer, a schema or grammar, by any of the names that servers have for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlcpipe.runtime.response_format import ANY_OBJECT
from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.runtime.tool_formats.style import quoted
from mlcpipe.server.bodies import ResponseFormat, SamplingFields
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import value_in

_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def constraint(body: SamplingFields, form: ResponseFormat | None) -> GrammarSource | None:
    """The form of the whole answer, None for any. Raises ApiError for a malformed schema, and for two different ones:
    clients may name one schema in the fields of several servers.
    """
    given: list[tuple[str, str, Any]] = [
        ("response_format", "json", None if form is None else _schema_of(form)),
        ("json_schema", "json", body.json_schema),
        ("regex", "regex", body.regex),
        ("grammar", "grammar", body.grammar),
        ("ebnf", "grammar", body.ebnf),
        *((f"guided_{kind}", kind, getattr(body, f"guided_{kind}")) for kind in _MADE),
    ]
    if (structured := body.structured_outputs) is not None:
        given += [(f"structured_outputs.{kind}", kind, getattr(structured, f"{kind}_")) for kind in _MADE]
        given.append(("structured_outputs.json_object", "json", ANY_OBJECT if structured.json_object else None))
    made = {name: _MADE[kind](value, name) for name, kind, value in given if value not in (None, "")}
    if len({*made.values()}) > 1:
        raise ApiError(400, f"{', '.join(made)}: expected one of them", param=[*made][1])
    return next(iter(made.values()), None)


def _schema_of(form: ResponseFormat) -> Any:
    given = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if form.type == "json_schema" and given is None:
        raise ApiError(400, "response_format.json_schema.schema: expected a schema", param="response_format")
    if form.type == "text" and given is not None:
        raise ApiError(400, "response_format: a schema, expected the type json_schema", param="response_format")
    return ANY_OBJECT if form.type == "json_object" and given is None else given


def _json(schema: Any, name: str) -> GrammarSource:
    if isinstance(schema, str):
        try:
            schema = value_in(schema)
        except ValueError:
            schema = None
    if not isinstance(schema, (dict, bool)):
        raise ApiError(400, f"{name}: expected a JSON schema", param=name)
    return GrammarSource("json_schema", json.dumps(schema))


def _choice(texts: list[str], name: str) -> GrammarSource:
    if not texts:
        raise ApiError(400, f"{name}: expected texts to choose from", param=name)
    return GrammarSource("lark", f"start: {' | '.join(map(quoted, texts))}")


def _grammar(text: str, name: str) -> GrammarSource:
    """Lark, or llama.cpp's form, whose rules are `name ::= …`."""
    return GrammarSource("gbnf" if _GBNF.search(text) else "lark", text)


_MADE: Mapping[str, Callable[[Any, str], GrammarSource]] = {
    "json": _json, "regex": lambda text, name: GrammarSource("regex", text), "choice": _choice, "grammar": _grammar,
}  # fmt: skip
