"""`tokenizer.bin`: a tokenizer as tables that `mlcpipe/native/runtime/text/tokenizer.h` maps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from mlcpipe.compiler.text import code_points
from mlcpipe.compiler.text.hash_tables import EMPTY
from mlcpipe.compiler.text.normal_forms import NormalForm
from mlcpipe.compiler.text.pattern_program import PatternPrograms
from mlcpipe.compiler.text.tables import strings, tables
from mlcpipe.compiler.text.tokenizer_steps import Steps
from mlcpipe.compiler.text.tokenizer_vocabulary import Section, Vocabulary
from mlcpipe.runtime.text.tokenizer import Tokenizer

KIND, VERSION = b"mlctoken", 2

# Flags of an added token.
_SINGLE_WORD, _LSTRIP, _RSTRIP, _STEERS = 1, 2, 4, 8
# White_Space of Unicode, which no version has changed since 6.3.
_SPACES = [*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]


def tokenizer_program(tokenizer: Tokenizer) -> bytes:
    """The file. Raises TokenizerError for a feature that the native tokenizer lacks; nothing is approximated."""
    document = json.loads(tokenizer.library.to_str())
    patterns = PatternPrograms()
    steps = Steps(patterns)
    steps.read(document)
    vocabulary = Vocabulary(tokenizer, document["model"], steps.byte_level)
    added = document["added_tokens"]
    settings = _settings(tokenizer, document["model"], vocabulary, steps)
    single_word = any(token["single_word"] for token in added)
    settings["word_start"], joined = vocabulary.word_start()
    settings["joined_class"] = patterns.add_class(code_points.of_codes(joined))
    settings["space_class"] = patterns.add_class(code_points.of_codes(_SPACES))
    settings["word_class"] = patterns.add_class(code_points.word()) if single_word else 0
    before, after = steps.around
    sections: list[Section] = [
        np.array(list(settings.values()), np.uint32),
        *vocabulary.pieces(),
        *vocabulary.words(),
        vocabulary.merges(),
        vocabulary.characters(),
        vocabulary.bytes_(),
        *_added_tokens(tokenizer, [token for token in added if not token["normalized"]]),
        *_added_tokens(tokenizer, [token for token in added if token["normalized"]]),
        *steps.sections(),
        *strings(steps.strings),
        *patterns.sections(),
        *_normal_form(steps.form),
        np.array([*before, *after], np.uint32),
        *_control(tokenizer),
    ]
    return tables(KIND, VERSION, sections)


def _settings(tokenizer: Tokenizer, model: Mapping[str, Any], vocabulary: Vocabulary, steps: Steps) -> dict[str, int]:
    """Numbers in the order of `struct Settings` of tokenizer_tables.h; EMPTY for none."""
    rows, (strip, count) = tokenizer.rules, tokenizer.rules.strip
    return {
        "tokens": tokenizer.vocab_size,
        "rows": EMPTY if tokenizer.rows is None else tokenizer.rows,
        "most_chars": tokenizer.most_chars,
        "ids_before": len(steps.around[0]),
        "byte_level": int(steps.byte_level),
        "unknown": vocabulary.unknown,
        "fuses_unknown": int(model["fuse_unk"]),
        "byte_fallback": int(model["byte_fallback"]),
        "word_start": EMPTY,
        "trims_spaces": steps.trims_spaces,
        "drops_first": int(rows.drop_first),
        "strip_char": ord(strip) if strip and count else EMPTY,
        "strip_count": count,
        "spaced": int(rows.separator == " "),
        "plain_differs": int(tokenizer.literal.plain is not tokenizer.library),
        "joined_class": 0,
        "space_class": 0,
        "word_class": 0,
    }


def _added_tokens(tokenizer: Tokenizer, added: list[dict[str, Any]]) -> list[Section]:
    """Ids and flags, and texts in the form that is searched for, sorted by their bytes."""
    control = tokenizer.control_token_ids
    normalizer = tokenizer.library.normalizer
    rows = []
    for token in added:
        text = token["content"]
        if token["normalized"] and normalizer is not None:
            text = normalizer.normalize_str(text)
        flags = _SINGLE_WORD * token["single_word"] | _LSTRIP * token["lstrip"] | _RSTRIP * token["rstrip"]
        flags |= _STEERS * (token["special"] or token["id"] in control)
        rows.append((text.encode(), token["id"], flags))
    rows.sort()
    numbers = np.array([row[1:] for row in rows], np.uint32).reshape(-1)
    return [numbers, *strings(text for text, _, _ in rows)]


def _normal_form(form: NormalForm | None) -> list[Section]:
    """Decompositions, combining classes and compositions, sorted."""
    if form is None:
        return [np.zeros(0, np.uint32), np.zeros(0, np.uint32), b"", np.zeros(0, np.uint32), np.zeros(0, np.uint32)]
    codes = sorted(form.decompositions)
    classes = np.array(sorted(form.classes.items()), np.uint32).reshape(-1)
    texts = strings(form.decompositions[code].encode() for code in codes)
    return [np.array(codes, np.uint32), *texts, classes, form.compositions.reshape(-1)]


def _control(tokenizer: Tokenizer) -> list[Section]:
    """Control tokens' ids and texts, whether they have other spellings, and the signs that begin and end them."""
    control = tokenizer.literal.control
    ids = np.array(list(control), np.uint32)
    edges = np.array(sorted(map(ord, tokenizer.marks.edges)), np.uint32)
    normalized = np.array([text in tokenizer.literal.normalized for text in control.values()], np.uint8)
    return [ids, *strings(text.encode() for text in control.values()), normalized, edges]
