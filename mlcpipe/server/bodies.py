"""Fields that several APIs share, and how a request's bytes become a checked body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlcpipe.server.errors import ApiError, invalid

_B = TypeVar("_B", bound=BaseModel)
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 64


class Body(BaseModel):
    """A JSON object whose known fields have exactly their types; others are kept in `model_extra`, to be counted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())


class SamplingFields(Body):
    """How tokens are drawn and when an answer ends, as all APIs name it."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    user: str | None = None
    service_tier: str | None = None
    # not OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    grammar: str | None = None
    regex: str | None = None
    priority: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(None, gt=0)
    deterministic: bool | None = None  # reuse keys and values of prompts only; nothing else makes a difference


class StreamOptions(Body):
    """What a stream has besides."""

    include_usage: bool = False


class CompletionFields(SamplingFields):
    """What chat and completions name alike, and the newer APIs otherwise."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)

    @property
    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError for too many, too long or empty ones."""
        return checked_stops([self.stop] if isinstance(self.stop, str) else self.stop or ())


def checked_stops(stops: Sequence[str]) -> list[str]:
    """The stop strings. Raises ApiError for too many, too long or empty ones."""
    if len(stops) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise ApiError(400, f"stop: expected at most {MAX_STOPS} strings, not empty", param="stop")
    return list(stops)


class JsonSchemaFormat(Body):
    """`json_schema` of a response format."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the whole answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class TextPart(Body):
    """A part of a text that comes in parts."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """What the answer may be: it makes it faster where it is right, and changes nothing."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def parsed(model: type[_B]) -> Callable[[Request], Coroutine[Any, Any, _B]]:
    """A dependency that reads a request's body. Raises ApiError for one that is no JSON, or of another form."""

    async def read(request: Request) -> _B:
        data = await request.body()
        try:
            body = model.model_validate_json(data)
        except ValidationError as error:
            raise invalid(error) from None
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}", code="invalid_body") from None
        service = request.app.state.service
        if service is not None:
            service.metrics.count_unknown(request.url.path, body.model_extra or ())
        return body

    return read


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What the API's description says of a body."""
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__name__}/$defs/{{model}}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
