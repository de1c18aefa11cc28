"""From the fields of a request to rules about its tokens, which the compiled sampler does not know."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.dry import BREAKERS, MAX_BREAKER_CHARS, MAX_BREAKERS, Breakers, Dry, breakers_of
from mlcpipe.runtime.serving.grammar import Thinking
from mlcpipe.runtime.text import harmony
from mlcpipe.runtime.text.reasoning import BEGIN, END
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.token_rules import ThinkingBudget, TokenRules
from mlcpipe.runtime.truncation import Truncation
from mlcpipe.server.bodies import SamplingFields
from mlcpipe.server.errors import ApiError, refused

_TRUNCATION = (
    "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta",
)  # fmt: skip
_KEPT = 16  # lists of breakers
_DRY = {"multiplier": "dry_multiplier", "base": "dry_base", "allowed_length": "dry_allowed_length",
        "last_n": "dry_penalty_last_n"}  # fmt: skip
_FINAL = f"{harmony.END}{harmony.START}assistant{harmony.CHANNEL}{harmony.FINAL}{harmony.MESSAGE}"


class Words:
    """What rules read of a whole vocabulary, kept as long as its service."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.breakers: Callable[[tuple[str, ...]], Breakers] = lru_cache(_KEPT)(partial(breakers_of, tokenizer))

    @cached_property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of each token."""
        return tuple(map(self.tokenizer.token_bytes, range(self.tokenizer.vocab_size)))


def reads_vocabulary(body: SamplingFields, budget: int | None = None) -> bool:
    """Whether `rules_of` may read the whole vocabulary."""
    return budget is not None or bool(body.dry_multiplier)


def asks_for_rules(body: SamplingFields, budget: int | None = None) -> bool:
    """Whether the fields ask for more than `rules_of` without them."""
    fields = ("min_tokens", "allowed_token_ids", *_TRUNCATION, *_DRY.values(), "dry_sequence_breakers")
    asked = budget is not None or body.tells_what_is_left
    return asked or any(getattr(body, name) is not None for name in fields)


def check_rules(body: SamplingFields) -> None:
    """Raises ApiError for settings that are refused for any prompt and model."""
    try:
        _truncation_of(body)
        Dry(**_given(body, _DRY))
    except MlcpipeError as error:
        raise refused(error) from None


def rules_of(
    body: SamplingFields,
    words: Words,
    vocab_size: int,
    budget: int | None = None,
    thinking: Thinking = "none",
    *,
    channels: bool = False,
) -> TokenRules | None:
    """The rules of a request, None for none. `budget`: tokens of thoughts; the answer has `channels`, or is `thinking`.

    May read the whole vocabulary. Raises ApiError and UsageError, which name the field.
    """
    if not asks_for_rules(body, budget):
        return None
    ids, tokenizer = body.allowed_token_ids, words.tokenizer
    if ids is not None and not 0 <= min(ids) <= max(ids) < min(vocab_size, tokenizer.vocab_size):
        most = min(vocab_size, tokenizer.vocab_size) - 1
        raise ApiError(400, f"allowed_token_ids: expected ids from 0 to {most}", param="allowed_token_ids")
    rules = TokenRules(
        None if ids is None else frozenset(ids),
        body.min_tokens or 0,
        _truncation_of(body),
        _dry_of(body, words),
        None if budget is None else _budget_of(words, budget, thinking, channels=channels),
    )
    return None if rules.neutral else rules


def _given(body: SamplingFields, names: dict[str, str]) -> dict[str, Any]:
    return {key: getattr(body, name) for key, name in names.items() if getattr(body, name) is not None}


def _truncation_of(body: SamplingFields) -> Truncation:
    return Truncation(**_given(body, {name: name for name in _TRUNCATION}), told=body.tells_what_is_left)


def _dry_of(body: SamplingFields, words: Words) -> Dry:
    dry, name = Dry(**_given(body, _DRY)), "dry_sequence_breakers"
    texts = BREAKERS if body.dry_sequence_breakers is None else tuple(body.dry_sequence_breakers)
    if len(texts) > MAX_BREAKERS or not all(0 < len(text) <= MAX_BREAKER_CHARS for text in texts):
        message = f"{name}: expected at most {MAX_BREAKERS} strings of 1 to {MAX_BREAKER_CHARS} characters"
        raise ApiError(400, message, param=name)
    if dry.neutral:
        return Dry()
    return Dry(dry.multiplier, dry.base, dry.allowed_length, dry.last_n, words.breakers(texts))


def _budget_of(words: Words, budget: int, thinking: Thinking, *, channels: bool) -> ThinkingBudget | None:
    """None for an answer that has no thoughts apart."""
    tokenizer, vocabulary = words.tokenizer, words.vocabulary
    if channels:
        begin, end_ids = f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}", tuple(tokenizer.encode(_FINAL))
        return ThinkingBudget(budget, begin.encode(), harmony.END.encode(), end_ids, vocabulary, again=True)
    if thinking == "none":
        return None
    end_ids = tuple(tokenizer.encode(END))
    return ThinkingBudget(budget, BEGIN.encode(), END.encode(), end_ids, vocabulary, inside=thinking == "open")
