"""Arguments in tags: the text between them, by the tool's JSON schema.

Strings are written verbatim, all other values as JSON.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.tool_formats.style import INPUT, Tool, arguments_schema, quoted

Schema = Mapping[str, Any]
Text = str | tuple[str, ...]  # a literal, or regular expressions that a text must match
_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_DEFS = ("$defs", "definitions")
_ANY: Schema = {}
_NOTHING: Schema = {"enum": []}
_MOST_DEPTH, _MOST_FORMS = 8, 64
# Keywords that are honoured, and those that do not restrict values.
_SAID = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
_ALWAYS = {"type", "$ref", "anyOf", "oneOf", "allOf", *_DEFS, *_SAID}
_OF_OBJECTS = {"properties", "required", "additionalProperties", *_ALWAYS}
_OF_TEXTS = {"enum", "const", "minLength", "maxLength", "pattern", *_ALWAYS}
# No text contains a tag, at which the reader would stop; the end tag begins a line.
_TEXT = "/{}\\n<\\/parameter>\\n/"
_NO_TAGS = "~/(.|\\n)*([^\\n]<\\/parameter>|<\\/(parameter>(.|\\n)*<\\/parameter|function|tool_call)>)(.|\\n)*/"
_TAGS = ("</parameter>", "</function>", "</tool_call>")
_NO_JSON = "~/\\s*[\\[{](.|\\n)*/"  # which would be read as JSON
_BOUNDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
_WRITABLE = re.compile(r"[^>\n]+")


@dataclass(frozen=True)
class Form:
    """One possible form of a tool's arguments: `more` is the schema of unnamed ones, if any."""

    properties: Mapping[str, Schema]
    required: Collection[str]
    more: Schema | None


