"""Objects of a schema are closed where that cannot forbid what another part of the schema names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlcpipe.runtime.serving.closed_schema import closed
from mlcpipe.runtime.serving.grammar import GrammarCompiler, GrammarSource
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.conftest import DEMO

pytest.importorskip("llguidance")

A, B = {"type": "integer"}, {"type": "string"}
OBJECT = {"type": "object", "properties": {"a": A}}
CLOSED = {**OBJECT, "additionalProperties": False}
CASES: list[tuple[Any, Any]] = [
    (OBJECT, CLOSED),
    ({"type": "object"}, {"type": "object"}),
    ({**OBJECT, "additionalProperties": True}, {**OBJECT, "additionalProperties": True}),
    ({**OBJECT, "additionalProperties": OBJECT}, {**OBJECT, "additionalProperties": CLOSED}),
    ({**OBJECT, "patternProperties": {"^x": A}}, {**OBJECT, "patternProperties": {"^x": A}}),
    ({"type": "array", "items": OBJECT}, {"type": "array", "items": CLOSED}),
    ({"anyOf": [OBJECT, B]}, {"anyOf": [CLOSED, B]}),
    ({"$defs": {"O": OBJECT}, "$ref": "#/$defs/O"}, {"$defs": {"O": CLOSED}, "$ref": "#/$defs/O"}),
    ({"allOf": [OBJECT]}, {"allOf": [CLOSED]}),
    ({"const": OBJECT}, {"const": OBJECT}),
    ({"properties": {"properties": OBJECT}}, {"properties": {"properties": CLOSED}, "additionalProperties": False}),
    (True, True),
    ({**OBJECT, "required": ["a"]}, {**CLOSED, "required": ["a"]}),
    ({**OBJECT, "required": ["a", "b"]}, {**OBJECT, "required": ["a", "b"]}),
    # Several schemas for one object.
    *[(one, one) for one in (
        {"allOf": [OBJECT, {"type": "object", "properties": {"b": B}}]},
        {**OBJECT, "anyOf": [{"properties": {"b": A}}, {"properties": {"b": B}}]},
        {**OBJECT, "$ref": "#/$defs/O", "$defs": {"O": {"properties": {"b": B}}}},
        {**OBJECT, "anyOf": [{"$ref": "#/$defs/O"}], "$defs": {"O": {"properties": {"b": B}}}},
        {**OBJECT, "if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": B}}},
    )],
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), CASES, ids=str)
def test_what_is_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected


def test_grammars_are_of_closed_schemas() -> None:
    tokenizer = Tokenizer.load(DEMO, generation_config={}, config=json.loads((DEMO / "config.json").read_text()))
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)

    def takes(schema: Any, text: str) -> bool:
        matcher = compiler.compile(GrammarSource("json_schema", json.dumps(schema))).matcher()
        tokens = tokenizer.encode(text)
        return matcher.allowed(tokens) >= len(tokens) - 1  # the last one ends the answer

    assert takes(OBJECT, '{"a": 1}') and not takes(OBJECT, '{"a": 1, "b": 1}')
    assert takes({**OBJECT, "additionalProperties": True}, '{"a": 1, "b": 1}')
    both = {"allOf": [OBJECT, {"type": "object", "properties": {"b": B}}]}
    assert takes(both, '{"a": 1, "b": "x"}') and not takes(both, '{"a": 1, "b": 1}')
