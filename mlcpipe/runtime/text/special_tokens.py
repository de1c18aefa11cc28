"""Added and special tokens: additions and overrides from the files beside tokenizer.json.

The rules are those of transformers 5.23 (`_from_pretrained` in `tokenization_utils_base.py`, `__init__` of
`TokenizersBackend`):

* `added_tokens_decoder` of tokenizer_config.json replaces tokens of tokenizer.json, with all their flags. Where it is,
  neither special_tokens_map.json nor added_tokens.json is read.
* Else special_tokens_map.json wins over tokenizer_config.json, but for tokens with names of the model's own; then come
  the tokens of added_tokens.json, unless tokenizer.json has another one with their id.
* A token that is named is special, whatever its list says. Named and extra tokens that no list has become special.
* A token has the id of the vocabulary; one that is not there gets the next free id, in the order of the stated ids.
* What tokenizer.json has as special stays so, except in classes that build a new tokenizer of its vocabulary
  (LlamaTokenizer, Qwen2Tokenizer, …).

Not so here: such a class drops tokens that only tokenizer.json has, and adds its own named tokens to a vocabulary
without them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from mlcpipe.errors import CheckpointWarning, TokenizerError
from mlcpipe.runtime.text.tokenizer_calls import guarded
from mlcpipe.runtime.text.tokenizer_files import SETTINGS, read_object
from mlcpipe.runtime.text.tokenizer_limits import check_library
from mlcpipe.support.json_files import shown

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAP, _ADDED, _EXTRA, _OLD_EXTRA = (
    "special_tokens_map.json", "added_tokens.json", "extra_special_tokens", "additional_special_tokens",
)  # fmt: skip
_SPECIFIC = "model_specific_special_tokens"  # as transformers 5 saves tokens with names of the model's own
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of all files together.

    named  `bos_token` and so on, and names of the model's own; None is a token that the model is said not to have
    extra  special tokens without a name
    added  the listed tokens, by the id that the list states
    """

    named: dict[str, AddedToken | None]
    extra: list[AddedToken]
    added: dict[int, AddedToken]

    def texts(self) -> dict[str, str]:
        """The named tokens that there are, as templates see them."""
        return {name: token.content for name, token in self.named.items() if token is not None}

    def add_to(
        self, library: tokenizers.Tokenizer, *, plain: bool = False, rebuilt: bool = False
    ) -> tokenizers.Tokenizer:
        """The library's tokenizer that splits them out of texts; `plain` takes the flags of those that are special.

        `rebuilt` is for a class that builds a new tokenizer. Raises TokenizerError.
        """
        special = [token for token in (*self.named.values(), *self.extra) if token is not None]
        names = set(self.texts().values())
        listed = [token for _, token in sorted(self.added.items())]
        known = {token.content for token in (*listed, *library.get_added_tokens_decoder().values())}
        others = {repr(token): token for token in special if token.content not in known}
        tokens = [*listed, *others.values()]
        for token in tokens:
            if token.content in names and not token.special:
                token.special = True
        if plain:
            tokens += [AddedToken(token.content, special=True) for token in special]
        made = _with(library, tokens, rebuilt)
        for index, token in self.added.items():
            if (found := made.token_to_id(token.content)) != index and token.content:
                line = f"the token {shown(token.content)} has the id {found}, where a list of added tokens says {index}"
                warnings.warn(CheckpointWarning(line), stacklevel=2)
                break
        return made


def read_special_tokens(
    folder: Path, settings: Mapping[str, Any], own: Mapping[str, str], library: tokenizers.Tokenizer
) -> SpecialTokens:
    """What the files in `folder` say; `settings` is tokenizer_config.json, `own` has the class's named tokens.

    Raises TokenizerError for a broken file.
    """
    decoder = settings.get("added_tokens_decoder")
    mapped = read_object(folder / _MAP) if decoder is None else {}
    texts = {name: value for name, value in settings.items() if isinstance(value, str)}
    objects = {name: value for name, value in settings.items() if name not in texts}
    named = _named(settings, SETTINGS) | _named(mapped, _MAP)
    by_name, extra, special = _extra(settings, mapped)
    own_names = {**_specific(texts, SETTINGS), **by_name} or _by_name(settings.get(_SPECIFIC), SETTINGS)
    specific = {**_specific(objects, SETTINGS), **_specific(mapped, _MAP), **own_names}
    if decoder is not None:
        added = _decoder(decoder)
    else:
        special += [token for name, token in named.items() if token is not None and name in {**texts, **mapped}]
        added = {**_added_tokens(folder, {token.content for token in special}), **library.get_added_tokens_decoder()}
    for name, text in own.items():
        if name not in named and library.token_to_id(text) is not None:
            named[name] = _token(text, SETTINGS)
    listed = {token.content: token for token in added.values()}
    standard = {
        name: token and listed.get(token.content, token) for name in NAMES if name in named for token in [named[name]]
    }
    return SpecialTokens({**standard, **specific}, extra, added)


