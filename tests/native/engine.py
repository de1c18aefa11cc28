"""The C API of the native runtime (mlcpipe/native/runtime/mlcpipe.h) by ctypes."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe import SamplingParams

USAGE, TOKENIZER, TEMPLATE = 1, 3, 4
BUNDLE, RESOURCE, TARGET, COMPUTE, CANCELLED = 5, 6, 7, 8, 9
_I32, _I64, _U64, _F64, _TEXT = ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_char_p
_ON_TOKEN = ctypes.CFUNCTYPE(_I32, ctypes.c_void_p, _I32)
_ON_END = ctypes.CFUNCTYPE(None, ctypes.c_void_p, _I32, ctypes.c_void_p)
_ON_TEXT = ctypes.CFUNCTYPE(_I32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Sized(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, *values: Any) -> None:
        super().__init__(ctypes.sizeof(type(self)), *values)


def _struct(name: str, **members: Any) -> type[_Sized]:
    return type(name, (_Sized,), {"_fields_": [("size", ctypes.c_size_t), *members.items()]})


_Error = _struct("Error", code=_I32, line=_TEXT, what=_TEXT, where=_TEXT, expected=_TEXT, found=_TEXT, next_step=_TEXT)
_Options = _struct(
    "Options", variant=_TEXT, context_length=_I64, threads=_I32, code=ctypes.c_void_p, sequences=_I64, kv_tokens=_I64,
    device=_TEXT, cache=_TEXT, gpu_path=_TEXT, gpu_code=ctypes.c_void_p,
)  # fmt: skip
_Plan = _struct(
    "Plan", weights_bytes=_I64, kv_bytes=_I64, workspace_bytes=_I64, free_bytes=_I64, context_length=_I64, fits=_I32
)
_Info = _struct(
    "Info", vocab_size=_I64, context_length=_I64, variant=_TEXT, threads=_I32, device=_TEXT, device_title=_TEXT
)
_Sampling = _struct(
    "Sampling", temperature=_F64, top_p=_F64, min_p=_F64, top_k=_I64, repetition_penalty=_F64, presence_penalty=_F64,
    frequency_penalty=_F64, bias_tokens=ctypes.c_void_p, biases=ctypes.c_void_p, bias_count=ctypes.c_size_t, seed=_U64,
)  # fmt: skip
_Statistics = _struct(
    "Statistics", finish=_I32, prompt_tokens=_I64, cached_tokens=_I64, completion_tokens=_I64, decode_bytes=_I64,
    load_s=_F64, prefill_s=_F64, decode_s=_F64, cache_miss=_TEXT, cache_miss_token=_I64,
)  # fmt: skip


class _Text(ctypes.Structure):
    """UTF-8 and its length."""

    _fields_ = (("data", ctypes.c_char_p), ("bytes", ctypes.c_size_t))

    def __init__(self, text: str | bytes | None) -> None:
        data = text.encode() if isinstance(text, str) else text or b""
        super().__init__(data, len(data))


_Request = _struct(
    "Request", prompt=ctypes.c_void_p, prompt_count=ctypes.c_size_t, max_tokens=_I64, stop_ids=ctypes.c_void_p,
    stop_count=ctypes.c_size_t, sampling=ctypes.c_void_p, on_token=_ON_TOKEN, context=ctypes.c_void_p,
    on_text=_ON_TEXT, text=_Text, messages=_Text, variables=_Text, stops=ctypes.POINTER(_Text),
    stops_count=ctypes.c_size_t, ignore_end=_I32, deterministic=_I32, priority=_I32, timeout_s=_F64,
)  # fmt: skip


class NativeError(Exception):
    """An error of the runtime: its code, and its line as the message."""

    def __init__(self, code: int, error: Any) -> None:
        super().__init__(error.line.decode())
        self.code, self.what, self.expected, self.found = code, error.what, error.expected, error.found
        self.next_step = error.next_step.decode()


@dataclass(frozen=True)
class Answer:
    """Tokens, pieces of text, and the fields of mlcpipe_statistics."""

    tokens: list[int]
    pieces: list[str]
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    decode_bytes: int
    load_s: float
    prefill_s: float
    decode_s: float
    cache_miss: bytes | None
    cache_miss_token: int


class Runtime:
    """The functions of the library, which raise NativeError."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, f"mlcpipe_{name}")(*arguments)
        if code:
            error = _Error()
            self.library.mlcpipe_last_error(ctypes.byref(error))
            assert error.code == code
            raise NativeError(code, error)

    def plan(self, bundle: Path, **options: Any) -> Any:
        plan = _Plan()
        self.call("plan", str(bundle).encode(), ctypes.byref(_options(**options)), ctypes.byref(plan))
        return plan

    def open(self, bundle: Path, **options: Any) -> NativeEngine:
        handle = _U64()
        self.call("open", str(bundle).encode(), ctypes.byref(_options(**options)), ctypes.byref(handle))
        return NativeEngine(self, handle)

    def open_descriptor(self, descriptor: int, offset: int, nbytes: int) -> NativeEngine:
        handle = _U64()
        self.call("open_descriptor", descriptor, _U64(offset), _U64(nbytes), None, ctypes.byref(handle))
        return NativeEngine(self, handle)


