"""Text to token ids and back, over the `tokenizers` library, from the files of the checkpoint alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from mlcpipe.errors import LongTextError, TemplateError, TokenizerError
from mlcpipe.runtime.text.chat_template import ChatTemplate
from mlcpipe.runtime.text.contents import ContentMarks
from mlcpipe.runtime.text.literal_messages import LiteralEncoder
from mlcpipe.runtime.text.special_tokens import NAMES, SpecialTokens
from mlcpipe.runtime.text.token_bytes import DecoderRules, Piece, parse_decoder
from mlcpipe.runtime.text.tokenizer_calls import guarded, interruptible
from mlcpipe.runtime.text.tokenizer_classes import read_library
from mlcpipe.runtime.text.tokenizer_files import SETTINGS, TOKENIZER, chat_templates, read_object
from mlcpipe.runtime.text.tokenizer_limits import check_library

MAX_NORMALIZED_BYTES = (
    128 << 20
)  # of the longest text after all steps of the tokenizer; encoding takes some 20 times that
_NOTHING = Piece(b"")


class Tokenizer:
    """One checkpoint's tokenizer; safe to share between threads.

    eos_token_ids    every id that ends an answer
    bos_token_id     the id that starts a text, None where the model has none
    vocab_size       largest token id + 1 (the model may have more rows, as padding)
    special_tokens   `bos_token`, `eos_token`, `pad_token`, … as text
    chat_templates   Jinja sources by name, the main one is `default`, for tools there may be `tool_use`
    most_chars       of a text to encode
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        folder: Path,
        rows: int | None,
        special: SpecialTokens,
        templates: Mapping[str, str],
    ) -> None:
        self.library = library
        self._folder = folder
        self.rows = rows
        self._pieces: dict[int, Piece] = {}
        self._compiled: dict[str, ChatTemplate] = {}
        self._special = special
        self.special_tokens = special.texts()
        self.chat_templates = dict(templates)
        self.most_chars = int(MAX_NORMALIZED_BYTES / check_library(library))
        self._added = library.get_added_tokens_decoder()
        # The library goes by the text: a token is skipped if any added token of that text is special.
        self._special_texts = frozenset(token.content for token in self._added.values() if token.special)
        self.vocab_size = _check_vocab(library, set(self._added), rows, folder)
        self.bos_token_id: int | None = self._id_of("bos_token")
        self.eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def load(
        cls, folder: Path, *, generation_config: Mapping[str, Any], config: Mapping[str, Any], decodes: bool = True
    ) -> Tokenizer:
        """Reads the tokenizer files in `folder`; `config` and `generation_config` are the checkpoint's, parsed.

        Raises TokenizerError for missing, broken or oversized files, for a vocabulary larger than
        `config["vocab_size"]`, and where it `decodes`, as all but encoders do, for a decoder that cannot be streamed.
        """
        folder = Path(folder)
        settings = read_object(folder / SETTINGS)
        library, special = read_library(folder, settings, config)
        templates = chat_templates(folder, settings)
        self = cls(library, folder=folder, rows=_vocab_rows(config), special=special, templates=templates)
        if decodes:
            self.rules  # noqa: B018 (raises)
        if self.bos_token_id is None and "bos_token" not in special.named:
            # Without tokenizer_config.json; a `null` there means a model without BOS (Qwen2).
            self.bos_token_id = min(_ids(config, "bos_token_id"), default=None)
        named = {self._id_of(name) for name in ("eos_token", "eot_token")} - {None}
        text_config = config.get("text_config")
        self.eos_token_ids = frozenset(
            _ids(generation_config, "eos_token_id")
            | _ids(config, "eos_token_id")
            | (_ids(text_config, "eos_token_id") if isinstance(text_config, Mapping) else set())
            | {index for index in named if index is not None}
            | self._end_of_turn()
        )
        return self

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written in the text become their ids.

        `add_special_tokens` adds the tokens around a plain text (BOS); a rendered chat template has them
        already. Raises TokenizerError for text that is not valid Unicode, and for a token
        that the model has no embedding row for.
        """
        return self.with_rows(self._encoding(self.library, text, add_special_tokens).ids)

    def control_places(self, tokens: Sequence[int]) -> list[int]:
        """Where these tokens are control tokens."""
        control = self.literal.control
        return [place for place, token in enumerate(tokens) if token in control]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        allow_control_tokens: bool = False,
        completed: Callable[[str], str] = str,
        **extras: Any,
    ) -> list[int]:
        """Token ids of a conversation: `extras` go to the chat template, as in `ChatTemplate.render`.

        A control token that is written in a message or in an extra is encoded as text, unless
        `allow_control_tokens`. What the template wrote is `completed` first. Without one the ids equal those of
        transformers. Raises TemplateError, UsageError,
        and what `encode` raises.
        """
        template = self.chat_template(self.template_name(extras.get("tools")))
        if allow_control_tokens:
            return self.encode(completed(template.render(messages, **extras)))
        marked, stand_ins = template.render_marked(messages, self.marks, **extras)
        return self.with_rows(self.literal.encode(completed(marked), stand_ins))

    def check_length(self, chars: int) -> None:
        """Raises LongTextError for a text of more characters than `encode` takes."""
        if chars > self.most_chars:
            expected = f"at most {self.most_chars} characters"
            raise LongTextError("the text is too long", expected=expected, found=chars)

    def encoding(self, text: str) -> tokenizers.Encoding:
        """A text as the library encodes it, without special tokens around it. Raises what `encode` raises."""
        return self._encoding(self.library, text)

    def with_rows(self, ids: list[int]) -> list[int]:
        """The ids. Raises TokenizerError for one that the model has no embedding row for."""
        if self.rows is not None and ids and max(ids) >= self.rows:
            raise TokenizerError(
                f"token {self.library.id_to_token(max(ids))!r} has no row in the model's embedding",
                expected=f"ids below {self.rows}",
                found=max(ids),
                next_step="leave it out of the text",
            )
        return ids

    @cached_property
    def rules(self) -> DecoderRules:
        """How single tokens become bytes. Raises TokenizerError if that needs more than the token."""
        decoder = self.library.decoder
        return parse_decoder(None if decoder is None else json.loads(decoder.__getstate__()))

    @property
    def control_token_ids(self) -> frozenset[int]:
        """Tokens that steer the model: no text of a message becomes one of them."""
        return frozenset(self.literal.control)

    @cached_property
    def literal(self) -> LiteralEncoder:
        """Control tokens here are the special ones and those that end an answer; an unknown word is none."""
        texts = {index: token.content for index, token in self._added.items() if token.special}
        texts |= {index: text for index in self.eos_token_ids if (text := self._token(index)) is not None}
        unknown = self.special_tokens.get("unk_token"), getattr(self.library.model, "unk_token", None)
        control = {index: text for index, text in texts.items() if text.strip() and text not in unknown}
        return LiteralEncoder(self.library, control, lambda library, text: self._encoding(library, text))

    @cached_property
    def marks(self) -> ContentMarks:
        return ContentMarks(self.literal.control.values())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, exactly as the library decodes it; broken UTF-8 becomes U+FFFD."""
        return guarded(
            "cannot decode the tokens",
            self._folder,
            lambda: self.library.decode(list(ids), skip_special_tokens=skip_special_tokens),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token inside a text: a leading space is kept, a special token is its name.

        An id that the tokenizer does not know (a padded row of the model) has no bytes.
        """
        token = self._token(token_id)
        return b"" if token is None else self.rules.piece(token).data

    def missing_ids(self, rows: int) -> list[tuple[int, int]]:
        """Ids below `rows` that stand for no text and end no answer, such as padding, as ranges [begin, end)."""
        known = {index for text, index in self.library.get_vocab(with_added_tokens=True).items() if text}
        ranges: list[tuple[int, int]] = []
        for index in sorted(set(range(rows)) - known - self.eos_token_ids):
            if self.token_bytes(index):  # a second token of one text
                continue
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == index else index
            ranges.append((begin, index + 1))
        return ranges

    def piece(self, token_id: int, *, first: bool = False) -> Piece | None:
        """The share of a token in decoded text; None for a token that decoding skips (special or unknown)."""
        if not first and (cached := self._pieces.get(token_id)) is not None:
            return None if cached is _NOTHING else cached
        token = self._token(token_id)
        skipped = token is None or token in self._special_texts
        piece = _NOTHING if token is None or skipped else self.rules.piece(token, first=first)
        if not first:
            self._pieces[token_id] = piece
        return None if skipped else piece

    def chat_template(self, name: str = "default") -> ChatTemplate:
        """The compiled chat template. Raises TemplateError where the checkpoint has none of that name."""
        source = self.chat_templates.get(name)
        if source is None:
            found = ", ".join(sorted(self.chat_templates)) or "none (a base model)"
            raise TemplateError(
                f"no chat template {name!r}",
                where=self._folder,
                found=found,
                next_step="use `generate` or `--raw` to continue plain text",
            )
        if name not in self._compiled:
            tokens = dict(self.special_tokens)
            bos, eos = tokens.pop("bos_token", None), tokens.pop("eos_token", None)
            self._compiled[name] = ChatTemplate(source, bos_token=bos, eos_token=eos, special_tokens=tokens)
        return self._compiled[name]

    def template_name(self, tools: object) -> str:
        """The name of the chat template, as in transformers: with tools `tool_use`, if there is one."""
        return "tool_use" if tools is not None and "tool_use" in self.chat_templates else "default"

    def control_tokens(self, texts: Sequence[str]) -> set[int]:
        """The ids of the texts that are control tokens."""
        return {index for index in map(self.library.token_to_id, texts) if index in self.control_token_ids}

    def files(self) -> dict[str, str]:
        """Files of a bundle from which `load` makes the same tokenizer, also in a browser, which reads the first."""
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
        texts = {name: token and token.content for name, token in self._special.named.items()}
        settings |= {name: text for name, text in texts.items() if name in NAMES}
        settings["extra_special_tokens"] = {name: text for name, text in texts.items() if name not in NAMES}
        if self.chat_templates:
            settings["chat_template"] = self.chat_templates
        return {TOKENIZER: self.library.to_str(), SETTINGS: json.dumps(settings, ensure_ascii=False)}

    def _encoding(self, library: tokenizers.Tokenizer, text: str, around: bool = False) -> tokenizers.Encoding:
        """`around` adds the special tokens around a text."""
        self.check_length(len(text))

        def encode() -> tokenizers.Encoding:
            # Only the call for several texts releases the GIL.
            return library.encode_batch([text], add_special_tokens=around)[0]

        return guarded("cannot encode the text", self._folder, lambda: interruptible(encode))

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        return self.library.id_to_token(token_id)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.library.token_to_id(text)

    def _end_of_turn(self) -> set[int]:
        """The special token that the chat template writes right after an assistant's message.

        Llama-3's <|eot_id|>, Qwen's <|im_end|> and Gemma's <end_of_turn> end an answer though `eos_token` may be
        another one; checkpoints fine-tuned by others often lack the list in generation_config.json.
        """
        if "default" not in self.chat_templates:
            return set()
        answer = "mlcpipe-answer"
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        try:
            text = self.chat_template().render(messages, add_generation_prompt=False)
        except TemplateError:
            # Reported by chats; a broken template must not stop raw generation.
            return set()
        _, found, tail = text.rpartition(answer)
        if not found:
            return set()
        tail = tail.lstrip()
        special = {token.content: index for index, token in self._added.items() if token.special}
        matches = [content for content in special if content and tail.startswith(content)]
        return {special[max(matches, key=len)]} if matches else set()


def _vocab_rows(config: Mapping[str, Any]) -> int | None:
    """Rows of the embedding by config.json, None where it does not say."""
    text_config = config.get("text_config")
    rows = config.get("vocab_size")
    if rows is None and isinstance(text_config, Mapping):
        rows = text_config.get("vocab_size")
    if rows is None:
        return None
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise TokenizerError("vocab_size", where="config.json", expected="a positive integer", found=repr(rows))
    return rows


def _check_vocab(library: tokenizers.Tokenizer, added: set[int], rows: int | None, folder: Path) -> int:
    """Largest id + 1. Added tokens past the rows pass (Gemma 3 has one); `encode` refuses them when used."""
    ids = set(library.get_vocab(with_added_tokens=True).values())
    if not library.get_vocab_size(with_added_tokens=False):
        raise TokenizerError("empty vocabulary", where=folder)
    largest = max(ids - added, default=-1)
    if rows is not None and largest >= rows:
        raise TokenizerError(
            "the vocabulary does not fit the model",
            where=folder,
            expected=f"token ids below config.json's vocab_size {rows}",
            found=largest,
            next_step="use the tokenizer of this checkpoint",
        )
    return max(ids) + 1


def _ids(config: Mapping[str, Any], key: str) -> set[int]:
    """The token ids under `key`: an integer, a list of them, or nothing, which -1 is too."""
    value = config.get(key)
    values = value if isinstance(value, list) else [] if value in (None, -1) else [value]
    for entry in values:
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
            raise TokenizerError(key, expected="a token id or a list of them", found=repr(entry))
    return set(values)
