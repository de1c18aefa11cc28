"""Fields that several APIs share, and parsing of a request's body."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from mlcpipe.runtime.sampling_params import MAX_LOGPROBS
from mlcpipe.server.errors import ApiError, invalid
from mlcpipe.server.foreign_fields import check_foreign, check_of_encoders
from mlcpipe.server.guard import namespace_of
from mlcpipe.server.json_values import MAX_VALUES, check_values

_B = TypeVar("_B", bound="Body")
MAX_STOPS = 128
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_CHOICES = 64
MAX_ITEMS = 4096  # of a list: messages, parts of a message, tools
MAX_BIASES = 16384
MAX_UNKNOWN = 256  # fields that are ignored
MAX_IDS = 1 << 20  # values of a body that may have lists of token ids
MAX_ALLOWED = 1 << 16  # tokens
MAX_LORA, MAX_LORA_SCALE = 256, 1000.0
_NEVER = -100.0  # bias of a token that llama.cpp's `false` forbids
_NUMBER = re.compile(r"[+-]?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,3})?")
_BOM = b"\xef\xbb\xbf"


def _shorten(schema: Any, most: int) -> None:
    """Make all lists of a core schema fail at their first wrong item, and limit their length."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            schema.setdefault("max_length", most)
        for part in schema.values():
            _shorten(part, most)
    elif isinstance(schema, list):
        for part in schema:
            _shorten(part, most)


def _lenient(value: Any) -> Any:
    """The number that a text or a whole float stands for, as other servers take them; other values as they are."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value) if set(value) & set(".eE") else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**63 else value


Number = Annotated[float, BeforeValidator(_lenient)]
Count = Annotated[int, BeforeValidator(_lenient)]


def _numbers(biases: Any) -> Any:
    """Fail at the first wrong item of a mapping, which pydantic cannot do. llama.cpp's lists of pairs become one."""
    if isinstance(biases, list):
        if len(biases) > MAX_BIASES or not all(isinstance(one, list) and len(one) == 2 for one in biases):
            raise ValueError(f"expected at most {MAX_BIASES} pairs of a token and a bias")
        if not all(type(token) is int for token, _ in biases):
            raise ValueError("expected the ids of tokens")
        biases = {str(token): _NEVER if bias is False else bias for token, bias in biases}
    if isinstance(biases, dict):
        if len(biases) > MAX_BIASES:
            raise ValueError(f"expected at most {MAX_BIASES} tokens")
        if not all(type(bias) in (int, float) and abs(bias) <= sys.float_info.max for bias in biases.values()):
            raise ValueError("expected numbers")
    return biases


class Body(BaseModel):
    """A JSON object with strictly typed known fields; `model_extra` keeps the others for counting.

    The first wrong item of a list ends the check, and lists are short: an error takes much more memory than an item.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    most_values: ClassVar[int] = MAX_VALUES
    _nbytes: int = PrivateAttr(0)
    _owner: str = PrivateAttr("")
    _client: str = PrivateAttr("")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _shorten(schema, MAX_ITEMS if cls.most_values < MAX_IDS else MAX_IDS)
        return schema

    @property
    def nbytes(self) -> int:
        """The length of the JSON."""
        return self._nbytes

    @property
    def client(self) -> str:
        """As `key_of` the request: what it sets is its own."""
        return self._client

    @property
    def namespace(self) -> str:
        """Requests of one namespace share computed prompts; "" is the default one."""
        return namespace_of(self._owner, getattr(self, "cache_salt", None) or "")


class EncoderBody(Body):
    """A body that asks for embeddings or scores. Raises ApiError for a field that would change them."""

    @model_validator(mode="after")
    def _check_foreign(self) -> EncoderBody:
        check_of_encoders(self)
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex_: str | None = Field(None, alias="regex")
    choice_: list[str] | None = Field(None, alias="choice")
    grammar_: str | None = Field(None, alias="grammar")
    json_object: bool | None = None

    @model_validator(mode="after")
    def _no_others(self) -> StructuredOutputs:
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False):
                message = f"structured_outputs.{name}: not offered here; leave it out"
                raise ApiError(400, message, param="structured_outputs", code="unsupported_parameter")
        return self


class LoraScale(Body):
    """The scale of an adapter, whose id is its place in `/lora-adapters`."""

    id: int = Field(ge=0)
    scale: Number = Field(ge=-MAX_LORA_SCALE, le=MAX_LORA_SCALE)


class SamplingFields(Body):
    """Sampling and stopping, as all APIs name them."""

    model: str | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Count | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_numbers)] = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    user: str | None = None
    service_tier: str | None = None
    # not OpenAI's
    top_k: Count | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    block: Count | None = None
    steps: Count | None = None
    threshold: Number | None = None
    editing_threshold: Number | None = None
    max_post_steps: Count | None = None
    remasking: str | None = None
    alg_temp: Number | None = None
    grammar: str | None = None
    regex: str | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_IDS)
    priority: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = Field(None, gt=0)
    deterministic: bool | None = None  # only reuse keys and values of prefill, for equal results
    lora: list[LoraScale] | None = Field(None, max_length=MAX_LORA)  # llama-server's
    # Rules about tokens, see `token_rules`.
    min_tokens: Count | None = Field(None, ge=0)
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    typical_p: Number | None = None
    top_n_sigma: Number | None = None
    xtc_probability: Number | None = None
    xtc_threshold: Number | None = None
    mirostat: Count | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    dry_multiplier: Number | None = None
    dry_base: Number | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Count | None = None
    dry_sequence_breakers: list[str] | None = None
    # Other servers' names of the fields above.
    repeat_penalty: Number | None = None
    json_schema: dict[str, Any] | str | None = None
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    adds_special_tokens: ClassVar[bool] = False
    _tells_what_is_left: bool = PrivateAttr(False)

    @property
    def tells_what_is_left(self) -> bool:
        """Whether log-probabilities are those among the tokens that truncation leaves."""
        return self._tells_what_is_left

    def tell_what_is_left(self) -> None:
        """Have them so, as the translation of a body of another server asks."""
        self._tells_what_is_left = True

    @property
    def tells_progress(self) -> bool:
        """Whether the stream tells how far the prompt is computed."""
        return False

    @model_validator(mode="after")
    def _check_foreign(self) -> SamplingFields:
        check_foreign(self, adds_special_tokens=self.adds_special_tokens)
        return self


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: the usage so far in every event


class TimedFields(SamplingFields):
    """What llama-server tells of an answer's times, on the paths that have it."""

    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @property
    def tells_progress(self) -> bool:
        """As `SamplingFields.tells_progress`."""
        return bool(self.return_progress and self.stream)


class CompletionFields(TimedFields):
    """Fields with one name in chat and completions, and another in the newer APIs."""

    stream_options: StreamOptions | None = None
    n: Count | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    max_tokens: Count | None = Field(None, ge=-1)  # 0: only the prompt is computed; -1: no limit, as llama.cpp
    prompt_logprobs: Count | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def tells_usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tells_usage_so_far(self) -> bool:
        """Whether all events have it."""
        return self.tells_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @model_validator(mode="after")
    def _no_stream_of_scores(self) -> CompletionFields:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs: not with stream", param="prompt_logprobs")
        return self

    @property
    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError for too many or too long ones."""
        return checked_stops([self.stop] if isinstance(self.stop, str) else self.stop or ())


def checked_stops(stops: Sequence[str]) -> list[str]:
    """The stop strings, without empty ones, which stop nothing. Raises ApiError for too many or too long ones."""
    if len(stops) > MAX_STOPS or not all(len(text) <= MAX_STOP_CHARS for text in stops):
        message = f"stop: expected at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
        raise ApiError(400, message, param="stop")
    return [text for text in stops if text]


class JsonSchemaFormat(Body):
    """`json_schema` of a response format."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the whole answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")  # other servers' place for it


class EndingFields(Body):
    """The end of a conversation's prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TextPart(Body):
    """One part of a text in parts."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """A guess of the answer, which only makes it faster where it is right."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The whole of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


def owner_of(request: Request) -> str:
    """The namespace of computed prompts that the guard allows a request."""
    owner: str = getattr(request.state, "owner", "")
    return owner


def key_of(request: Request) -> str:
    """The owner of what is stored and set for a client: its key, also where keys share prompts; "" without keys."""
    key: str = getattr(request.state, "key", "")
    return key


def parsed(model: type[_B]) -> Callable[[Request], Coroutine[Any, Any, _B]]:
    """A dependency that reads a request's body. Raises ApiError for a body that is no JSON, or malformed."""

    async def read(request: Request) -> _B:
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise ApiError(415, f"content-encoding: expected none, found {coding[:40]!r}; send the JSON as it is")
        data, pool = await request.body(), request.app.state.pool
        body: _B = await pool.aside(lambda: _read(model, data), len(data))
        body._nbytes, body._owner, body._client = len(data), owner_of(request), key_of(request)
        pool.metrics.count_unknown(request.url.path, body.model_extra or ())
        return body

    return read


def _read(model: type[_B], data: bytes) -> _B:
    data = data.removeprefix(_BOM)
    check_values(data, model.most_values)
    try:
        body = model.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error) from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_body") from None
    if len(body.model_extra or ()) > MAX_UNKNOWN:
        message = f"the body has {len(body.model_extra or ())} unknown fields; expected at most {MAX_UNKNOWN}"
        raise ApiError(400, message, code="invalid_body")
    return body


def translated(model: type[_B], fields: Mapping[str, Any], body: Body) -> _B:
    """Fields of another server's body as a body of ours. Raises ApiError, which names the field."""
    try:
        made = model.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from None
    made._nbytes, made._owner, made._client = body._nbytes, body._owner, body._client
    return made


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The schema of a body for the API's description."""
    schema = model.model_json_schema(ref_template=f"#/components/schemas/{model.__name__}/$defs/{{model}}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