def _json(value: object) -> _Text:
    return _Text(None if value is None or value == {} else json.dumps(value))


def _options(
    variant: str = "",
    context_length: int = 0,
    threads: int = 0,
    sequences: int = 0,
    kv_tokens: int = 0,
    device: str = "",
    cache: Path | None = None,
    gpu_path: Path | None = None,
) -> Any:
    texts = [text.encode() or None for text in (variant, device, str(cache or ""), str(gpu_path or ""))]
    return _Options(texts[0], context_length, threads, None, sequences, kv_tokens, *texts[1:])


def _array(values: Sequence[float] | NDArray[Any], dtype: str = "int32") -> tuple[NDArray[Any], int, int]:
    """An array to keep, its address and its length."""
    array = np.ascontiguousarray(values, dtype)
    return array, array.ctypes.data, len(array)


class _Asked:
    """A request, what it points to, and what its callbacks got."""

    def __init__(
        self,
        prompt: Sequence[int] | str | bytes,
        params: SamplingParams,
        *,
        messages: object = None,
        variables: object = None,
        max_tokens: int = 0,
        stop_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        ignore_end: bool = False,
        on_token: Callable[[int], int] = lambda token: 0,
        deterministic: bool = False,
        priority: int = 0,
        timeout_s: float = 0.0,
    ) -> None:
        tokens: list[int] = []
        pieces: list[str] = []

        def callback(context: object, token: int) -> int:
            tokens.append(token)
            return on_token(token)

        def show(context: object, text: int, nbytes: int) -> int:
            pieces.append(ctypes.string_at(text, nbytes).decode())
            return 0

        bias: Mapping[int, float] = params.logit_bias
        text = prompt if isinstance(prompt, (str, bytes)) else None
        ids, prompt_at, count = _array(() if isinstance(prompt, (str, bytes)) else prompt)
        ends, ends_at, end_count = _array(stop_ids)
        biased, biased_at, bias_count = _array(list(bias))
        biases, biases_at, _ = _array(list(bias.values()), "float64")
        sampling = _Sampling(
            params.temperature, params.top_p, params.min_p, params.top_k, params.repetition_penalty,
            params.presence_penalty, params.frequency_penalty, biased_at, biases_at, bias_count, params.seed or 0,
        )  # fmt: skip
        request = _Request(
            prompt_at, count, max_tokens, ends_at, end_count, ctypes.addressof(sampling), _ON_TOKEN(callback), None,
            _ON_TEXT(0 if count and not stops else show), _Text(text), _json(messages), _json(variables),
            (_Text * len(stops))(*map(_Text, stops)), len(stops), ignore_end, deterministic, priority, timeout_s,
        )  # fmt: skip
        self.struct, self.tokens, self.pieces = request, tokens, pieces
        self._kept = (ids, ends, biased, biases, sampling)

    def answer(self, statistics: Any) -> Answer:
        finish = {1: "stop", 2: "length", 3: "timeout"}[statistics.finish]
        names = [field.name for field in fields(Answer)][3:]
        return Answer(self.tokens, self.pieces, finish, *(getattr(statistics, name) for name in names))


