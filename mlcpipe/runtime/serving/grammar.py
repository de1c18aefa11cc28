"""Answers that must match a JSON schema, a regular expression or a grammar: masks of the tokens that may come next.

llguidance computes the masks. A mask is int32 words, bit v % 32 of word v // 32 allows token v: what the compiled
`apply_bitmask_inplace` takes. A schema with a keyword that llguidance does not know is refused, never ignored.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import MlcpipeError, UsageError
from mlcpipe.runtime.serving.closed_schema import closed
from mlcpipe.runtime.text.tokenizer import Tokenizer

MAX_SOURCE = 512 << 10  # characters of a schema or grammar
_KEPT = 64  # compiled grammars
_FUEL = 1_000_000  # llguidance's unit for building a lexer; 50,000 take about a millisecond
_OPTIONAL = 500  # properties of an object: llguidance's parser has no room for more, and takes seconds to say so
_DATA = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
_STEP_ITEMS = 30_000  # of its parser, for a token: a language needs 20,000, and 50,000 can take half a second
# Processor time: of a mask that other answers wait for; per token, free; per request, in addition.
_SLOW_S, _TOKEN_S, _REQUEST_S = 0.002, 0.005, 1.0
# A reasoning model thinks before the part of its answer that must match.
_MAY_THINK = "start: thinking? @answer\nthinking[lazy]: /<think>(.|\\n)*<\\/think>\\s*/\n"
_THINKS = "start: thinking @answer\nthinking[lazy]: /(.|\\n)*<\\/think>\\s*/\n"
# White space of JSON: a model that may write any amount of it may write nothing else.
_JSON = {"whitespace_pattern": r"(\n[ ]{0,16}|[ ])?"}
Thinking = Literal["none", "may", "open"]


@dataclass(frozen=True)
class GrammarSource:
    """What an answer must match.

    kind      "json_schema" (`text` is the schema as JSON), "regex", "lark" (llguidance's dialect), "gbnf" (llama.cpp's)
    parts     more JSON schemas that a Lark grammar names as `@name`, as pairs of name and JSON
    lark_parts  more Lark grammars that a Lark grammar names, as pairs of name and text
    before    Lark rules of the text before it, the first one named `before`; "" for none
    thinking  "may": a `<think>…</think>` may come first; "open": the prompt has begun one, which must end first
    """

    kind: Literal["json_schema", "regex", "lark", "gbnf"]
    text: str
    parts: tuple[tuple[str, str], ...] = field(default=())
    lark_parts: tuple[tuple[str, str], ...] = field(default=())
    thinking: Thinking = "none"
    before: str = ""

    @property
    def chars(self) -> int:
        """The length of all its texts."""
        return len(self.text) + sum(len(text) for _, text in (*self.parts, *self.lark_parts))


class Grammar:
    """A compiled grammar for one request: its answers, each with its own matcher, share the remaining time."""

    def __init__(self, prototype: Any, first: NDArray[np.int32], beside: Executor) -> None:
        self._prototype, self.first, self.beside = prototype, first, beside
        self.left_s = _REQUEST_S

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        return Matcher(self._prototype.deep_copy(), self)


class Matcher:
    """Where one answer is in its grammar.

    Other answers do not wait for a slow one: its mask is computed during their steps, and it is not `ready` until then.
    """

    def __init__(self, matcher: Any, grammar: Grammar) -> None:
        self._matcher, self._grammar = matcher, grammar
        self._mask: NDArray[np.int32] | None = grammar.first  # of the next token, once it is computed
        self._spent_s = 0.0  # since the last token
        self._slow = False
        self._job: Future[Any] | None = None  # which computes the mask; nothing else uses the matcher meanwhile

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end of the answer."""
        return bool(self._matcher.is_stopped())

    def ready(self) -> bool:
        """Whether the next token can be sampled without making other answers wait."""
        if self._job is not None and self._job.done():
            self._slow = self._slow and self._job.exception() is None  # which `fill` raises again
            self._job = None
        if self._job is None and self._slow and self._mask is None:
            self._job = self._grammar.beside.submit(self._compute)
        return self._job is None

    def late(self, job: Future[Any] | None) -> None:
        """Record that others waited too long for the mask; `job` may be computing it."""
        self._slow, self._job = True, job

    def fill(self, words: NDArray[np.int32], ahead: Sequence[int] = ()) -> None:
        """Write the mask of the token after the `allowed` tokens `ahead` to int32[n], n no more than the library's.

        Raises UsageError for a grammar that takes too much.
        """
        if not ahead:
            words[:] = self._compute()[: len(words)]
            return
        with self._spending():
            self._matcher.consume_tokens(list(ahead))
        try:
            words[:] = self._fresh()[: len(words)]
        finally:
            self._matcher.rollback(len(ahead))

    def allowed(self, draft: list[int]) -> int:
        """How many of these tokens may come in turn, with another one after them."""
        if self._slow or not self.ready():
            return 0
        with self._spending():
            count = self._matcher.validate_tokens(draft)
            if count:
                self._matcher.consume_tokens(draft[:count])
                ended = self.ended
                self._matcher.rollback(count)
                count -= ended
        return int(count)

    def accept(self, token: int) -> None:
        """Advance by a token that the mask allowed. Raises UsageError for a grammar that takes too much."""
        self._slow = self._spent_s > _SLOW_S
        self._spent_s, self._mask = 0.0, None
        with self._spending():
            accepted = self._matcher.consume_token(token)
        if not accepted:
            raise self._too_much()

    def _compute(self) -> NDArray[np.int32]:
        if self._mask is None:
            self._mask = self._fresh()
        return self._mask

    def _fresh(self) -> NDArray[np.int32]:
        """The mask int32[words] of the library. Raises UsageError."""
        if self._grammar.left_s < 0:
            raise UsageError(
                "the grammar takes too long",
                expected=f"{1000 * _TOKEN_S:g} ms of processor time per token, and {_REQUEST_S:g} s more per request",
                next_step="use a simpler one",
            )
        words = np.empty_like(self._grammar.first)
        with self._spending():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._too_much()
        return words

    @contextmanager
    def _spending(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        charged = max(0.0, self._spent_s - _TOKEN_S)
        self._spent_s += time.thread_time() - began
        self._grammar.left_s -= max(0.0, self._spent_s - _TOKEN_S) - charged

    def _too_much(self) -> UsageError:
        found = self._matcher.get_error().partition("\n")[0]
        return UsageError("the grammar cannot be followed", expected="a simpler one", found=found)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and logits of `vocab_size` rows, and keeps the last ones.

    Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[GrammarSource, tuple[Any, NDArray[np.int32]]] = OrderedDict()
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "mlcpipe-slow-masks")

    def compile(self, source: GrammarSource) -> Grammar:
        """The grammar for one request.

        Raises UsageError for one that is wrong, too large, or needs what llguidance does not know.
        """
        with self._lock:
            if (kept := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return Grammar(*kept, self._beside)
        if source.chars > MAX_SOURCE:
            raise UsageError("the grammar is too long", expected=f"at most {MAX_SOURCE} characters", found=source.chars)
        compiled = self._compiled(source)
        with self._lock:
            self._kept[source] = compiled
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return Grammar(*compiled, self._beside)

    def _compiled(self, source: GrammarSource) -> tuple[Any, NDArray[np.int32]]:
        """The matcher at the beginning, and the mask of the first token."""
        library, tokenizer, name = _llguidance(), self._library_tokenizer, _NAMES[source.kind]
        limits = library.LLParserLimits(initial_lexer_fuel=_FUEL, step_max_items=_STEP_ITEMS, verbose_errors=False)
        try:
            text = _grammars(source)
        except ValueError as error:
            raise UsageError(f"the {name} cannot be honoured", found=error) from None
        prototype = library.LLMatcher(tokenizer, text, limits=limits, log_level=0)
        words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        if not prototype.is_error():  # a grammar that takes too much mostly does so at once
            prototype.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if prototype.is_error():
            raise UsageError(f"the {name} cannot be honoured", found=prototype.get_error().partition("\n")[0])
        return prototype, words

    @cached_property
    def _library_tokenizer(self) -> Any:
        table = _TokenTable(self._tokenizer, self._vocab_size)
        return _llguidance().LLTokenizer(table, eos_token=table.ends)


_NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar", "gbnf": "grammar"}


class _TokenTable:
    """The tokens of each row of logits as llguidance takes them: their bytes, and which are control tokens.

    Rows without a token have no bytes, which no grammar allows. Where no row ends an answer, an extra one does.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self._tokenizer, self._rows = tokenizer, rows
        self.ends = sorted(index for index in tokenizer.eos_token_ids if index < rows) or [rows]
        self.tokens = [tokenizer.token_bytes(index) for index in range(max(rows, self.ends[0] + 1))]
        for end in self.ends:
            self.tokens[end] = self.tokens[end] or b"<end>"
        self.eos_token_id, self.bos_token_id = self.ends[0], tokenizer.bos_token_id
        self.special_token_ids = sorted({*filter(rows.__gt__, tokenizer.control_token_ids), *self.ends})
        special = {*self.special_token_ids}
        self._texts = {token: index for index, token in enumerate(self.tokens) if token and index not in special}
        self._longest = max(map(len, self._texts), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that a grammar forces, plain text even where it reads like a control token."""
        data = text.encode() if isinstance(text, str) else text
        with suppress(UnicodeDecodeError, MlcpipeError):
            ids = self._tokenizer.literal.plain_ids(data.decode())
            written = [self.tokens[index] for index in ids if index < self._rows]
            if b"".join(written) == data and self._texts.keys() >= {*written}:
                return ids
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        """The longest tokens in turn, for text that the tokenizer would change: it normalizes, or adds a space."""
        ids: list[int] = []
        while data:
            found = (data[:end] for end in range(min(len(data), self._longest), 0, -1))
            token = next(filter(self._texts.__contains__, found), None)
            if token is None:
                break
            ids.append(self._texts[token])
            data = data[len(token) :]
        return ids


def _grammars(source: GrammarSource) -> str:
    """The JSON of llguidance's grammars, the first of which is the start of an answer."""
    body: Mapping[str, Any]
    if source.kind == "json_schema":
        body = _json_grammar(source.text)
    elif source.kind == "regex":
        body = json.loads(_llguidance().LLMatcher.grammar_from_regex(source.text))["grammars"][0]
    else:
        body = {"lark_grammar": _lark_of(source.text) if source.kind == "gbnf" else source.text}
    grammars = [{**body, "name": "answer"}, *({**_json_grammar(text), "name": name} for name, text in source.parts)]
    grammars += [{"lark_grammar": text, "name": name} for name, text in source.lark_parts]
    if source.before:
        grammars.insert(0, {"name": "main", "lark_grammar": f"start: before @answer\n{source.before}"})
    if source.thinking != "none":
        text = _MAY_THINK if source.thinking == "may" else _THINKS
        grammars.insert(0, {"name": "main", "lark_grammar": text})
    return json.dumps({"grammars": grammars})


def _lark_of(gbnf: str) -> str:
    """Raises ValueError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

    try:
        return str(gbnf_to_lark(gbnf))
    except (GbnfToLarkError, LookupError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _json_grammar(schema: str) -> dict[str, Any]:
    """Raises ValueError."""
    pending = [json.loads(schema)]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            properties, required = one.get("properties"), one.get("required")
            needed = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
            optional = set(properties if isinstance(properties, dict) else ()).difference(needed)
            if len(optional) > _OPTIONAL:
                raise ValueError(f"an object of {len(optional)} optional properties, expected at most {_OPTIONAL}")
            pending += [value for key, value in one.items() if key not in _DATA]
        elif isinstance(one, list):
            pending += one
    try:
        schema = json.dumps(closed(json.loads(schema)))
    except RecursionError:
        raise ValueError("the schema is nested too deep") from None
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
