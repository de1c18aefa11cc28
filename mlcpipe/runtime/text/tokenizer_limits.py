"""Bounds the cost of a tokenizer.json: the growth of a text, and the time of a regular expression.

A text goes through normalizers, pre-tokenizers and a post-processor one after the other, so their factors multiply.
Sizes of the known steps: https://github.com/huggingface/tokenizers (`tokenizers/src/{normalizers,pre_tokenizers}/`),
and Unicode's bounds for its normal forms (https://www.unicode.org/faq/normalization.html#12).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from mlcpipe.errors import TokenizerError

MAX_GROWTH = 512  # bytes of a text after all steps, for each before; Llama-2 has 12, Qwen 6, T5 about 300
MAX_ADDED_TOKENS = 1000  # by the post-processor
MAX_WORD_CHARS = 1000  # of WordPiece, which takes the cube of it
MAX_WAYS = 10_000  # in which a pattern can match at one place, apart from its unbounded repetitions
MAX_REPEATS = 4  # unbounded repetitions after each other in one branch of a pattern

_FACTORS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2, "ByteLevel": 2, "BertNormalizer": 9}
# The library normalizes such tokens while it reads a file; an escaped letter could hide the word.
_NORMALIZED = re.compile(r'"normalized"\s*:\s*true|\\u00[2-7]')
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def check_source(source: str) -> None:
    """Refuses a tokenizer.json that would be costly to read. Raises TokenizerError."""
    if not _NORMALIZED.search(source):
        return
    try:
        document = json.loads(source, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return  # the library says it better
    try:
        growth({name: document.get(name) for name in _STEPS})
    except (AttributeError, TypeError, ValueError, StopIteration) as error:
        raise TokenizerError("broken tokenizer", where="tokenizer.json", found=str(error)[:200]) from error


def check_library(library: tokenizers.Tokenizer) -> float:
    """Checks the growth of a loaded tokenizer. Raises TokenizerError beyond the limits."""
    if getattr(library.model, "max_input_chars_per_word", 0) > MAX_WORD_CHARS:
        raise _refusal("the longest word of WordPiece", MAX_WORD_CHARS, library.model.max_input_chars_per_word)
    steps = {name: getattr(library, name) for name in _STEPS}
    return growth({name: None if step is None else json.loads(step.__getstate__()) for name, step in steps.items()})


def growth(steps: Mapping[str, Any]) -> float:
    """By which factor the steps of a tokenizer.json can lengthen a text. Raises TokenizerError beyond the limits."""
    factor = 1.0
    added = 0
    for step in (part for name in ("normalizer", "pre_tokenizer") for part in parts(steps.get(name))):
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
            check_pattern(pattern["Regex"])
        factor *= _factor(step)
    for step in parts(steps.get("post_processor")):
        if step.get("type") == "TemplateProcessing":
            tokens, texts = _template(step)
            added += tokens
            factor *= max(texts, 1)
    if added > MAX_ADDED_TOKENS:
        raise _refusal("the post-processor adds too many tokens", MAX_ADDED_TOKENS, added)
    _check_growth("a text", factor)
    _check_growth("a token's text", decoder_growth(steps.get("decoder")))
    return factor


def decoder_growth(state: Mapping[str, Any] | None) -> float:
    factor = 1.0
    for step in parts(state):
        factor *= _factor(step) if step.get("type") == "Replace" else 1
    return factor


def parts(step: Any) -> Iterator[Mapping[str, Any]]:
    """A step, or those of a sequence, in order."""
    if not isinstance(step, Mapping):
        return
    if step.get("type") != "Sequence":
        yield step
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        for part in step.get(name) or ():
            yield from parts(part)


def _factor(step: Mapping[str, Any]) -> float:
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
        content = _bytes(step.get("content"))
        # A pattern that can match nothing puts its content beside each character.
        return max(content / _bytes(text), 1) if isinstance(text, str) and text else 1 + content
    if kind == "Prepend":
        return 1 + _bytes(step.get("prepend"))
    if kind == "Metaspace":
        return 1 + _bytes(step.get("replacement", "▁"))
    if kind == "Precompiled":
        return _longest_mapping(step.get("precompiled_charsmap"))
    return _FACTORS.get(str(kind), 1)


def _bytes(text: object) -> int:
    return len(text.encode("utf-8", "surrogatepass")) if isinstance(text, str) else 0


def _longest_mapping(encoded: object) -> int:
    """Bytes of the longest text in SentencePiece's map: a size, a trie of that size, then texts that end with NUL."""
    data = base64.b64decode(encoded) if isinstance(encoded, str) else b""
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0) or 1


def _template(step: Mapping[str, Any]) -> tuple[int, int]:
    """The tokens that a TemplateProcessing adds to one text, and how often it has the text itself."""
    pieces = [next(iter(piece.items())) for piece in step.get("single", ())]
    tokens = step.get("special_tokens", {})
    sizes = [len(tokens.get(piece.get("id"), {}).get("ids", ())) for kind, piece in pieces if kind == "SpecialToken"]
    return sum(sizes), sum(kind == "Sequence" for kind, _ in pieces)


