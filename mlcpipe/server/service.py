"""Shared by the APIs: the engine with its tokenizer, prompts, grammars, names and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.answer_reader import Reading
from mlcpipe.runtime.sampling_params import DENOISING, MAX_SEED, SamplingParams
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.grammar import GrammarSource, Thinking
from mlcpipe.runtime.serving.interface import Request, ServingEngine
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.token_rules import TokenRules
from mlcpipe.runtime.tool_calling import ToolCalling
from mlcpipe.runtime.tools import ToolChoice
from mlcpipe.server.answer_form import constraint
from mlcpipe.server.answers import Answers, Waker
from mlcpipe.server.bodies import ResponseFormat, SamplingFields
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.lora_scales import LoraScales
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.off_loop import LONG_BYTES, OffLoop
from mlcpipe.server.prefix_store import PrefixStore
from mlcpipe.server.remote_pictures import RemotePictures
from mlcpipe.server.token_rules import Words, asks_for_rules, check_rules, reads_vocabulary, rules_of

_TIERS = {"flex": 1, "auto": 0, "default": 0, "priority": -1}
_MAX_PRIORITY = 1000
_MAX_NAME = 200  # characters of an adapter's
_COMPILING = 8  # times the bytes of a schema or grammar: it takes longer than other work on them
# Encoding a text takes some 200 bytes per character: one beyond any context is refused before.
_CHARS_A_TOKEN, _MORE_CHARS = 16, 1 << 20
_DRY_BYTES = 16  # of a text, whose tokens take as long as one token of a prompt with DRY
_DRAWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", *DENOISING)
_LEAST_TOP_P = 1e-9  # which leaves the most probable token, as other servers' 0
DEFAULTS = SamplingParams(temperature=1.0, top_p=1.0)  # as in the OpenAI API


@dataclass(frozen=True)
class Facts:
    """names: of the model, the first is its own, "*" takes any; about: extra fields of `/v1/models`.

    defaults: sampling settings that a request does not set. vision: the tower of a model that sees; remote_pictures:
    whether it gets pictures of http(s) URLs. fingerprint: of all that answers depend on, see `fingerprint`.
    """

    names: tuple[str, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    defaults: SamplingParams = DEFAULTS
    vision: VisionInfo | None = None
    remote_pictures: bool = False
    fingerprint: str | None = None

    def check(self, name: str | None, more: Iterable[str] = ()) -> None:
        """Raises ApiError for a model that has none of the names, nor one of `more`."""
        known = (*self.names, *more)
        if name is not None and name not in known and "*" not in known:
            names = ", ".join(known)
            message = f"the model {name[:100]!r} is not served here; expected {names}"
            raise ApiError(404, message, code="model_not_found", param="model")


def limit_chars(tokenizer: Tokenizer, context_length: int) -> None:
    """Make a tokenizer refuse texts that exceed any context of this length."""
    tokenizer.most_chars = min(tokenizer.most_chars, _CHARS_A_TOKEN * context_length + _MORE_CHARS)


class Service(OffLoop):
    """A model's service, made inside the event loop. It limits the length of texts for the tokenizer."""

    kind = "text"

    def __init__(
        self,
        engine: ServingEngine,
        tokenizer: Tokenizer,
        facts: Facts,
        prefixes: PrefixStore | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.adapters = dict(adapters or {})  # by the model's name in requests
        self.loading: set[str] = set()  # names of adapters being loaded
        self.lora = LoraScales()
        self.tokenizer, self._words = tokenizer, Words(tokenizer)
        limit_chars(tokenizer, engine.context_length)
        self.facts = facts
        self.prefixes = prefixes
        self.created = int(time.time())
        self.metrics = Metrics(engine.stats)
        self.calling = ToolCalling(tokenizer, engine.vocab_size)
        self.remote_pictures = RemotePictures() if facts.remote_pictures else None
        self._waker = Waker(asyncio.get_running_loop())

    @property
    def meta(self) -> dict[str, Any]:
        """Extra fields of `/v1/models`."""
        return {"tool_format": self.calling.style.name, **self.facts.about}

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.facts.names[0]

    def close(self) -> None:
        """End the engine and the threads."""
        self.engine.close()
        super().close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        self.facts.check(name, self.adapters)

    def adapter_of(self, name: str | None) -> Adapter | None:
        """The adapter of a name, None for the model itself. Raises ApiError for one that is not served, or no more:
        the model does not answer in an adapter's name.
        """
        self.check_model(name)
        return None if name is None else self.adapters.get(name)

    def check_free(self, name: str) -> None:
        """Raises ApiError for a name that an adapter cannot have."""
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or name == "*":
            raise ApiError(400, f"lora_name: expected 1 to {_MAX_NAME} printable characters", param="lora_name")
        if name in self.facts.names or name in self.adapters or name in self.loading:
            raise ApiError(400, f"lora_name: there is a model {name!r} already", param="lora_name")

    def name_of(self, model: str | None) -> str:
        """The name in a response: an adapter's, or the model's own."""
        return model if model is not None and model in self.adapters else self.name

    def sampling(self, body: SamplingFields) -> SamplingParams:
        """The sampling settings. Raises ApiError, which names the field."""
        given: dict[str, Any] = {key: getattr(body, key) for key in _DRAWN if getattr(body, key) is not None}
        for key in ("presence_penalty", "frequency_penalty"):
            if (value := getattr(body, key)) is not None:
                given[key] = value
        if body.repeat_penalty is not None:
            given.setdefault("repetition_penalty", body.repeat_penalty)
        if given.get("top_k") == -1:
            given["top_k"] = 0
        if body.seed is not None:
            given["seed"] = body.seed % (MAX_SEED + 1)
        if given.get("top_p") == 0:
            given["top_p"] = _LEAST_TOP_P
        if body.mirostat:  # instead of the checkpoint's truncation
            given = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **given}
        try:
            if body.logit_bias:
                given["logit_bias"] = {int(token): bias for token, bias in body.logit_bias.items()}
            return replace(self.facts.defaults, **given)
        except ValueError:
            raise ApiError(400, "logit_bias: expected token ids as keys", param="logit_bias") from None
        except MlcpipeError as error:
            raise refused(error) from None

    def check(self, body: SamplingFields) -> None:
        """Raises ApiError for fields refused with any prompt, before the work of making one."""
        self.check_model(body.model)
        self.sampling(body)
        check_rules(body)
        if body.priority is not None and abs(body.priority) > _MAX_PRIORITY:
            raise ApiError(400, f"priority: expected from -{_MAX_PRIORITY} to {_MAX_PRIORITY}", param="priority")
        try:
            self.engine.check_queue()
        except MlcpipeError as error:
            raise refused(error) from None

    def request(self, body: SamplingFields, tokens: list[int], max_tokens: int | None) -> Request:
        """The engine's request for one prompt. Raises ApiError if the context has no room or the adapter is gone.

        `max_tokens`: None and -1 for all that the context has room for; an engine samples one at least, also for 0.
        """
        length, shifts = self.engine.context_length, self.engine.context_shift
        if len(tokens) >= length and not shifts:
            message = (
                f"This model's maximum context length is {length} tokens, and the prompt has {len(tokens)}; shorten it"
            )
            counts = {"n_prompt_tokens": len(tokens), "n_ctx": length}  # as llama-server
            raise ApiError(400, message, code="context_length_exceeded", counts=counts)
        most = length if max_tokens in (None, -1) else max(1, max_tokens or 0)
        return Request(
            tokens,
            most if shifts else min(most, length - len(tokens)),
            self.sampling(body),
            (frozenset() if body.ignore_eos else self.tokenizer.eos_token_ids) | {*(body.stop_token_ids or ())},
            priority=body.priority if body.priority is not None else _TIERS.get(body.service_tier or "auto", 0),
            deadline_s=None if body.timeout is None else time.monotonic() + body.timeout,
            namespace=body.namespace,
            deterministic=bool(body.deterministic),
            adapter=self.adapter_of(body.model),
            control=self.tokenizer.control_places(tokens),
            progress=body.tells_progress,
        )

    async def rules(
        self, body: SamplingFields, budget: int | None = None, thinking: Thinking = "none"
    ) -> TokenRules | None:
        """The rules about tokens, and the budget of thoughts, None for none. Raises ApiError."""
        if not asks_for_rules(body, budget):
            return None
        channels = self.calling.style.channels
        nbytes = LONG_BYTES + 1 if reads_vocabulary(body, budget) else 0
        return await self.apart(
            lambda: rules_of(body, self._words, self.engine.vocab_size, budget, thinking, channels=channels), nbytes
        )

    async def with_rules(self, request: Request, rules: TokenRules | None) -> Request:
        """The request with rules that are made ready for its prompt: once for all answers to it."""
        if rules is None or rules.dry.neutral:
            return replace(request, rules=rules)
        ready = await self.apart(lambda: rules.after(request.ids), _DRY_BYTES * len(request.tokens))
        return replace(request, rules=ready)

    def source(self, body: SamplingFields, form: ResponseFormat | None, thinking: Thinking) -> GrammarSource | None:
        """The form of the answer, None for any. Raises ApiError for two of them."""
        found = constraint(body, form)
        return None if found is None else self.calling.form(found, thinking)

    async def constrained(self, request: Request, source: GrammarSource | None) -> Request:
        """The request with a compiled grammar. Raises ApiError for one that cannot be honoured."""
        if source is None:
            return request
        compiled = await self.apart(lambda: self.calling.grammars.compile(source), _COMPILING * source.chars)
        return replace(request, grammar=compiled)

    async def with_tools(
        self, request: Request, choice: ToolChoice, form: GrammarSource | None, thinking: Thinking, nbytes: int
    ) -> Request:
        """The request with the grammar of its tools, or else of `form`, the answer without a call.

        A schema that cannot be honoured is replaced by any object, unless its tool is strict. `nbytes` is the length
        of the request's body. Raises ApiError.
        """
        calling = self.calling
        try:
            found = await self.aside(lambda: calling.source(choice, form, thinking), nbytes)
            return await self.constrained(request, found)
        except (ApiError, MlcpipeError):
            wrong = await self.apart(lambda: calling.find_refused(choice.tools), _COMPILING * nbytes)
            found = await self.aside(lambda: calling.source(choice, form, thinking, wrong), nbytes)
            return await self.constrained(request, found)

    def start(self, requests: Sequence[tuple[Request, Reading]]) -> Answers:
        """Request answers of the engine. Raises ApiError if it refuses one."""
        answers = Answers(self.engine, self._waker, self.tokenizer, self.aside)
        try:
            with self.engine.together:
                for request, reading in requests:
                    answers.submit(request, reading, self.metrics.timer(len(request.tokens)))
        except MlcpipeError as error:
            answers.close()
            raise refused(error) from None
        return answers


def repeated(request: Request, n: int) -> list[Request]:
    """The requests for `n` answers to one prompt, with consecutive seeds; the first alone tells of the prompt."""
    seed, other = request.sampling.seed, replace(request, prompt_logprobs=None, progress=False)
    found = [request, *[other] * (n - 1)]
    if seed is None:
        return found
    seeds = [(seed + index) % (MAX_SEED + 1) for index in range(n)]
    return [replace(each, sampling=replace(each.sampling, seed=one)) for each, one in zip(found, seeds)]
