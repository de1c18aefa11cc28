"""The native tokenizer as an object of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.conftest import RUNTIME, Build

TEMPLATES = ("template", "value", "filters", "json")  # how the names of the other half of the folder begin
SOURCES = [Path(__file__).with_name("tokenizer.cc")]
SOURCES += sorted(path for path in (RUNTIME / "text").glob("*.cc") if not path.name.startswith(TEMPLATES))
_TOKENIZER_ERROR = 3
_ROOM = 1000


class NativeTokenizer:
    """Raises TokenizerError where the library gives that code, and fails for another one."""

    def __init__(self, build: Build, file: bytes, *flags: str) -> None:
        self._library = build(SOURCES, *flags)
        self._words = (
            ctypes.c_uint64 * (len(file) // 8 + 1)
        )()  # as malloc may give an address that is no multiple of 8
        ctypes.memmove(self._words, file, len(file))
        self._made = ctypes.c_void_p()
        for name in ("tokenizer_open", "tokenizer_encode"):
            getattr(self._library, name).restype = ctypes.c_int64
        line = ctypes.create_string_buffer(_ROOM)
        size = ctypes.c_size_t(len(file))
        self._check(self._library.tokenizer_open(self._words, size, ctypes.byref(self._made), line, _ROOM), line)

    @classmethod
    def of(cls, build: Build, tokenizer: Tokenizer) -> NativeTokenizer:
        return cls(build, tokenizer_program(tokenizer))

    def encode(self, text: str | bytes, add_special_tokens: bool = False) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        room = 2 * len(data) + 100
        ids = (ctypes.c_uint32 * room)()
        line = ctypes.create_string_buffer(_ROOM)
        size = ctypes.c_size_t(len(data))
        flag = ctypes.c_bool(add_special_tokens)
        count = self._library.tokenizer_encode(
            self._made, data, size, flag, ids, ctypes.c_size_t(room), line, ctypes.c_size_t(_ROOM)
        )
        return ids[: self._check(count, line)]

    def close(self) -> None:
        self._library.tokenizer_close(self._made)
        self._made = ctypes.c_void_p()

    def __del__(self) -> None:
        if getattr(self, "_made", None):
            self.close()

    @staticmethod
    def _check(code: int, line: ctypes.Array[ctypes.c_char]) -> int:
        if code < 0:
            assert code == -_TOKENIZER_ERROR, (code, line.value)
            raise TokenizerError(line.value.decode(errors="replace"))
        return code


def disagreements(native: NativeTokenizer, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Texts whose ids differ from those of `tokenizers`."""
    encodings = tokenizer.library.encode_batch(list(texts), add_special_tokens=False)
    return [text for text, encoding in zip(texts, encodings, strict=True) if native.encode(text) != list(encoding.ids)]
