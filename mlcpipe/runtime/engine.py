"""The public engine: conversations, raw text and logits of one bundle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest
from mlcpipe.errors import UsageError
from mlcpipe.runtime.answer_maker import AnswerMaker, Asked, Message
from mlcpipe.runtime.chat_file import read_chat, write_chat
from mlcpipe.runtime.chunk_stream import ChunkStream
from mlcpipe.runtime.generation import Generation, complete
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.response_format import ResponseFormat
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.sampling_params import Completion, SamplingParams
from mlcpipe.runtime.serving.answer_loop import Answer, AnswerLoop
from mlcpipe.runtime.serving.context_shift import check_shiftable
from mlcpipe.runtime.serving.denoised import check_options
from mlcpipe.runtime.serving.open_drafts import draft_source, open_draft_model
from mlcpipe.runtime.shared_loop import SharedLoop
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.tools import ToolLike
from mlcpipe.support.files import local_path
from mlcpipe.support.progress import Progress, SilentProgress


class Engine:
    """One bundle, and its conversations.

    The KV cache is kept between calls: a prompt that begins like an earlier one (the next turn of a chat) only computes
    the new tokens. Answers that are read at the same time, in one thread or several, are computed together, and none
    depends on the others; all of them share a KV cache of one context. On the main thread a signal whose handler raises
    (Ctrl-C) stops a prefill between parts of a kernel, and the cache keeps the tokens of earlier calls and chunks.

    Args:
        bundle: folder that `mlcpipe.compile` wrote.
        context_length: tokens of prompt and answer; None is as many as the bundle allows and memory holds.
        threads: threads of the kernels; None is MLCPIPE_THREADS or the physical cores.
        device: for a Vulkan bundle, `vulkan:0` and so on; None is the best, a discrete GPU before an integrated one.
        adapter: folder of a LoRA adapter that PEFT saved, for all answers; the bundle must be compiled for adapters.
        context_shift: prompts and answers may be longer than the context, which then has their first page and their
            last tokens. Without `max_tokens` an answer then ends only where the model ends it.
        draft: "lookup" guesses next tokens from prompt and answer, or with the bundle's draft head, and checks several
            at a time where that is faster; answers do not change. None is "off" without a draft model or a head in the
            bundle.
        draft_model: bundle of a smaller model with the same tokens, which guesses them where the texts do not.
        picture_rows: rows of the largest picture, each in the place of a token, of models that take pictures of any
            size; larger ones are shrunk. None is 2048.
        progress: receives the stages of loading onto a device, and the bytes of weights copied.

    Raises BundleError, TargetError or ResourceError, CheckpointError for the adapter, and UsageError for a context that
    is too short to shift.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        device: str | None = None,
        adapter: str | Path | None = None,
        context_shift: bool = False,
        draft: Literal["lookup", "off"] | None = None,
        draft_model: str | Path | None = None,
        picture_rows: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        path = local_path(bundle)
        if path is None:
            raise UsageError("no folder of a bundle", found=bundle, next_step="mlcpipe.load takes names of the hub")
        self.path = path
        began = time.perf_counter()
        progress = progress or SilentProgress()
        loaded = load_bundle(self.path, context_length, threads, device, progress, picture_rows=picture_rows)
        if context_shift:
            check_shiftable(loaded.context_length)
        if draft not in (None, "lookup", "off") or (draft == "off" and draft_model is not None):
            raise UsageError("draft", expected="lookup, or off without a draft model", found=repr(draft))
        heads = loaded.manifest.model.has_draft_head
        drafts = (draft or ("off" if draft_model is None and not heads else "lookup")) == "lookup"
        how = loaded.manifest.model.diffusion
        check_options(how, context_shift=context_shift, drafts=draft == "lookup" or draft_model is not None)
        model = LoadedModel(loaded, None if adapter is None else Path(adapter), drafts=drafts)
        source = None
        if drafts or draft_model is not None:
            smaller = None
            if draft_model is not None:
                smaller = open_draft_model(Path(draft_model), loaded, open_tokenizer(self.path), device)
            source = draft_source(model.core, smaller, loaded.context_length, model.core.limits.sequences)
        answers = AnswerLoop(model.core, drafts=drafts, draft_model=source, context_shift=context_shift, parks=True)
        self._open: AnswerMaker | None = AnswerMaker(self.path, model, SharedLoop(answers), time.perf_counter() - began)

    def __repr__(self) -> str:
        if self._open is None:
            return f"Engine({str(self.path)!r}, closed)"
        what = f"{self.manifest.model.model_type} {self.manifest.quantization}"
        return f"Engine({str(self.path)!r}: {what}, {self.context_length} tokens, {self.device})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the weights and the KV cache, also of answers in progress; later calls raise UsageError."""
        if self._open is not None:
            with self._loop.turn():
                self._loop.close()
                self._open = None

    @property
    def _maker(self) -> AnswerMaker:
        if self._open is None:
            raise UsageError("the engine is closed", where=self.path, next_step="open another one")
        return self._open

    @property
    def _model(self) -> LoadedModel:
        return self._maker.model

    @property
    def _loop(self) -> SharedLoop:
        return self._maker.loop

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._model.bundle.manifest

    @property
    def model(self) -> LoadedModel:
        """The loaded bundle, for callers that run its steps themselves."""
        return self._model

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._model.bundle.context_length

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.manifest.model.vocab_size

    @property
    def threads(self) -> int:
        """Threads of the kernels."""
        return self._model.bundle.threads

    @property
    def device(self) -> str:
        """Where the kernels run, for people: "CPU", or a GPU with its number, name, driver and kind."""
        return self._model.bundle.place

    @property
    def on_host(self) -> bool:
        """Whether the kernels run on the CPU."""
        return self._model.bundle.on_host

    @property
    def variant(self) -> str:
        """The variant of the kernels that runs: the best for this CPU, or the one that MLCPIPE_CPU_VARIANT names."""
        return self._model.bundle.variant.name

    @property
    def load_s(self) -> float:
        """Seconds that opening the bundle took."""
        return self._maker.load_s

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises TokenizerError for a bundle of a checkpoint that had none."""
        return self._maker.tokenizer

    @property
    def default_sampling(self) -> SamplingParams:
        """How tokens are sampled unless a call says so: as in the checkpoint's generation_config.json, if it says."""
        return self._maker.default_sampling

    def reset(self) -> None:
        """Forget all conversations."""
        with self._loop.turn():
            self._model.reset()

    def save(self, path: str | Path, *, chat: Mapping[str, Any] | None = None) -> None:
        """Save the conversation that ended last: its tokens with their keys and values, and `chat`.

        That is any JSON object, such as messages.

        A file has about `manifest.kv_bytes_per_token` bytes per token. It is written as a whole or not at all, and
        replaces a saved chat. `load` continues it without a prefill, also in the native runtime.
        Raises UsageError and ResourceError (disk full).
        """
        model = self._model
        model.check_savable()
        with self._loop.turn():
            if any(token < 0 for token in model.tokens):
                raise UsageError("a chat with pictures is not saved", next_step="save one of text")
            write_chat(Path(path), self.manifest, model.tokens, model.prompt_tokens, model.saved_states(), chat)

    def load(self, path: str | Path) -> dict[str, Any] | None:
        """Continue a saved conversation -> the `chat` that was saved with it.

        Raises UsageError for a file that is damaged, of another model, or longer than the context; the engine then
        keeps its conversation.
        """
        self._model.check_savable()
        with self._loop.turn():
            saved = read_chat(Path(path), self.manifest, self.context_length)
            self._model.restore(saved)
        return saved.chat

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        thinking: bool | str | None = ...,
        response_format: ResponseFormat | None = ...,
        tools: Sequence[ToolLike] | None = ...,
        tool_choice: str | Mapping[str, Any] | None = ...,
        parallel_tool_calls: bool = ...,
        allow_control_tokens: bool = ...,
        stream: Literal[False] = ...,
        **settings: Any,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        thinking: bool | str | None = ...,
        response_format: ResponseFormat | None = ...,
        tools: Sequence[ToolLike] | None = ...,
        tool_choice: str | Mapping[str, Any] | None = ...,
        parallel_tool_calls: bool = ...,
        allow_control_tokens: bool = ...,
        stream: Literal[True],
        **settings: Any,
    ) -> ChunkStream: ...

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        thinking: bool | str | None = None,
        response_format: ResponseFormat | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        allow_control_tokens: bool = False,
        stream: bool = False,
        **settings: Any,
    ) -> Completion | ChunkStream:
        """Answer a conversation through the checkpoint's chat template.

        Args:
            messages: objects with `role` and `content`. A control token that is written in one, such as `<|im_end|>`,
                is text. Content may be a list of `{"type": "text", "text": …}` and, for models that see, pictures
                `{"type": "image", "image": …}`: a path, the bytes of a JPEG, PNG, WebP or GIF, a PIL.Image, or an
                array uint8 [height, width, channels]; and, for models that see them, videos
                `{"type": "video", "video": …}`: a path, the bytes of a file, or a list of such pictures, whose
                `times_s` may say when each of them is.
            sampling: how tokens are sampled; None is `default_sampling`.
            stop: strings that end the answer, which lacks them.
            max_tokens: of the answer; None is as many as the context has room for.
            thinking: switches it on or off, or is its effort, "low", "medium" or "high", if the template can.
            response_format: `{"type": "json_object"}`, OpenAI's `json_schema`, a JSON schema, or a pydantic model.
            tools: that the answer may call (`tool_calls`): OpenAI's JSON, or functions with type hints, whose docstring
                describes them. Arguments fit their schemas.
            tool_choice: "auto" (or None), "none", "required", or OpenAI's object that names a function.
            parallel_tool_calls: whether an answer may have several calls.
            allow_control_tokens: control tokens that messages write are control tokens.
            stream: return chunks as they are made, for `for` and `async for`.
            **settings: fields of `SamplingParams`, such as `temperature=0`, which replace those of `sampling`.

        Thoughts come between `<think>` and `</think>`, also those of gpt-oss, which its messages then lack.
        Raises TemplateError, UsageError (context full), ComputeError (the model computed NaN or infinity).
        """
        asked = Asked(
            stop, max_tokens, thinking, response_format, tools, tool_choice, parallel_tool_calls, allow_control_tokens
        )
        return self._answered(
            self._maker.conversation(messages, self._maker.sampling(sampling, settings), asked), stream
        )

    def chat_batch(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        thinking: bool | str | None = None,
        response_format: ResponseFormat | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **settings: Any,
    ) -> list[Completion]:
        """Answer several conversations together, each as `chat` does: up to eight at a time, several times as fast."""
        how = self._maker.sampling(sampling, settings)
        asked = Asked(stop, max_tokens, thinking, response_format, tools, tool_choice, parallel_tool_calls)
        return self._all([self._maker.conversation(one, how, asked) for one in conversations])

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        ignore_eos: bool = ...,
        stream: Literal[False] = ...,
        **settings: Any,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        ignore_eos: bool = ...,
        stream: Literal[True],
        **settings: Any,
    ) -> ChunkStream: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        stream: bool = False,
        **settings: Any,
    ) -> Completion | ChunkStream:
        """Continue raw text or token ids, without a chat template; the other arguments are those of `chat`.

        Control tokens that are written in the text are control tokens. `ignore_eos` continues to `max_tokens`.
        """
        how = self._maker.sampling(sampling, settings)
        return self._answered(self._maker.continuation(prompt, how, stop, max_tokens, ignore_eos), stream)

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        **settings: Any,
    ) -> list[Completion]:
        """Continue several prompts together, each as `generate` does: up to eight at a time, several times as fast."""
        how = self._maker.sampling(sampling, settings)
        return self._all([self._maker.continuation(prompt, how, stop, max_tokens, ignore_eos) for prompt in prompts])

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[len(tokens), vocab_size] after each token of a new sequence.

        They take memory in addition to that planned when the bundle was opened, and up to 64 MiB more during the call.
        """
        with self._loop.turn():
            return self._model.all_logits(tokens)

    def logits_stepwise(self, tokens: Sequence[int], *, prefill_tokens: int) -> NDArray[np.float32]:
        """Logits f32[len(tokens) - prefill_tokens + 1, vocab_size]: a prefill, then one decode step per token."""
        model = self._model
        with self._loop.turn():
            model.reset()
            model.prefill(tokens[:prefill_tokens], None)
            rows = [model.read_logits().copy()]
            for token in tokens[prefill_tokens:]:
                model.step(token, None)
                rows.append(model.read_logits().copy())
            model.reset()
        return np.stack(rows)

    def prefill(self, tokens: Sequence[int]) -> int:
        """Append tokens to the sequence -> the most probable next token. For measurements; see `generate`."""
        with self._loop.turn():
            return self._model.prefill([*self._model.tokens, *tokens], self._greedy)

    def decode(self, token: int) -> int:
        """Append one token -> the most probable next one. For measurements."""
        self._model.token_ids([token])
        with self._loop.turn():
            return self._model.step(token, self._greedy)

    @cached_property
    def _greedy(self) -> Row:
        return Row(SamplingParams(temperature=0.0))

    def _answered(self, prepared: tuple[Generation, Answer], stream: bool) -> Completion | ChunkStream:
        generation, answer = prepared
        chunks = generation.chunks(self._loop.steps(answer), lambda: self._loop.begin([answer]))
        return ChunkStream(chunks) if stream else complete(chunks)

    def _all(self, prepared: Sequence[tuple[Generation, Answer]]) -> list[Completion]:
        """All answers, computed together."""
        answers = [(generation, self._loop.steps(answer)) for generation, answer in prepared]
        try:
            self._loop.begin(answer for _, answer in prepared)
            return [complete(generation.chunks(steps)) for generation, steps in answers]
        finally:
            for _, answer in prepared:
                self._loop.end(answer)