class Submitted(_Asked):
    """An answer that `NativeEngine.step` computes; `end` is its Answer or error once it has ended."""

    def __init__(self, engine: NativeEngine, *request: Any, **rest: Any) -> None:
        super().__init__(*request, **rest)
        self.engine, self.number = engine, _U64()
        self.end: Answer | NativeError | None = None

        def on_end(context: object, code: int, statistics: int) -> None:
            assert self.end is None
            if code:
                error = _Error()
                engine.runtime.library.mlcpipe_last_error(ctypes.byref(error))
                self.end = NativeError(code, error)
            else:
                self.end = self.answer(_Statistics.from_address(statistics))

        self._on_end = _ON_END(on_end)
        engine.call("submit", ctypes.byref(self.struct), self._on_end, ctypes.byref(self.number))

    def cancel(self) -> None:
        self.engine.call("cancel_answer", self.number)


class NativeEngine:
    """An open bundle."""

    def __init__(self, runtime: Runtime, handle: ctypes.c_uint64) -> None:
        self.runtime, self.handle = runtime, handle
        info = _Info()
        self.call("info", ctypes.byref(info))
        self.vocab_size, self.context_length, self.variant = info.vocab_size, info.context_length, info.variant.decode()
        self.device, self.device_title = info.device.decode(), info.device_title.decode()

    def call(self, name: str, *arguments: Any) -> None:
        self.runtime.call(name, self.handle, *arguments)

    def generate(
        self,
        prompt: Sequence[int] | str | bytes = (),
        params: SamplingParams = SamplingParams(temperature=0.0),
        **rest: Any,
    ) -> Answer:
        """The answer to ids, a text or messages; `on_token` gives another number than 0 to end it."""
        request = _Asked(prompt, params, **rest)
        statistics = _Statistics()
        self.call("generate", ctypes.byref(request.struct), ctypes.byref(statistics))
        return request.answer(statistics)

    def submit(
        self, prompt: Sequence[int] | str, params: SamplingParams = SamplingParams(temperature=0.0), **rest: Any
    ) -> Submitted:
        """As `generate`, by `step`."""
        return Submitted(self, prompt, params, **rest)

    def step(self) -> int:
        """How many answers have not ended after a step."""
        left = ctypes.c_size_t()
        self.call("step", ctypes.byref(left))
        return left.value

    def tokenize(self, text: str | bytes, *, special: bool = False) -> list[int]:
        return self._ids("tokenize", _Text(text), int(special))

    def tokenize_chat(self, messages: object, **variables: object) -> list[int]:
        return self._ids("tokenize_chat", _json(messages), _json(variables))

    def _ids(self, name: str, *arguments: Any) -> list[int]:
        count, ids = ctypes.c_size_t(), np.zeros(3, np.int32)
        self.call(name, *arguments, ctypes.c_void_p(ids.ctypes.data), ctypes.c_size_t(len(ids)), ctypes.byref(count))
        if count.value > len(ids):
            first, ids = ids, np.zeros(count.value, np.int32)
            room = ctypes.c_size_t(len(ids))
            self.call(name, *arguments, ctypes.c_void_p(ids.ctypes.data), room, ctypes.byref(count))
            assert (ids[:3] == first).all()
        return ids[: count.value].tolist()

    def render(self, messages: object, **variables: object) -> str:
        return self._text("render", _json(messages), _json(variables))

    def detokenize(self, tokens: Sequence[int]) -> str:
        ids, at, count = _array(tokens)
        return self._text("detokenize", ctypes.c_void_p(at), ctypes.c_size_t(count))

    def _text(self, name: str, *arguments: Any) -> str:
        room, size = ctypes.create_string_buffer(1 << 16), ctypes.c_size_t()
        self.call(name, *arguments, room, ctypes.c_size_t(len(room)), ctypes.byref(size))
        return room.raw[: size.value].decode()

    def save(self, path: Path, chat: object = None) -> None:
        text = chat if chat is None or isinstance(chat, bytes) else json.dumps(chat, ensure_ascii=False)
        self.call("save", os.fsencode(path), _Text(text))

    def restore(self, path: Path, wanted: bool = True) -> Any:
        """The chat that was saved; None without one."""
        texts: list[bytes] = []

        def keep(context: object, text: int, nbytes: int) -> int:
            texts.append(ctypes.string_at(text, nbytes))
            return not wanted

        self.call("restore", os.fsencode(path), _ON_TEXT(keep), None)
        return json.loads(texts[0]) if texts else None

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[n, V]."""
        rows = np.empty((len(tokens), self.vocab_size), np.float32)
        ids, at, count = _array(tokens)
        self.call("logits", ctypes.c_void_p(at), ctypes.c_size_t(count), ctypes.c_void_p(rows.ctypes.data))
        return rows

    def close(self) -> None:
        self.call("close")
