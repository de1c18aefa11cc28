"""Calls the native runtime's chat templates from Python."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from mlcpipe.compiler.text.template_program import template_program
from tests.native.cxx import RUNTIME, Build

SOURCES = [
    Path(__file__).with_name("template.cc"),
    *(
        path
        for part in ("template", "value", "filters", "json")
        for path in sorted((RUNTIME / "text").glob(f"{part}*.cc"))
    ),
]
ERRORS = {0: None, 1: "UsageError", 4: "TemplateError"}
NOW = datetime(2026, 3, 1, 14, 5, 9)
_ROOM = 1 << 22


def build(native_library: Build, *flags: str) -> ctypes.CDLL:
    return native_library(SOURCES, *flags)


class NativeTemplate:
    """As ChatTemplate, of a program that is compiled here or given."""

    def __init__(
        self, library: ctypes.CDLL, source: str | bytes, *, control: Sequence[str] = (), **tokens: str
    ) -> None:
        file = source if isinstance(source, bytes) else template_program(source, control=control)
        self._library, self._bytes = library, len(file)
        self._words = (ctypes.c_uint64 * (len(file) // 8 + 1))()  # at a multiple of 8
        ctypes.memmove(self._words, file, len(file))
        self._tokens = tokens

    def render(
        self, messages: Any, *, add_generation_prompt: bool = True, marked: bool = False, **extras: Any
    ) -> tuple[str | None, str]:
        """The error's name or None, and the text or the error's line. Content lies between \\x01 and \\x02 if `marked`."""
        return self.render_json(_json(messages), _json(extras), add_generation_prompt, marked)

    def render_json(
        self, messages: bytes, extras: bytes, prompt: bool = True, marked: bool = False
    ) -> tuple[str | None, str]:
        tokens = [text.encode() for pair in self._tokens.items() for text in pair]
        given = (ctypes.c_char_p * (len(tokens) + 1))(*tokens, None)
        fields = (
            NOW.year - 1900,
            NOW.month - 1,
            NOW.day,
            NOW.hour,
            NOW.minute,
            NOW.second,
            NOW.isoweekday() % 7,
            NOW.timetuple().tm_yday - 1,
        )
        now, out, length = (ctypes.c_int * 8)(*fields), ctypes.create_string_buffer(_ROOM), ctypes.c_size_t()
        code = self._library.template_render(
            *(self._words, ctypes.c_size_t(self._bytes), messages, ctypes.c_size_t(len(messages))),
            *(extras, ctypes.c_size_t(len(extras)), given, int(prompt), now, int(marked)),
            *(out, ctypes.c_size_t(_ROOM), ctypes.byref(length)),
        )
        return ERRORS[code], out.raw[: length.value].decode()


def _json(value: Mapping[str, Any] | Sequence[Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
