"""Answers that must match a JSON schema, a regular expression or a grammar: masks of the tokens that may come next.

llguidance computes the masks. A mask is int32 words, bit v % 32 of word v // 32 allows token v: what the compiled
`apply_bitmask_inplace` takes. A schema with a keyword that llguidance does not know is refused, never ignored.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import UsageError
from mlcpipe.runtime.text.tokenizer import Tokenizer

MAX_SOURCE = 512 << 10  # characters of a schema or grammar
_KEPT = 64  # compiled grammars
_FUEL = 1_000_000  # llguidance's unit for building a lexer; 50,000 take about a millisecond
# A model that thinks first does so before the part of its answer that must match.
_MAY_THINK = "start: thinking? @answer\nthinking[lazy]: /<think>(.|\\n)*<\\/think>\\s*/\n"
_THINKS = "start: thinking @answer\nthinking[lazy]: /(.|\\n)*<\\/think>\\s*/\n"
# White space of JSON: a model that may write any amount of it may write nothing else.
_JSON = {"whitespace_pattern": r"(\n[ ]{0,16}|[ ])?"}
Thinking = Literal["none", "may", "open"]


@dataclass(frozen=True)
class GrammarSource:
    """What an answer must match.

    kind      "json_schema" (`text` is the schema as JSON), "regex" or "lark" (llguidance's dialect)
    parts     more JSON schemas that a Lark grammar names as `@name`, as pairs of name and JSON
    before    rules in Lark of what comes before, the first one named `before`; "" for nothing
    thinking  "may": a `<think>…</think>` may come first; "open": the prompt has begun one, which must end first
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    parts: tuple[tuple[str, str], ...] = field(default=())
    thinking: Thinking = "none"
    before: str = ""


class Grammar:
    """A compiled grammar; every answer takes a matcher of its own."""

    def __init__(self, prototype: Any, vocab_size: int) -> None:
        self._prototype = prototype
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        return Matcher(self._prototype.deep_copy(), self._vocab_size)


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.words = (vocab_size + 31) // 32

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end of the answer."""
        return bool(self._matcher.is_stopped())

    def fill(self, words: NDArray[np.int32], ahead: Sequence[int] = ()) -> None:
        """Write the mask of the token after the `allowed` tokens `ahead` to int32[words].

        Raises UsageError for a grammar that takes too much.
        """
        if ahead:
            self._matcher.consume_tokens(list(ahead))
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._too_much()
        if ahead:
            self._matcher.rollback(len(ahead))

    def allowed(self, draft: list[int]) -> int:
        """How many of these tokens may come one after the other, and another one behind them."""
        count = self._matcher.validate_tokens(draft)
        if count:
            self._matcher.consume_tokens(draft[:count])
            ended = self.ended
            self._matcher.rollback(count)
            count -= ended
        return int(count)

    def accept(self, token: int) -> None:
        """Go on behind a token that the mask allowed. Raises UsageError for a grammar that takes too much."""
        if not self._matcher.consume_token(token):
            raise self._too_much()

    def _too_much(self) -> UsageError:
        found = self._matcher.get_error().partition("\n")[0]
        return UsageError("the grammar cannot be followed", expected="a simpler one", found=found)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last ones; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """Raises UsageError for a grammar that is wrong, too large, or needs what llguidance does not know."""
        with self._lock:
            if (kept := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return kept
        size = len(source.text) + sum(len(text) for _, text in source.parts)
        if size > MAX_SOURCE:
            raise UsageError("the grammar is too long", expected=f"at most {MAX_SOURCE} characters", found=size)
        grammar = self._compiled(source)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compiled(self, source: GrammarSource) -> Grammar:
        library, tokenizer, name = _llguidance(), self._library_tokenizer, _NAMES[source.kind]
        limits = library.LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
        try:
            text = _grammars(source)
        except ValueError as error:
            raise UsageError(f"the {name} cannot be honoured", found=error) from None
        wrong, messages = library.LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=limits)
        if wrong:
            raise UsageError(f"the {name} cannot be honoured", found=messages[0])
        prototype = library.LLMatcher(tokenizer, text, limits=limits, log_level=0)
        grammar = Grammar(prototype, self._vocab_size)
        first = grammar.matcher()
        first.fill(np.zeros(first.words, np.int32))  # what takes too much mostly does so at once
        return grammar

    @cached_property
    def _library_tokenizer(self) -> Any:
        tokens = _TokenTable(self._tokenizer)
        ends = sorted(index for index in self._tokenizer.eos_token_ids if index < self._vocab_size)
        return _llguidance().LLTokenizer(tokens, n_vocab=self._vocab_size, eos_token=ends)


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}


class _TokenTable:
    """The tokenizer as llguidance takes it: the bytes of every token, and which are control tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_token_ids, default=0)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


def _grammars(source: GrammarSource) -> str:
    """The JSON of llguidance's grammars, of which the first is where an answer starts."""
    body: Mapping[str, Any]
    if source.kind == "json_schema":
        body = _json_grammar(source.text)
    elif source.kind == "regex":
        body = json.loads(_llguidance().LLMatcher.grammar_from_regex(source.text))["grammars"][0]
    else:
        body = {"lark_grammar": source.text}
    grammars = [{**body, "name": "answer"}, *({**_json_grammar(text), "name": name} for name, text in source.parts)]
    if source.before:
        grammars.insert(0, {"name": "main", "lark_grammar": f"start: before @answer\n{source.before}"})
    if source.thinking != "none":
        text = _MAY_THINK if source.thinking == "may" else _THINKS
        grammars.insert(0, {"name": "main", "lark_grammar": text})
    return json.dumps({"grammars": grammars})


def _json_grammar(schema: str) -> dict[str, Any]:
    grammars = json.loads(_llguidance().LLMatcher.grammar_from_json_schema(schema, defaults=_JSON))["grammars"]
    return dict(grammars[0])


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "JSON schemas, grammars and forced tools need llguidance", next_step="pip install 'mlcpipe[server]'"
        ) from None
    return llguidance
