"""The native tokenizer and its streams of text as objects of Python."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from mlcpipe.compiler.text.tokenizer_program import tokenizer_program
from mlcpipe.errors import TokenizerError, UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.native.cxx import RUNTIME, Build
from tests.native.pipelines import PIPELINES, save

SOURCES = [
    Path(__file__).with_name("tokenizer.cc"),
    *(RUNTIME / "text" / f"{name}.cc" for name in ("normalizer", "pattern", "text_stream")),
    *sorted((RUNTIME / "text").glob("tokenizer*.cc")),
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ x }}<|eot_id|>\n{% endfor %}"
_ERRORS = {1: UsageError, 3: TokenizerError}
_ROOM = 1000


class _Object:
    """Something that C++ made; `names` are its functions, all of which return 64 bits."""

    def __init__(self, library: ctypes.CDLL, close: str) -> None:
        self._library = library
        self._made = ctypes.c_void_p()
        self._close = close

    def __del__(self) -> None:
        if self._made:
            getattr(self._library, self._close)(self._made)

    def _call(self, name: str, *arguments: Any) -> int:
        """Raises the error whose code the function gives; fails for one that is not expected here."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        line = ctypes.create_string_buffer(_ROOM)
        code: int = function(*arguments, line, ctypes.c_size_t(_ROOM))
        if code < 0:
            raise _ERRORS[-code](line.value.decode(errors="replace"))
        return code

    def _text(self, name: str, *arguments: Any, room: int = 4000) -> str:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int64
        out = ctypes.create_string_buffer(room)
        size = function(self._made, *arguments, out, ctypes.c_size_t(room))
        assert size <= room
        return out.raw[:size].decode("utf-8")


class NativeTokenizer(_Object):
    def __init__(self, build: Build, file: bytes, *flags: str) -> None:
        super().__init__(build(SOURCES, *flags), "tokenizer_close")
        # As malloc may give an address that is no multiple of 8.
        self._words = (ctypes.c_uint64 * (len(file) // 8 + 1))()
        ctypes.memmove(self._words, file, len(file))
        self._call("tokenizer_open", self._words, ctypes.c_size_t(len(file)), ctypes.byref(self._made))

    @classmethod
    def of(cls, build: Build, tokenizer: Tokenizer) -> NativeTokenizer:
        return cls(build, tokenizer_program(tokenizer))

    def encode(self, text: str | bytes, add_special_tokens: bool = False) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        flag, room = ctypes.c_bool(add_special_tokens), 2 * len(data) + 100
        ids = (ctypes.c_uint32 * room)()
        size = ctypes.c_size_t(len(data))
        return ids[: self._call("tokenizer_encode", self._made, data, size, flag, ids, ctypes.c_size_t(room))]

    def encode_chat(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        data = [text.encode() for text, _ in parts]
        sizes = _numbers([len(part) for part in data])
        contents = (ctypes.c_bool * len(parts))(*(is_content for _, is_content in parts))
        room = 2 * sum(map(len, data)) + 100
        ids = (ctypes.c_uint32 * room)()
        arguments = (b"".join(data), sizes, contents, ctypes.c_size_t(len(parts)), ids, ctypes.c_size_t(room))
        return ids[: self._call("tokenizer_encode_chat", self._made, *arguments)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        arguments = (_numbers(ids), ctypes.c_size_t(len(ids)), ctypes.c_bool(skip_special_tokens))
        return self._text("tokenizer_decode", *arguments, room=200 * len(ids) + 100)

    def stream(self, *arguments: Any, **options: Any) -> NativeStream:
        return NativeStream(self._library, self, self._made, *arguments, **options)


def of_pipeline(build: Build, name: str, folder: Path) -> tuple[NativeTokenizer, Tokenizer]:
    saved = save(PIPELINES[name](), folder, {"chat_template": TEMPLATE})
    tokenizer = Tokenizer.load(saved, generation_config={}, config={})
    return NativeTokenizer.of(build, tokenizer), tokenizer


class NativeStream(_Object):
    """With the names of `TextStream` of Python."""

    def __init__(
        self,
        library: ctypes.CDLL,
        owner: NativeTokenizer,
        tokenizer: ctypes.c_void_p,
        stop: Sequence[str] = (),
        eos_ids: Collection[int] = (),
        *,
        continues: bool = False,
        shown: Collection[int] = (),
    ) -> None:
        super().__init__(library, "stream_close")
        self._owner = owner  # which must stay
        library.stream_stopped.restype = ctypes.c_bool
        stops = "".join(f"{text}\n" for text in stop).encode()
        ids = [argument for part in (eos_ids, shown) for argument in (_numbers(part), ctypes.c_size_t(len(part)))]
        size = ctypes.c_size_t(len(stops))
        self._call("stream_open", tokenizer, stops, size, *ids, ctypes.c_bool(continues), ctypes.byref(self._made))

    def push(self, token_id: int) -> str:
        return self._text("stream_push", ctypes.c_uint32(token_id))

    def flush(self) -> str:
        return self._text("stream_flush")

    @property
    def stopped(self) -> str | None:
        return "stop" if self._library.stream_stopped(self._made) else None

    @property
    def stop_string(self) -> str | None:
        return self._text("stream_stop_string") or None


def _numbers(ids: Collection[int]) -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * len(ids))(*ids)


def disagreements(native: NativeTokenizer, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Texts whose ids differ from those of `tokenizers`."""
    encodings = tokenizer.library.encode_batch(list(texts), add_special_tokens=False)
    return [text for text, encoding in zip(texts, encodings, strict=True) if native.encode(text) != list(encoding.ids)]
