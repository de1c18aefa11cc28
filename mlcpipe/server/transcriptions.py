"""`/v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI has them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from math import ceil
from typing import Any

from fastapi import APIRouter, Request
from fastapi.datastructures import FormData
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.speech.decoding import rising
from mlcpipe.runtime.speech.formats import as_srt, as_vtt, verbose
from mlcpipe.runtime.speech.transcriber import Segment, SpeechParams, Task, Transcriber, Transcript
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.leases import speech_service
from mlcpipe.server.speech_service import SpeechService
from mlcpipe.server.sse import EventStream, event, unless_left
from mlcpipe.sound.log_mel import RATE_HZ, Floats

router = APIRouter()
_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
_KNOWN = ("model", "language", "prompt", "response_format", "temperature", "stream", "timestamp_granularities[]",
          "chunking_strategy")  # fmt: skip
# Of OpenAI's API, and of vLLM's and others' beside it.
_REFUSED = frozenset((
    "include", "known_speaker_names", "known_speaker_references", "seed", "top_p", "top_k", "min_p", "hotwords",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "max_tokens", "max_completion_tokens", "vad_filter",
    "to_language", "use_beam_search", "beam_size",
))  # fmt: skip
_MAX_FIELDS, _MAX_FIELD_BYTES = 32, 64 << 10
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        **{name: {"type": "string"} for name in _KNOWN if name != "timestamp_granularities[]"},
                        "response_format": {"type": "string", "enum": list(_FORMATS)},
                    },
                }
            }
        },
    }
}


@router.post("/v1/audio/transcriptions", openapi_extra=_FORM, response_model=None)
async def transcriptions(request: Request) -> Response:
    """The text of a sound, in its language."""
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", openapi_extra=_FORM, response_model=None)
async def translations(request: Request) -> Response:
    """The text of a sound, in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    async with _form(request) as form:
        fields = _fields(form)
        data = await _file(form)
    form_of = fields.get("response_format") or "json"
    if form_of not in _FORMATS:
        message = f"response_format: expected one of {', '.join(_FORMATS)}"
        raise ApiError(400, message, param="response_format")
    params = _params(fields, task)
    streams = _flag(fields.get("stream", ""), "stream")
    if streams and form_of not in ("json", "text"):
        raise ApiError(400, "stream: events have text alone; expected response_format json or text", param="stream")
    service = await speech_service(request, fields.get("model"))
    service.check(params)
    samples = await unless_left(request, service.decoded(data), lambda: None)
    del data
    if streams:
        return EventStream(_events(service, samples, params), lambda: None, lambda error: event(error.body("")))
    made = await unless_left(request, _whole(service, samples, params), lambda: None)
    if form_of == "json":
        return JSONResponse({"text": made.text, "usage": _usage(made.duration)})
    if form_of == "verbose_json":
        return JSONResponse(verbose(made) | {"usage": _usage(made.duration)})
    write = {"srt": as_srt, "vtt": as_vtt}.get(form_of, lambda one: f"{one.text}\n")
    return PlainTextResponse(write(made))


@asynccontextmanager
async def _form(request: Request) -> AsyncIterator[FormData]:
    """The form of a request, whose file is closed at the end. Raises ApiError, also where the extra is missing."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        found = repr(kind[:80]) if kind else "none"
        raise ApiError(415, f"expected a form (multipart/form-data) with the field file, found {found}")
    try:
        form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    except AssertionError:
        raise ApiError(501, 'forms need the extra: pip install "mlcpipe[sound]"', code="not_installed") from None
    except (HTTPException, ValueError, KeyError) as error:
        reason = getattr(error, "detail", error)
        raise ApiError(400, f"the form cannot be read: {str(reason)[:200]}") from None
    try:
        yield form
    finally:
        await form.close()


def _fields(form: FormData) -> dict[str, str]:
    """The fields of text by name. Raises ApiError for one that would change the answer and is not offered."""
    found: dict[str, str] = {}
    for name, value in form.multi_items():
        if name == "file" or not isinstance(value, str):
            continue
        field = name.partition("[")[0]  # of a list or an object
        if field == "timestamp_granularities" and value != "segment":
            raise ApiError(400, "timestamp_granularities: words have no times here; expected segment", param=name)
        if field in _REFUSED:
            raise ApiError(400, f"{field}: not offered here; leave it out", param=name, code="unsupported_parameter")
        if field == "chunking_strategy" and (name, value) != (field, "auto"):
            raise ApiError(400, "chunking_strategy: expected auto", param=name, code="unsupported_parameter")
        found[name] = value
    return found


async def _file(form: FormData) -> bytes:
    sent = form.get("file")
    if sent is None or isinstance(sent, str):
        raise ApiError(400, "file: expected a file of sound", param="file")
    return await sent.read()


def _params(fields: dict[str, str], task: Task) -> SpeechParams:
    """The settings of a request. Raises ApiError."""
    try:
        first = float(fields.get("temperature") or 0)
    except ValueError:
        raise ApiError(400, "temperature: expected a number from 0 to 1", param="temperature") from None
    try:
        return SpeechParams(
            language=fields.get("language") or None, task=task, prompt=fields.get("prompt", ""),
            temperatures=rising(first),
        )  # fmt: skip
    except MlcpipeError as error:
        raise refused(error) from None


def _flag(value: str, name: str) -> bool:
    if value.lower() not in ("", "true", "false", "1", "0"):
        raise ApiError(400, f"{name}: expected true or false", param=name)
    return value.lower() in ("true", "1")


def _usage(duration: float) -> dict[str, Any]:
    return {"type": "duration", "seconds": ceil(duration)}


async def _whole(service: SpeechService, samples: Floats, params: SpeechParams) -> Transcript:
    segments: list[Segment] = []
    language = "en"
    async with aclosing(service.heard(samples, params)) as windows:
        async for language, found in windows:  # noqa: B007
            segments += found
    return Transcriber.finished(segments, params, language, len(samples) / RATE_HZ)


async def _events(service: SpeechService, samples: Floats, params: SpeechParams) -> AsyncIterator[str]:
    """The text as it is heard, then the whole: the deltas make it."""
    text, sent = "", ""
    async with aclosing(service.heard(samples, params)) as windows:
        async for _, segments in windows:
            text += "".join(one.text for one in segments)
            whole = text.strip()
            if len(whole) > len(sent):
                yield event({"type": "transcript.text.delta", "delta": whole[len(sent) :]})
                sent = whole
    usage = _usage(len(samples) / RATE_HZ)
    yield event({"type": "transcript.text.done", "text": sent, "usage": usage})