class Values:
    """The restrictions in a tool's schema; `known`: whether all of it is understood."""

    def __init__(self, tool: Tool) -> None:
        self._schema, self.known = arguments_schema(tool), True
        self._defs = {key: self._schema[key] for key in _DEFS if isinstance(self._schema.get(key), Mapping)}
        self._types: dict[int, frozenset[str]] = {}  # by the identity of a schema
        self._texts: dict[int, list[Text]] = {}
        self.forms = self._forms(self._schema, 0)

    def _forms(self, schema: Schema, depth: int) -> list[Form]:
        """The alternatives of an object."""
        self.known = self.known and depth < _MOST_DEPTH and _OF_OBJECTS.issuperset(schema)
        forms = [_own(schema)]
        for several in self._parts(schema) if depth < _MOST_DEPTH else ():
            others = [form for one in several for form in self._forms(one, depth + 1)]
            forms = [_both(one, other) for one in forms for other in others]
            self.known = self.known and len(forms) <= _MOST_FORMS
            forms = forms[:_MOST_FORMS]
        return forms

    def _parts(self, schema: Schema) -> Iterable[Sequence[Schema]]:
        """The subschemas of a schema, in groups: one of each group must hold."""
        if isinstance(schema.get("$ref"), str):
            yield [self._resolved(schema["$ref"])]
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                yield [_as_schema(one) for one in schema[key]]
        for one in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield [_as_schema(one)]

    def _resolved(self, reference: str) -> Schema:
        """The schema at "#/$defs/NAME"; other references are unknown."""
        where, _, name = reference.removeprefix("#/").partition("/")
        found = self._defs.get(where, {}).get(name.replace("~1", "/").replace("~0", "~"))
        self.known = self.known and isinstance(found, Mapping)
        return _as_schema(found)

    def types(self, schema: Schema) -> frozenset[str]:
        """The possible JSON types of a value; integers are numbers, too."""
        if (kept := self._types.get(id(schema))) is not None:
            return kept
        self._types[id(schema)] = _TYPES  # for a schema inside itself
        given, values = schema.get("type"), _values(schema)
        names = [given] if isinstance(given, str) else given if isinstance(given, list) else _TYPES
        found = _TYPES.intersection(name for name in names if isinstance(name, str))
        if values is not None:
            found &= {name for value in values for name in _types_of(value)}
        for several in self._parts(schema):
            found &= frozenset().union(*map(self.types, several))
        self._types[id(schema)] = found | {"integer"} if "number" in found else found
        return self._types[id(schema)]

    def texts(self, schema: Schema) -> list[Text]:
        """The possible string values."""
        if (kept := self._texts.get(id(schema))) is not None:
            return kept
        self._texts[id(schema)] = [()]
        values, found = _values(schema), list[Text]()
        if "string" not in self.types(schema):
            pass
        elif values is not None:
            found += [value for value in values if isinstance(value, str)]
        else:
            self.known = self.known and (self.types(schema) != {"string"} or _OF_TEXTS.issuperset(schema))
            found.append(_expressions(schema))
            for several in self._parts(schema):
                others = [text for one in several for text in self.texts(one)]
                pairs = [_and(one, other) for one in found for other in others]
                found = [text for text in pairs if text is not None]
        self._texts[id(schema)] = found
        return found

    def json(self, schema: Schema) -> str:
        """The schema of non-string values, for a grammar; "" if all are strings."""
        types = self.types(schema)
        if not (others := types - {"string"}):
            return ""
        return json.dumps(
            {**self._defs, **(schema if types == others else {"allOf": [schema, {"type": sorted(others)}]})}
        )

    def fits(self, schema: Schema, value: Any, seen: dict[int, bool]) -> bool:
        """Whether a value fits a schema, by its type, values and bounds; `seen` guards recursion."""
        if id(schema) in seen:
            return seen[id(schema)]
        seen[id(schema)] = True  # for a schema inside itself
        values = _values(schema)
        bounds = [(holds, schema[key]) for key, holds in _BOUNDS.items() if _is_number(schema.get(key))]
        seen[id(schema)] = (
            not self.types(schema).isdisjoint(_types_of(value))
            and (values is None or any(one == value and _types_of(one) == _types_of(value) for one in values))
            and (not _is_number(value) or all(holds(value, bound) for holds, bound in bounds))
            and all(any(self.fits(one, value, seen) for one in several) for several in self._parts(schema))
        )
        return seen[id(schema)]

    def schemas(self, key: str) -> list[Schema]:
        """The schemas of a parameter in all forms."""
        known = [form.properties[key] for form in self.forms if key in form.properties]
        return known or [form.more for form in self.forms if form.more is not None] or [_ANY]

    def written(self, key: str, text: str) -> str:
        """The JSON of the text between a parameter's tags: a string if no other value fits."""
        schemas, as_text = self.schemas(key), json.dumps(text, ensure_ascii=False)
        try:
            value = json.loads(text, parse_constant=int)  # NaN and infinity are not JSON numbers, nor integers
        except (ValueError, RecursionError):
            return as_text
        text_fits = any("string" in self.types(schema) for schema in schemas)
        is_json = not isinstance(value, str) and (not text_fits or any(self.fits(one, value, {}) for one in schemas))
        return text.strip() if is_json else as_text


