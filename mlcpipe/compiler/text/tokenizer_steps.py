"""The normalizer, pre-tokenizer and post-processor of a tokenizer.json as steps for the native tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.compiler.text import code_points
from mlcpipe.compiler.text.normal_forms import NormalForm, normal_form
from mlcpipe.compiler.text.pattern_program import PatternPrograms, literal, one_of
from mlcpipe.compiler.text.patterns import UNBOUNDED
from mlcpipe.errors import TokenizerError
from mlcpipe.runtime.text.tokenizer_limits import parts

# As in normalizer.h and tokenizer_words.h.
PREPEND, REPLACE, NORMAL_FORM = range(3)
SPLIT, METASPACE, PREFIX_SPACE, BYTES_TO_CHARS = range(4)
_BEHAVIORS = ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext")
_SCHEMES = ("never", "first", "always")
# Of the pre-tokenizer ByteLevel: `tokenizers/src/pre_tokenizers/byte_level.rs`.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


class Steps:
    """Gathers the steps of one tokenizer; each is a row of its kind and three numbers.

    byte_level  whether the model's characters are bytes, by GPT-2's table
    form        the normal form, None for none
    around      token ids before and after a text
    """

    def __init__(self, patterns: PatternPrograms) -> None:
        self._patterns = patterns
        self._normalizer: list[tuple[int, int, int, int]] = []
        self._pre_tokenizer: list[tuple[int, int, int, int]] = []
        self.strings: list[bytes] = []
        self.byte_level = False
        self.form: NormalForm | None = None
        self.around: tuple[list[int], list[int]] = ([], [])
        self.trims_spaces = 0  # of the offsets of tokens: 1, or 2 except for one prepended space

    def read(self, document: Mapping[str, Any]) -> None:
        """Reads tokenizer.json. Raises TokenizerError for a step that the native tokenizer lacks."""
        for step in parts(document.get("normalizer")):
            self._normalize(step)
        steps = list(parts(document.get("pre_tokenizer")))
        for index, step in enumerate(steps):
            self._pre_tokenize(step, last=index + 1 == len(steps))
        for step in parts(document.get("post_processor")):
            self._post_process(step)

    def sections(self) -> list[NDArray[np.uint32]]:
        return [np.array(rows, np.uint32).reshape(-1) for rows in (self._normalizer, self._pre_tokenizer)]

    def _normalize(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "Prepend":
            self._normalizer.append((PREPEND, self._string(step["prepend"]), 0, 0))
        elif kind == "Replace":
            pattern = self._pattern(step["pattern"])
            if pattern is not None:
                self._normalizer.append((REPLACE, pattern, self._string(step["content"]), 0))
        elif kind in ("NFC", "NFD", "NFKC", "NFKD") and self.form is None:
            self.form = normal_form(kind)
            inert = self._patterns.add_class(self.form.inert)
            self._normalizer.append((NORMAL_FORM, int(self.form.composes), inert, 0))
        elif kind != "Sequence":
            raise refusal("normalizer", kind)

    def _pre_tokenize(self, step: Mapping[str, Any], last: bool) -> None:
        kind = step["type"]
        if kind == "Split":
            pattern = self._pattern(step["pattern"])
            if pattern is not None:
                self._split(pattern, step["behavior"], step["invert"])
        elif kind == "Digits":
            most = 1 if step["individual_digits"] else UNBOUNDED
            self._split(self._patterns.add(one_of(code_points.numeric(), 1, most)), "Isolated")
        elif kind == "Punctuation":
            self._split(self._patterns.add(one_of(code_points.punctuation())), step["behavior"])
        elif kind == "Metaspace":
            scheme = _SCHEMES.index(step["prepend_scheme"])
            self._pre_tokenizer.append((METASPACE, ord(step["replacement"]), scheme, 0))
            if step["split"]:
                self._split(self._patterns.add(literal(step["replacement"])), "MergedWithNext")
        elif kind == "ByteLevel":
            if step["add_prefix_space"]:
                self._pre_tokenizer.append((PREFIX_SPACE, 0, 0, 0))
            if step["use_regex"]:
                self._split(self._patterns.add(_GPT2), "Isolated")
            self.byte_level = last
            if not last:
                self._pre_tokenizer.append((BYTES_TO_CHARS, 0, 0, 0))
        elif kind != "Sequence":
            raise refusal("pre-tokenizer", kind)

    def _post_process(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "TemplateProcessing":
            before, after = _template(step)
            self.around = (before + self.around[0], self.around[1] + after)
        elif kind == "ByteLevel":
            self.trims_spaces = (1 + step["add_prefix_space"]) if step["trim_offsets"] else self.trims_spaces
        elif kind != "Sequence":
            raise refusal("post-processor", kind)

    def _split(self, pattern: int, behavior: str, invert: bool = False) -> None:
        if behavior not in _BEHAVIORS:
            raise refusal("behavior of a split", behavior)
        self._pre_tokenizer.append((SPLIT, pattern, _BEHAVIORS.index(behavior), int(invert)))

    def _pattern(self, pattern: Mapping[str, str]) -> int | None:
        """A pattern's number, None for one that matches nothing."""
        if "Regex" in pattern:
            return self._patterns.add(pattern["Regex"])
        return self._patterns.add(literal(pattern["String"])) if pattern["String"] else None

    def _string(self, text: str) -> int:
        self.strings.append(text.encode())
        return len(self.strings) - 1


def _template(step: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    before: list[int] = []
    after: list[int] | None = None
    for piece in step["single"]:
        if "Sequence" in piece:
            if after is not None:
                raise refusal("post-processor", "TemplateProcessing with the text twice")
            after = []
        else:
            (before if after is None else after).extend(step["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    if after is None:
        raise refusal("post-processor", "TemplateProcessing without the text")
    return before, after


def refusal(what: str, found: object) -> TokenizerError:
    return TokenizerError(
        f"a {what} that the native tokenizer lacks",
        where="tokenizer.json",
        found=found,
        next_step="compile for a target that runs with Python",
    )
