"""Bodies of Ollama's requests, and their options as fields of ours."""

from __future__ import annotations

import math
import re
from typing import Any

from pydantic import Field

from mlcpipe.runtime.sampling_params import MAX_LOGPROBS
from mlcpipe.runtime.text.thinking import thinking_variables
from mlcpipe.server.bodies import Body, ResponseFormat, SamplingFields, checked_stops, translated
from mlcpipe.server.errors import ApiError
from mlcpipe.server.service import Service

LATEST = ":latest"  # the tag that a name without one has
# Options about how a model is loaded, and about caches: no answer depends on them here.
LOAD_OPTIONS = {
    "numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "vocab_only", "use_mmap", "use_mlock",
    "num_thread", "num_keep", "logits_all", "embedding_only",
}  # fmt: skip
_OURS = {"num_predict", "num_ctx", "stop", "seed"}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)")  # Go's
MAX_DURATION_CHARS = 40


class ModelBody(Body):
    """The name of a model, under either of its fields."""

    model: str | None = Field(None, max_length=1000)
    name: str | None = Field(None, max_length=1000)

    @property
    def named(self) -> str:
        """The name. Raises ApiError without one."""
        if not (found := self.model or self.name):
            raise ApiError(400, "model: expected the name of a model", param="model")
        return found


class KeptBody(ModelBody):
    """What all requests to a model have."""

    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds that the model shall stay loaded: infinite for negative ones, None where nothing is said.
        Raises ApiError.
        """
        return None if self.keep_alive is None else seconds_of(self.keep_alive)


class AnswerFields(KeptBody):
    """What chats and texts have."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the answer. Raises ApiError."""
        if self.format in (None, ""):
            return None
        if isinstance(self.format, dict):
            return ResponseFormat(type="json_schema", schema=self.format)
        if self.format != "json":
            raise ApiError(400, 'format: expected "json" or a JSON schema', param="format")
        return ResponseFormat(type="json_object")

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives of each token, None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """`num_ctx`: tokens of prompt and answer together. Raises ApiError."""
        return self._count("num_ctx", 1)

    @property
    def max_tokens(self) -> int | None:
        """`num_predict`; None, as for numbers below 1, is no bound. Raises ApiError."""
        found = self._count("num_predict", -2)
        return None if found is None or found < 1 else found

    @property
    def stops(self) -> list[str]:
        """The strings that end the answer. Raises ApiError."""
        given = (self.options or {}).get("stop") or []
        if isinstance(given, str):
            given = [given]
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise ApiError(400, "options.stop: expected a list of strings", param="options.stop")
        return checked_stops([one for one in given if one])

    def sampling(self, model: str | None) -> SamplingFields:
        """The other options, and the body's unknown fields, as ours: what they do not honour they refuse by name."""
        options = self.options or {}
        seed = self._count("seed", -(2**63))
        rest = {key: value for key, value in options.items() if key not in LOAD_OPTIONS | _OURS}
        clash = {"model", "stream"} & rest.keys()
        if clash:
            raise ApiError(400, f"options.{min(clash)}: expected outside of the options", param="options")
        # -1 draws a seed, as the default.
        given = {**(self.model_extra or {}), **rest, "model": model, "seed": None if seed == -1 else seed}
        return translated(SamplingFields, given, self)

    def thinking(self, service: Service) -> dict[str, Any]:
        """Variables of the chat template for `think`. Raises UsageError for a model that cannot think."""
        if self.think is None or not service.tokenizer.chat_templates:
            return {}
        template = service.tokenizer.chat_template(service.tokenizer.template_name(None))
        if self.think is False and not {"enable_thinking", "thinking"} & template.variables:
            return {}  # as Ollama: a model that does not think
        return thinking_variables(template, self.think)

    def _count(self, name: str, least: int) -> int | None:
        value = (self.options or {}).get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None and (type(value) is not int or not least <= value < 2**64):
            raise ApiError(400, f"options.{name}: expected an integer from {least}", param=f"options.{name}")
        return value


class ChatBody(AnswerFields):
    """The body of `/api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class GenerateBody(AnswerFields):
    """The body of `/api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    truncate: bool | None = None
    shift: bool | None = None
    images: list[str] | None = None
    # Refused by name.
    template: str | None = None
    context: list[int] | None = None


class EmbedBody(KeptBody):
    """The body of `/api/embed`, and of `/api/embeddings`, which has a `prompt`."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = Field(None, ge=1)


def seconds_of(given: float | str) -> float:
    """A duration of Go's (`5m`, `1h30m`), or seconds; infinite for a negative one. Raises ApiError."""
    seconds = None
    if isinstance(given, str):
        if len(given) <= MAX_DURATION_CHARS and re.fullmatch(r"[+-]?\d+(\.\d+)?", given):
            seconds = float(given)
        elif len(given) <= MAX_DURATION_CHARS and (found := _DURATION.fullmatch(given)):
            parts = re.findall(_PART, found[2])
            seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
            seconds = -seconds if found[1] == "-" else seconds
    else:
        seconds = given
    if seconds is None:
        raise ApiError(400, 'keep_alive: expected seconds, or a duration such as "5m"', param="keep_alive")
    return math.inf if seconds < 0 else seconds