@dataclass
class Rules:
    """Rules in Lark for all tools' parameters, and the JSON schemas and grammars that they name, without duplicates."""

    lines: list[str] = field(default_factory=list)
    parts: dict[str, str] = field(default_factory=dict)  # schema -> name
    lark_parts: dict[str, str] = field(default_factory=dict)  # grammar -> name
    _names: dict[str, str] = field(default_factory=dict)

    def arguments(self, tool: Tool) -> str:
        """An expression of the parameters of a tool, in the order of its schema.

        Raises UsageError for parameters without a value, and for a strict tool with unknown keywords.
        """
        if tool.lark:  # a text is written as it is
            name = self.lark_parts.setdefault(tool.lark, f"input_{len(self.lark_parts)}")
            return f'"<parameter={INPUT}>\\n" @{name} "\\n</parameter>\\n"'
        values = Values(tool)
        forms = [" ".join(self._parameters(form, values)) or '""' for form in values.forms]
        if tool.strict and not values.known:
            raise UsageError(f"the strict tool {tool.name}", expected="keywords that texts in tags can be held to")
        return f"({' | '.join(dict.fromkeys(forms))})"

    def _parameters(self, form: Form, values: Values) -> Iterable[str]:
        possible = {key: one for key, one in form.properties.items() if one != _NOTHING or key in form.required}
        names = [key for key in form.properties if _WRITABLE.fullmatch(key)]
        for key in filter(possible.__contains__, names):
            value = self._value(possible[key], key, values)
            yield f"({quoted(f'<parameter={key}>')} {value}){'' if key in form.required else '?'}"
        if form.more is not None:
            known = "|".join("".join(f"\\x{{{ord(char):x}}}" for char in key) for key in names)
            name = self._named("NAME", f"/[^>\\n]+/ & ~/({known})/" if known else "/[^>\\n]+/")
            yield f'("<parameter=" {name} ">" {self._value(form.more, None, values)})*'

    def _value(self, schema: Schema, key: str | None, values: Values) -> str:
        """A value of a parameter and the tag that ends it."""
        found = []
        if part := values.json(schema):
            found.append(f'@{self.parts.setdefault(part, f"json_{len(self.parts)}")} "\\n</parameter>\\n"')
        for text in values.texts(schema):
            if isinstance(text, str):
                read_back = key is None or values.written(key, text).startswith('"')
                if read_back and not any(tag in text for tag in _TAGS):
                    found.append(quoted(f"{text}\n</parameter>\n"))
                continue
            limits = [_NO_TAGS, *([_NO_JSON] if values.types(schema) & {"array", "object"} else ())]
            body = " & ".join([*map(_TEXT.format, text or ("(.|\\n)*",)), *limits])
            found.append(self._named("text[lazy]", self._named("TEXT", body)))
        if not found:
            raise UsageError("a tool's parameter", expected="a schema that some value fits", found=dict(schema))
        return self._named("value", f'"\\n" ({" | ".join(found)})')

    def _named(self, kind: str, body: str) -> str:
        """The name of a rule or terminal, one for equal ones."""
        name = self._names.get(kind + body)
        if name is None:
            kind, lazy, _ = kind.partition("[lazy]")
            name = self._names[kind + lazy + body] = f"{kind}_{len(self._names)}"
            self.lines.append(f"{name}{lazy}: {body}")
        return name


def _own(schema: Schema) -> Form:
    """The restrictions of an object's own keywords."""
    given, required = schema.get("properties"), schema.get("required")
    properties = {key: _as_schema(one) for key, one in given.items()} if isinstance(given, Mapping) else {}
    required = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    other = _as_schema(schema.get("additionalProperties"))  # of required ones without their own schema
    more = schema.get("additionalProperties", not properties)
    return Form(
        properties | {key: other for key in required if key not in properties},
        required,
        None if more is False else _as_schema(more),
    )


def _both(one: Form, other: Form) -> Form:
    """The intersection of both."""
    more = one.more if other.more == _ANY and not other.properties else other.more
    properties = {**one.properties, **other.properties}
    for key in one.properties.keys() & other.properties.keys():
        first, second = one.properties[key], other.properties[key]
        several = first["allOf"] if first.keys() == {"allOf"} else [first]
        properties[key] = first if first == second else {"allOf": [*several, second]}
    return Form(properties, [*one.required, *other.required], more)


def _as_schema(value: Any) -> Schema:
    return value if isinstance(value, Mapping) else _NOTHING if value is False else _ANY


def _values(schema: Schema) -> list[Any] | None:
    """The only possible values."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def _and(one: Text, other: Text) -> Text | None:
    """The intersection, if any; a literal is assumed to match the expressions."""
    if isinstance(one, str):
        return None if isinstance(other, str) and other != one else one
    return other if isinstance(other, str) else (*one, *other)


def _expressions(schema: Schema) -> tuple[str, ...]:
    """A string's keywords as expressions that match the whole text."""
    from llguidance import regex_to_lark

    found = []
    least, most, pattern = (schema.get(key) for key in ("minLength", "maxLength", "pattern"))
    if isinstance(least, int) or isinstance(most, int):
        found.append(f"(.|\\n){{{least or 0},{'' if most is None else most}}}")
    if isinstance(pattern, str):
        ends = re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None  # not in "\$"
        inner = pattern.removeprefix("^")[: -1 if ends else None]
        begin, end = ("" if there else "(.|\\n)*" for there in (pattern.startswith("^"), ends))
        found.append(f"{begin}({regex_to_lark(inner, 'dw')}){end}")
    return tuple(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _types_of(value: Any) -> tuple[str, ...]:
    names = {str: "string", bool: "boolean", float: "number", type(None): "null", list: "array", dict: "object"}
    return ("integer", "number") if type(value) is int else (names[type(value)],)