def _extra(
    settings: Mapping[str, Any], mapped: Mapping[str, Any]
) -> tuple[dict[str, AddedToken | None], list[AddedToken], list[AddedToken]]:
    """Extra tokens with a name, those without, and of these the ones that are special in added_tokens.json."""
    stated = settings.get(_EXTRA) or settings.get(_OLD_EXTRA, settings.get(_EXTRA))
    more = mapped.get(_EXTRA)
    by_name = _by_name(stated, SETTINGS) | _by_name(more, _MAP)
    extra = [] if isinstance(stated, Mapping) or isinstance(more, Mapping) else _tokens(stated, SETTINGS)
    if isinstance(more, list):
        extra += _tokens(more, _MAP)
    special = [token for token in extra if more or token.content in stated]
    if isinstance(more, Mapping) or more is None and (stated is None or isinstance(stated, Mapping)):
        # No newer name replaces the older one.
        unused = settings.get(_OLD_EXTRA) if settings.get(_EXTRA) else None
        extra = _tokens(mapped.get(_OLD_EXTRA), _MAP) if _OLD_EXTRA in mapped else _tokens(unused, SETTINGS)
    return by_name, extra, special


def _by_name(values: object, where: str) -> dict[str, AddedToken | None]:
    """The tokens of an object; of anything else there are none."""
    entries = values.items() if isinstance(values, Mapping) else ()
    return {name: _token(value, where, special=where == _MAP) for name, value in entries}


def _named(settings: Mapping[str, Any], where: str) -> dict[str, AddedToken | None]:
    return _by_name({name: settings[name] for name in NAMES if name in settings}, where)


def _token(value: object, where: str, *, special: bool = False) -> AddedToken | None:
    """A token as a text, or as an object with `content` and flags; None for null. Raises TokenizerError."""
    if value is None:
        return None
    entry = {"content": value, "special": True} if isinstance(value, str) else value
    if isinstance(entry, Mapping) and isinstance(content := entry.get("content"), str):
        flags = {name: entry[name] for name in _FLAGS if entry.get(name) is not None}
        if all(isinstance(flag, bool) for flag in flags.values()):
            made = guarded("broken token", where, lambda: AddedToken(content, **flags))
            if special:
                made.special = True
            return made
    raise TokenizerError("broken token", where=where, expected="a text, or an object with content", found=shown(value))


def _tokens(values: object, where: str) -> list[AddedToken]:
    if values is not None and not isinstance(values, list):
        raise TokenizerError("broken extra special tokens", where=where, expected="a list", found=shown(values))
    return [token for value in values or () if (token := _token(value, where, special=where == _MAP)) is not None]


def _specific(settings: Mapping[str, Any], where: str) -> dict[str, AddedToken | None]:
    """Tokens with names of the model's own, such as `eot_token`; other values of such names are no tokens."""
    own = {name: value for name, value in settings.items() if name.endswith("_token") and name not in NAMES}
    return _by_name(
        {name: value for name, value in own.items() if isinstance(value, str) or _has_content(value)}, where
    )


def _has_content(value: object) -> bool:
    return isinstance(value, Mapping) and "content" in value


def _decoder(decoder: object) -> dict[int, AddedToken]:
    """`added_tokens_decoder`. Raises TokenizerError."""
    entries = decoder.items() if isinstance(decoder, Mapping) else [("", decoder)]
    made: dict[int, AddedToken] = {}
    for key, value in entries:
        token = _token(value, SETTINGS) if _has_content(value) else None
        if token is None or not key.isascii() or not key.isdigit() or len(key) > 9:
            found = shown({key: value} if key else value)
            raise TokenizerError("broken added_tokens_decoder", where=SETTINGS, expected="tokens by id", found=found)
        made[int(key)] = token
    return made


def _added_tokens(folder: Path, special: set[str]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json; one that is not special is looked for in the normalized text."""
    made: dict[int, AddedToken] = {}
    for text, index in read_object(folder / _ADDED).items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise TokenizerError("broken token", where=folder / _ADDED, expected="an id", found=shown(index))
        flag = text in special
        token = _token({"content": text, "special": flag, "normalized": not flag}, _ADDED)
        if token is not None:
            made[index] = token
    return made


def _with(library: tokenizers.Tokenizer, tokens: Iterable[AddedToken], rebuilt: bool) -> tokenizers.Tokenizer:
    """The library with these tokens; a skipped token stays skipped, whatever a later flag says."""
    present = {token.content: token.__getstate__() for token in library.get_added_tokens_decoder().values()}
    flags: dict[str, dict[str, Any]] = {}
    for token in tokens:
        state = token.__getstate__()
        before = flags.get(token.content, state if rebuilt else present.get(token.content, state))
        state["special"] = state["special"] or before["special"]
        flags[token.content] = state
    new = [AddedToken(**state) for content, state in flags.items() if content and present.get(content) != state]
    if not new:
        return library

    def added() -> tokenizers.Tokenizer:
        library.add_tokens(new)
        # The library remembers some flags of tokens that it had.
        had = any(token.content in present for token in new)
        return tokenizers.Tokenizer.from_str(library.to_str()) if had else library

    check_library(library)  # it normalizes some of them
    return guarded("the added tokens cannot be used", "the tokenizer's files", added)
