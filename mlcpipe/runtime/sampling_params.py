"""Sampling settings, and the results of a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlcpipe.errors import UsageError

MAX_SEED = 2**64 - 1
MAX_STEPS = 1 << 16  # and tokens that are denoised together
MAX_POST_STEPS = 64
DENOISING = (  # settings of text by diffusion
    "block", "steps", "threshold", "editing_threshold", "max_post_steps", "remasking", "alg_temp",
)  # fmt: skip
ORDERS = ("origin", "maskgit_plus", "topk_margin", "entropy", "low_confidence", "random")  # in which masks are decided
MAX_LOGPROBS = 20  # as the OpenAI API's `top_logprobs`


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is sampled; every field is checked at construction.

    temperature         [0, 100]; 0 takes the most probable token (greedy)
    top_p               (0, 1]; the smallest set of tokens with this probability mass
    top_k               >= 0; the most probable k tokens, 0 for no limit
    min_p               [0, 1]; tokens with at least this fraction of the best token's probability
    repetition_penalty  [0.01, 100]; divides positive and multiplies negative logits of seen tokens (arXiv:1909.05858)
    presence_penalty    [-2, 2]; subtracted from the logits of tokens already generated (OpenAI API)
    frequency_penalty   [-2, 2]; subtracted once for each time the token was generated (OpenAI API)
    logit_bias          token id -> bias in [-100, 100], added to the logit
    seed                [0, 2**64); None draws a fresh one
    logprobs            [0, 20]; how many alternatives each token reports, 0 for no log-probabilities

    Of models that denoise blocks, or whole answers, by default as the checkpoint says:

    block               [1, 65536]; tokens that are denoised together, of models of blocks a divisor of 64
    steps               [1, 65536]; the most steps of a block, or of a whole answer
    threshold           (0, 1]; tokens more probable than this are kept at once, 1 keeps as many in each step
    editing_threshold   [0, 1]; kept tokens are replaced by others more probable than this, 1 replaces none (LLaDA 2.1)
    max_post_steps      [0, 64]; the most steps of a block after its last mask, in which tokens are replaced
    remasking           the order in which masks of a whole answer are decided, one of `ORDERS`: those of Dream's `alg`,
                        and of LLaDA's `remasking`
    alg_temp            [0, 100]; temperature of Dream's order, 0 takes the surest masks

    Raises UsageError, which names the field, its range and the value.
    """

    temperature: float = 0.7
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    logprobs: int = 0
    block: int | None = None
    steps: int | None = None
    threshold: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int | None = None
    remasking: str | None = None
    alg_temp: float | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, 100.0)
        _check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, 0, None)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name, count in (("block", self.block), ("steps", self.steps)):
            if count is not None:
                _check_int(name, count, 1, MAX_STEPS)
        if self.threshold is not None:
            _check_real("threshold", self.threshold, 0.0, 1.0, open_low=True)
        if self.editing_threshold is not None:
            _check_real("editing_threshold", self.editing_threshold, 0.0, 1.0)
        if self.max_post_steps is not None:
            _check_int("max_post_steps", self.max_post_steps, 0, MAX_POST_STEPS)
        if self.alg_temp is not None:
            _check_real("alg_temp", self.alg_temp, 0.0, 100.0)
        if self.remasking not in (None, *ORDERS):
            raise UsageError("remasking", expected=", ".join(ORDERS), found=repr(self.remasking)[:60])
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(
                "logit_bias", expected="a mapping of token id to bias", found=type(self.logit_bias).__name__
            )
        for token, bias in self.logit_bias.items():
            _check_int("a token id of logit_bias", token, 0, None)
            _check_real(f"logit_bias[{token}]", bias, -100.0, 100.0)
        # A private copy: a caller's later change must not slip past the checks above.
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken, so that the seed does not matter."""
        return self.temperature == 0

    def check_bias(self, vocab_size: int) -> None:
        """Raises UsageError for a bias of a token outside the vocabulary."""
        outside = [token for token in self.logit_bias if token >= vocab_size]
        if outside:
            raise UsageError("logit_bias names a token", expected=f"ids from 0 to {vocab_size - 1}", found=outside[0])


def _check_real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    bracket = "(" if open_low else "["
    expected = f"a number in {bracket}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(name, expected=expected, found=repr(value))
    if not (low <= value <= high) or (open_low and value == low):  # so is NaN
        raise UsageError(name, expected=expected, found=value)


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    expected = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(name, expected=expected, found=repr(value))
    if value < low or (high is not None and value > high):
        raise UsageError(name, expected=expected, found=value)


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its log-probability (natural logarithm, after temperature and penalties).

    `text` may hold U+FFFD where the token ends inside a character; `bytes` are exact.
    `top` are the most probable alternatives, best first, each with an empty `top`.
    """

    token_id: int
    text: str
    bytes: bytes
    logprob: float
    top: list[TokenLogprob] = field(default_factory=list)


