"""Prepares answers: checks a call's arguments, and makes the request and how its tokens become chunks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from mlcpipe.errors import UsageError
from mlcpipe.runtime.answer_reader import AnswerReader, CallingText, Reading
from mlcpipe.runtime.generation import Generation
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.pictures import completion, seen, with_rows
from mlcpipe.runtime.response_format import ResponseFormat, form_of
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.answer_loop import Answer
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.grammar import Grammar
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.shared_loop import SharedLoop
from mlcpipe.runtime.stated_sampling import bundle_sampling
from mlcpipe.runtime.text.chat_template import check_messages, check_roles
from mlcpipe.runtime.text.harmony import MARKS, HarmonyText, without_thoughts
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.thinking import thinking_variables, thoughts_after
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tool_calling import ToolCalling
from mlcpipe.runtime.tools import ToolLike, choice_of, with_arguments, with_calls
from mlcpipe.vision.processors.picture import Picture

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Asked:
    """Arguments of `Engine.chat` and `Engine.chat_batch`."""

    stop: Sequence[str] = ()
    max_tokens: int | None = None
    thinking: bool | str | None = None
    response_format: ResponseFormat | None = None
    tools: Sequence[ToolLike] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    allow_control_tokens: bool = False


class AnswerMaker:
    """What makes answers of an open bundle."""

    def __init__(self, path: Path, model: LoadedModel, loop: SharedLoop, load_s: float) -> None:
        self.path, self.model, self.loop, self.load_s = path, model, loop, load_s

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """As `Engine.tokenizer`."""
        return open_tokenizer(self.path)

    @cached_property
    def default_sampling(self) -> SamplingParams:
        """As `Engine.default_sampling`."""
        return bundle_sampling(self.path, SamplingParams())

    def sampling(self, sampling: SamplingParams | None, settings: Mapping[str, Any]) -> SamplingParams:
        """The sampling of a call. Raises UsageError, and TypeError for a setting that does not exist."""
        if not isinstance(sampling, (SamplingParams, NoneType)):
            raise UsageError(
                "sampling", expected="SamplingParams", found=type(sampling).__name__,
                next_step="give its fields as arguments, such as temperature=0",
            )  # fmt: skip
        names = [one.name for one in fields(SamplingParams)]
        if unknown := settings.keys() - names:
            raise TypeError(f"unexpected argument {min(unknown)!r}; settings are {', '.join(names)}")
        sampling = sampling or self.default_sampling
        return replace(sampling, **settings) if settings else sampling

    def conversation(
        self, messages: Sequence[Message], sampling: SamplingParams, asked: Asked
    ) -> tuple[Generation, Answer]:
        """The answer to a conversation, before it begins."""
        bundle = self.model.bundle
        vision = bundle.manifest.model.vision
        plain, pictures = seen(messages, vision, bundle.context_length)
        check_messages(plain)
        calling = self._calling
        choice = choice_of(asked.tools or (), asked.tool_choice, parallel=asked.parallel_tool_calls)
        harmony = calling.style.channels
        given = [with_arguments(with_calls(one, f"messages[{index}]")) for index, one in enumerate(plain)]
        prepared, variables = calling.style.prepare(without_thoughts(given) if harmony else given, choice.tools)
        template = self.tokenizer.chat_template(self.tokenizer.template_name(variables.get("tools")))
        check_roles(plain, template)
        variables |= thinking_variables(template, asked.thinking)
        tokens = self.tokenizer.encode_chat(
            prepared, allow_control_tokens=asked.allow_control_tokens,
            completed=completion(pictures, vision), **variables,
        )  # fmt: skip
        thinking = thoughts_after(self.tokenizer, template.source, tokens)
        form = None if asked.response_format is None else form_of(asked.response_format)
        grammar = calling.grammar(choice, form, thinking) if choice.tools or form is not None else None
        reading = None
        if choice.tools:
            reading = Reading(
                _listed(asked.stop), thinking=thinking, style=calling.style, tools=choice.tools, shown=calling.shown,
                one_call=not choice.parallel,
            )  # fmt: skip
        return self._prepared(
            with_rows(tokens, pictures, self.tokenizer), sampling, asked.stop, asked.max_tokens, harmony=harmony,
            grammar=grammar, reading=reading, pictures=pictures,
        )  # fmt: skip

    def continuation(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        stop: Sequence[str],
        max_tokens: int | None,
        ignore_eos: bool,
    ) -> tuple[Generation, Answer]:
        """The continuation of a prompt, before it begins."""
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        if any(isinstance(token, str) for token in tokens):
            most = self.model.bundle.manifest.model.vocab_size - 1
            raise UsageError(
                "token ids", expected=f"one or more integers from 0 to {most}", found="texts",
                next_step="use generate_batch for several prompts",
            )  # fmt: skip
        return self._prepared(tokens, sampling, stop, max_tokens, continues=True, ignore_eos=ignore_eos)

    @cached_property
    def _calling(self) -> ToolCalling:
        return ToolCalling(self.tokenizer, self.model.bundle.manifest.model.vocab_size)

    def _prepared(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop: Sequence[str],
        max_tokens: int | None,
        *,
        continues: bool = False,
        ignore_eos: bool = False,
        harmony: bool = False,
        grammar: Grammar | None = None,
        reading: Reading | None = None,
        pictures: Sequence[Picture] = (),
    ) -> tuple[Generation, Answer]:
        """An answer, its arguments checked, and how its tokens become chunks."""
        if not prompt:
            raise UsageError("the prompt has no tokens", expected="at least one")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UsageError("max_tokens", expected="an integer from 1", found=repr(max_tokens))
        shifts = self.loop.context_shift
        if not shifts:
            self.model.check_fits(len(prompt) + 1)
        prompt = prompt if pictures else self.model.token_ids(prompt).tolist()
        tokenizer: Tokenizer | None = None
        text: TextStream | HarmonyText | CallingText | None = None
        eos: frozenset[int] = frozenset()
        if not ignore_eos or stop or sampling.logprobs or (self.path / "tokenizer.json").is_file():
            tokenizer = self.tokenizer
            eos = frozenset() if ignore_eos else tokenizer.eos_token_ids
            if reading is not None:
                text = CallingText(AnswerReader(tokenizer, reading, eos), opened=reading.thinking == "open")
            else:
                shown = tokenizer.control_tokens(MARKS) if harmony else ()
                stream = TextStream(tokenizer, _listed(stop), eos, continues=continues, shown=shown)
                text = HarmonyText(stream) if harmony else stream
        room = sys.maxsize if shifts else self.model.bundle.context_length - len(prompt)
        sampling.check_bias(self.model.bundle.manifest.model.vocab_size)
        request = Request(
            prompt, min(max_tokens or room, room), sampling, stop_ids=eos, logprobs=sampling.logprobs or None,
            grammar=grammar, adapter=self.model.adapter, pictures=pictures,
            control=() if tokenizer is None else tokenizer.control_places(prompt),
        )  # fmt: skip
        kept = without_dropped(prompt, tokens_to_drop(len(prompt), self.model.bundle.context_length))
        generation = Generation(self.model.bundle.manifest, len(kept), text, tokenizer, self.load_s)
        return generation, self.loop.answer(request)


def _listed(stop: Sequence[str]) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop
