"""Reads what a model that hears says of its tokens: generation_config.json, and the tokenizer's special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mlcpipe.bundle import SpeechInfo
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.errors import ConfigError, TokenizerError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.speech_model import SpeechModel
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.json_files import shown

_WHERE = "generation_config.json"
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_LANGUAGES_FROM = 51865  # tokens of vocabularies with languages, as the published program decides
_MOST = 4096  # tokens of a list


def speech_info(model: LanguageModel, tokenizer: Tokenizer | None, checkpoint: Checkpoint) -> SpeechInfo | None:
    """The tokens and states of a model that hears; None for another one.

    Raises ConfigError for a broken generation_config.json, and TokenizerError for a tokenizer without Whisper's tokens.
    """
    if not isinstance(model, SpeechModel):
        return None
    if tokenizer is None:
        raise TokenizerError(
            "no tokenizer", where=checkpoint.path, expected="tokenizer.json beside the model that hears"
        )
    fields = Fields(checkpoint.generation_config, _WHERE)
    vocab, known = model.facts.vocab_size, tokenizer.library.token_to_id
    several = fields.flag("is_multilingual", vocab >= _LANGUAGES_FROM)

    def token(*texts: str) -> int | None:
        return next((found for text in texts if (found := known(text)) is not None and found < vocab), None)

    def needed(text: str) -> int:
        if (found := token(text)) is None:
            raise TokenizerError(f"no token {text}", where=checkpoint.path, expected="the tokenizer of this checkpoint")
        return found

    no_timestamps = fields.integer("no_timestamps_token_id", needed("<|notimestamps|>"), low=0, high=vocab - 2)
    return SpeechInfo(
        features="log_mel",
        mels=model.shape.mels,
        rows=model.shape.rows,
        languages=_languages(fields, tokenizer, vocab) if several else {},
        start=needed("<|startoftranscript|>"),
        end=needed("<|endoftext|>"),
        transcribe=needed("<|transcribe|>") if several else token("<|transcribe|>"),
        translate=needed("<|translate|>") if several else token("<|translate|>"),
        no_timestamps=no_timestamps,
        timestamps=no_timestamps + 1,
        no_speech=token("<|nospeech|>", "<|nocaptions|>"),
        previous=token("<|startofprev|>"),
        suppressed=_list(fields, "suppress_tokens", vocab),
        suppressed_first=_list(fields, "begin_suppress_tokens", vocab),
        latest_start=fields.optional_integer("max_initial_timestamp_index", None, low=0),
        encoder=tuple(model.encoder_states()),
        sound=tuple(model.sound_states()),
    )


def _languages(fields: Fields, tokenizer: Tokenizer, vocab: int) -> dict[str, int]:
    """The token of each language, by its code."""
    stated: Mapping[str, Any] = fields.table("lang_to_id")
    texts = stated or {text: index for text, index in tokenizer.library.get_vocab().items() if index < vocab}
    found = {match[1]: index for text, index in texts.items() if (match := _LANGUAGE.fullmatch(str(text)))}
    if not 0 < len(found) <= _MOST or not all(type(one) is int and 0 <= one < vocab for one in found.values()):
        raise ConfigError("field lang_to_id", where=_WHERE, expected="a token of each language", found=shown(stated))
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _list(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    listed = fields.get(name, [])
    good = isinstance(listed, list) and len(listed) <= _MOST
    if not good or not all(type(one) is int and 0 <= one < vocab for one in listed):
        raise ConfigError(
            f"field {name}", where=_WHERE, expected=f"at most {_MOST} tokens below {vocab}", found=shown(listed)
        )
    return tuple(listed)