@dataclass(frozen=True)
class CacheMiss:
    """Why no more of a prompt was reused than was.

    first_prompt     nothing was computed before
    prompt_differs   from all earlier prompts and answers at `token`, counted from 0
    evicted          it was computed, and its memory was needed for others
    state_evicted    the same of the recurrent state that the next token needs
    no_checkpoint    no recurrent state was kept where the prompt could continue
    adapter_differs  it was computed with another adapter, or without one
    length_differs   it was computed for a length to which RoPE has other frequencies
    deterministic    it was computed as an answer, and the request takes prompts alone
    """

    reason: str
    token: int | None = None

    def described(self) -> dict[str, str | int]:
        """As JSON: `token` only where there is one."""
        return {"reason": self.reason} if self.token is None else {"reason": self.reason, "token": self.token}


@dataclass(frozen=True)
class Stats:
    """Counts and seconds of one generation.

    prompt_tokens       tokens of the prompt, those reused from the KV cache included, those dropped at once not
    cached_tokens       tokens of the prompt that the KV cache already held
    completion_tokens   tokens generated; the first comes out of the prefill
    prefill_s           seconds until the first token
    decode_s            seconds of all later tokens
    load_s              seconds to open the bundle
    decode_bytes        bytes of weights and KV cache that the decode steps read, all together
    dropped_tokens      tokens of prompt and answer that a shifted context lost
    cache_miss          why no more tokens were reused; None if those are all that were computed before
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    prefill_s: float
    decode_s: float
    load_s: float
    decode_bytes: int = 0
    dropped_tokens: int = 0
    cache_miss: CacheMiss | None = None

    @property
    def prefill_tok_s(self) -> float:
        """Prompt tokens computed a second (cached ones do not count); 0 where nothing was timed."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_s)

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first one; 0 where nothing was timed."""
        return _rate(max(self.completion_tokens - 1, 0), self.decode_s)

    @property
    def decode_gb_s(self) -> float:
        """Memory traffic of decoding in 10**9 bytes a second; 0 where nothing was timed."""
        return _rate(self.decode_bytes, self.decode_s) / 1e9


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call: its first piece has id and name, later ones more of the arguments (JSON).

    Of a `custom` tool the arguments are a part of its input.
    """

    index: int
    id: str = ""
    name: str | None = None
    arguments: str = ""
    custom: bool = False


class ToolCall(NamedTuple):
    """A call of a tool; `arguments` are the JSON of an object, cut off where the answer ended too early."""

    id: str
    name: str
    arguments: str

    def described(self) -> dict[str, Any]:
        """In OpenAI's JSON."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CustomToolCall(ToolCall):
    """A call of a custom tool; `arguments` are its input, a text."""

    __slots__ = ()

    def described(self) -> dict[str, Any]:
        """As that of other calls."""
        return {"id": self.id, "type": "custom", "custom": {"name": self.name, "input": self.arguments}}


def add_pieces(calls: list[ToolCall], pieces: Iterable[CallPiece]) -> None:
    """Append pieces to the calls so far."""
    for piece in pieces:
        if piece.name is not None:
            kind = CustomToolCall if piece.custom else ToolCall
            calls.append(kind(piece.id, piece.name, piece.arguments))
        else:
            calls[piece.index] = calls[piece.index]._replace(arguments=calls[piece.index].arguments + piece.arguments)


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; only the last one has `finish_reason` and `stats`.

    The reason is "stop", "length" or "tool_calls".
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stats: Stats | None = None
    tool_calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer: `text` ends before the stop string, `token_ids` hold every token generated."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    stats: Stats
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the conversation's next message."""
        calls = {"tool_calls": [call.described() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}
