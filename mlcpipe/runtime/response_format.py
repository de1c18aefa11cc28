"""The form of a whole answer, as a Python program says it: any JSON, a JSON schema, a pydantic model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.serving.grammar import GrammarSource

ResponseFormat = Mapping[str, Any] | type
ANY_OBJECT = {"type": "object"}
_EXPECTED = '{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": …}}, a schema, a pydantic model'


def form_of(response_format: ResponseFormat) -> GrammarSource:
    """The grammar of answers in a form: OpenAI's `response_format`, a JSON schema, or a class of pydantic's.

    Raises UsageError.
    """
    schema: Any = response_format
    if isinstance(response_format, type):
        schema = getattr(response_format, "model_json_schema", lambda: None)()
    elif isinstance(response_format, Mapping) and response_format.get("type") == "json_object":
        schema = response_format.get("schema", ANY_OBJECT)
    elif isinstance(response_format, Mapping) and response_format.get("type") == "json_schema":
        schema = response_format.get("json_schema", response_format)
        schema = schema.get("schema") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping):
        raise UsageError("response_format", expected=_EXPECTED, found=repr(response_format)[:100])
    try:
        return GrammarSource("json_schema", json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise UsageError("response_format", expected="a schema of JSON values", found=error) from None