def _check_growth(what: str, factor: float) -> None:
    if factor > MAX_GROWTH:
        raise _refusal(
            f"the tokenizer makes {what} too much longer", f"at most {MAX_GROWTH}-fold", f"{factor:.3g}-fold"
        )


def _refusal(what: str, expected: object, found: object) -> TokenizerError:
    return TokenizerError(
        what,
        where="tokenizer.json",
        expected=expected,
        found=found,
        next_step="use the tokenizer of the original model",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _refusal("a name twice in one object", "each once", f"{len(pairs) - len(made)} more")
    return made


# ---- regular expressions ---------------------------------------------------------------------------------------

_ATOM = re.compile(r"\\[pP]\{\^?[\w -]+\}|\\x\{[0-9A-Fa-f]+\}|\\[^1-9gkKRXQ]|[^\\()|\[*+?]", re.DOTALL)
_OPEN = re.compile(r"\((?:\?(?:[ims]*(?:-[ims]+)?:|=|!|<=|<!|>))?(?!\?)")
_FLAGS = re.compile(r"\(\?[ims]+\)")
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d+)(,)?(\d*)\}|\{,(\d+)\})([+?]?)")


# Each repetition begins with a letter or a space that nothing before it can take (EXAONE's mixture of experts).
_KNOWN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
)


def check_pattern(source: str) -> None:
    """Refuses a pattern that can take exponential time, and unknown syntax. Raises TokenizerError.

    Oniguruma backtracks. A pattern without an unbounded repetition around a choice, and with few bounded choices
    after each other, takes polynomial time. All but one of the known patterns of published tokenizers are of this kind.
    """
    if source in _KNOWN:
        return
    try:
        ways, repeats, _, at = _alternatives(source, 0)
    except (RecursionError, ValueError) as error:
        raise _refusal("a regular expression that is not known to be quick", str(error), repr(source[:200])) from None
    if at != len(source) or ways > MAX_WAYS or repeats > MAX_REPEATS:
        raise _refusal("a regular expression that can take exponential time", "few choices", repr(source[:200]))


def _alternatives(source: str, at: int) -> tuple[int, int, bool, int]:
    """Of the branches from `at` to ")" or the end: ways to match, unbounded repetitions, may be empty, the end."""
    ways, repeats, empty = 0, 0, False
    while True:
        branch_ways, branch_repeats, branch_empty, at = _branch(source, at)
        ways, repeats, empty = ways + branch_ways, max(repeats, branch_repeats), empty or branch_empty
        if source[at : at + 1] != "|":
            return ways, repeats, empty, at
        at += 1


def _branch(source: str, at: int) -> tuple[int, int, bool, int]:
    ways, repeats, empty = 1, 0, True
    while at < len(source) and source[at] not in "|)":
        if flags := _FLAGS.match(source, at):
            at = flags.end()
            continue
        atom_ways, atom_repeats, atom_empty, at = _atom(source, at)
        if quantifier := _QUANTIFIER.match(source, at):
            at = quantifier.end()
            least, most = _bounds(quantifier)
            if most is None:
                if atom_ways > 1 or atom_repeats or atom_empty:
                    raise ValueError("no repetition of a choice or of another repetition")
                atom_repeats = 1
            elif atom_ways == 1:
                atom_ways, atom_repeats = max(most - least, 0) + 1, atom_repeats * most
            elif atom_ways**most > MAX_WAYS:
                raise ValueError("few choices")
            else:
                atom_ways, atom_repeats = sum(atom_ways**n for n in range(least, most + 1)), atom_repeats * most
            atom_empty = atom_empty or least == 0
            if _QUANTIFIER.match(source, at):
                raise ValueError("no repetition of a repetition")
        ways, repeats, empty = ways * atom_ways, repeats + atom_repeats, empty and atom_empty
    return ways, repeats, empty, at


def _bounds(quantifier: re.Match[str]) -> tuple[int, int | None]:
    sign, least, comma, most, only_most, suffix = quantifier.groups()
    if sign:
        return int(sign == "+"), 1 if sign == "?" else None
    if suffix == "+":
        raise ValueError("no repetition of a repetition")
    if only_most is not None:
        return 0, int(only_most)
    return int(least), int(most) if most else None if comma else int(least)


def _atom(source: str, at: int) -> tuple[int, int, bool, int]:
    if source[at] == "[":
        return 1, 0, False, class_end(source, at)
    if group := _OPEN.match(source, at):
        ways, repeats, empty, end = _alternatives(source, group.end())
        if source[end : end + 1] != ")":
            raise ValueError("groups that end")
        return ways, repeats, empty or group[0][2:3] in ("=", "!", "<"), end + 1
    if atom := _ATOM.match(source, at):
        return 1, 0, atom[0] in ("^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z", "\\G"), atom.end()
    raise ValueError(f"no {source[at : at + 3]!r}")


def class_end(source: str, at: int) -> int:
    """The end of a character class, which can have others inside."""
    depth = 0
    while at < len(source):
        char = source[at]
        if char == "[":
            depth += 1
            if source[at + 1 : at + 2] == "]" or source[at + 1 : at + 3] == "^]":
                raise ValueError("no ']' at the start of a class")
        elif char == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 2 if char == "\\" else 1
    raise ValueError("classes that end")
