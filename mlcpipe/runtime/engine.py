"""The public engine: conversations, raw text and logits of one bundle."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest
from mlcpipe.errors import UsageError
from mlcpipe.runtime.chat_file import read_chat, write_chat
from mlcpipe.runtime.generation import Generation, complete
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.runtime.sampler import Row
from mlcpipe.runtime.sampling_params import Chunk, Completion, SamplingParams
from mlcpipe.runtime.serving.answer_loop import Answer, AnswerLoop
from mlcpipe.runtime.serving.context_shift import check_shiftable, tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.interface import Request, TokenEvent
from mlcpipe.runtime.stated_sampling import bundle_sampling
from mlcpipe.runtime.text.harmony import MARKS, HarmonyText, is_harmony, without_thoughts
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.streaming import TextStream
from mlcpipe.runtime.text.thinking import thinking_variables
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.files import local_path
from mlcpipe.support.progress import Progress, SilentProgress

Message = Mapping[str, Any]
_HELD_S = 0.002  # until the next plan, if no answer can continue


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
        progress: Progress | None = None,
    ) -> None:
        path = local_path(bundle)
        if path is None:
            raise UsageError("no folder of a bundle", found=bundle, next_step="mlcpipe.load takes names of the hub")
        self.path = path
        began = time.perf_counter()
        loaded = load_bundle(self.path, context_length, threads, device, progress or SilentProgress())
        if context_shift:
            check_shiftable(loaded.context_length)
        self._model = LoadedModel(loaded, None if adapter is None else Path(adapter))
        self._answers = AnswerLoop(self._model.core, context_shift=context_shift, parks=True)
        self._turns, self._in_turn = threading.Condition(), 0  # whose turn it is, the thread's number
        self._ended: deque[int] = deque()  # streams that nobody reads any more
        self._load_s = time.perf_counter() - began

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
        return self._model.bundle.device.description

    @property
    def on_host(self) -> bool:
        """Whether the kernels run on the CPU."""
        return self._model.bundle.device.on_host

    @property
    def variant(self) -> str:
        """The variant of the kernels that runs: the best for this CPU, or the one that MLCPIPE_CPU_VARIANT names."""
        return self._model.bundle.variant.name

    @property
    def load_s(self) -> float:
        """Seconds that opening the bundle took."""
        return self._load_s

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises TokenizerError for a bundle of a checkpoint that had none."""
        return open_tokenizer(self.path)

    @cached_property
    def default_sampling(self) -> SamplingParams:
        """How tokens are sampled unless a call says so: as in the checkpoint's generation_config.json, if it says."""
        return bundle_sampling(self.path, SamplingParams())

    def reset(self) -> None:
        """Forget all conversations."""
        with self._turn():
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
        with self._turn():
            write_chat(Path(path), self.manifest, model.tokens, model.prompt_tokens, model.saved_states(), chat)

    def load(self, path: str | Path) -> dict[str, Any] | None:
        """Continue a saved conversation -> the `chat` that was saved with it.

        Raises UsageError for a file that is damaged, of another model, or longer than the context; the engine then
        keeps its conversation.
        """
        self._model.check_savable()
        with self._turn():
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
        allow_control_tokens: bool = ...,
        thinking: bool | str | None = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        allow_control_tokens: bool = ...,
        thinking: bool | str | None = ...,
        stream: Literal[True],
    ) -> Generator[Chunk, None, None]: ...

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        allow_control_tokens: bool = False,
        thinking: bool | str | None = None,
        stream: bool = False,
    ) -> Completion | Generator[Chunk, None, None]:
        """Answer a conversation: messages {"role", "content"}, through the checkpoint's chat template.

        A control token that is written in a message, such as `<|im_end|>`, is text, unless `allow_control_tokens`.
        Without `sampling` tokens are sampled by `default_sampling`. `thinking` switches it on or off, or is its effort,
        "low", "medium" or "high", if the template can.
        Thoughts of gpt-oss come between `<think>` and `</think>`; in messages they are left out.
        `stream=True` yields chunks as they are made; the last has `finish_reason` and `stats`.
        Raises TemplateError, UsageError (context full), ComputeError (the model computed NaN or infinity).
        """
        harmony = is_harmony(self.tokenizer.chat_templates.get("default", ""))
        given = without_thoughts(messages) if harmony else list(messages)
        variables = thinking_variables(self.tokenizer.chat_template(), thinking)
        tokens = self.tokenizer.encode_chat(given, allow_control_tokens=allow_control_tokens, **variables)
        sampling = sampling or self.default_sampling
        chunks = self._generate(tokens, sampling, stop, max_tokens, False, continues=False, harmony=harmony)
        return chunks if stream else complete(chunks)

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
    ) -> Generator[Chunk, None, None]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        stream: bool = False,
    ) -> Completion | Generator[Chunk, None, None]:
        """Continue raw text or token ids, without a chat template. `ignore_eos` continues to `max_tokens`.

        Control tokens that are written in the text are control tokens.
        """
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        sampling = sampling or self.default_sampling
        chunks = self._generate(tokens, sampling, stop, max_tokens, ignore_eos, continues=True)
        return chunks if stream else complete(chunks)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[len(tokens), vocab_size] after each token of a new sequence.

        They take memory in addition to that planned when the bundle was opened, and up to 64 MiB more during the call.
        """
        with self._turn():
            return self._model.all_logits(tokens)

    def logits_stepwise(self, tokens: Sequence[int], *, prefill_tokens: int) -> NDArray[np.float32]:
        """Logits f32[len(tokens) - prefill_tokens + 1, vocab_size]: a prefill, then one decode step per token."""
        model = self._model
        with self._turn():
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
        with self._turn():
            return self._model.prefill([*self._model.tokens, *tokens], self._greedy)

    def decode(self, token: int) -> int:
        """Append one token -> the most probable next one. For measurements."""
        self._model.token_ids([token])
        with self._turn():
            return self._model.step(token, self._greedy)

    @cached_property
    def _greedy(self) -> Row:
        return Row(SamplingParams(temperature=0.0))

    def _generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop: Sequence[str],
        max_tokens: int | None,
        ignore_eos: bool,
        *,
        continues: bool,
        harmony: bool = False,
    ) -> Generator[Chunk, None, None]:
        """The chunks of an answer; arguments are checked at the call, not at the first chunk."""
        if not prompt:
            raise UsageError("the prompt has no tokens", expected="at least one")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UsageError("max_tokens", expected="an integer from 1", found=repr(max_tokens))
        shifts = self._answers.context_shift
        if not shifts:
            self._model.check_fits(len(prompt) + 1)
        prompt = self._model.token_ids(prompt).tolist()
        tokenizer = text = None
        eos: frozenset[int] = frozenset()
        if not ignore_eos or stop or sampling.logprobs or (self.path / "tokenizer.json").is_file():
            tokenizer = self.tokenizer
            eos = frozenset() if ignore_eos else tokenizer.eos_token_ids
            shown = tokenizer.control_tokens(MARKS) if harmony else ()
            stream = TextStream(tokenizer, stop, eos, continues=continues, shown=shown)
            text = HarmonyText(stream) if harmony else stream
        room = sys.maxsize if shifts else self.context_length - len(prompt)
        sampling.check_bias(self.vocab_size)
        request = Request(
            prompt, min(max_tokens or room, room), sampling, stop_ids=eos, logprobs=sampling.logprobs or None,
            adapter=self._model.adapter,
        )  # fmt: skip
        kept = without_dropped(prompt, tokens_to_drop(len(prompt), self.context_length))
        generation = Generation(self.manifest, len(kept), text, tokenizer, self.load_s)
        return generation.chunks(self._steps(self._answers.answer(request, None)))

    def _steps(self, answer: Answer) -> Generator[list[TokenEvent], None, None]:
        """The events of each step of an answer, which whoever reads one computes for all answers in progress."""
        stream = answer.stream
        try:
            with self._turn():
                self._answers.begin(answer)
            while True:
                while not stream.pending:
                    with self._turn():
                        if not stream.pending and not self._answers.step():
                            time.sleep(_HELD_S)
                events = stream.take()
                yield events
                if events[-1].finish_reason is not None:
                    return
        finally:  # also where the garbage collector ends it, in the middle of a step
            self._ended.append(stream.id)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Inside, no other thread uses the model. A thread whose turn an exception left open may enter again."""
        me = threading.get_ident()
        with self._turns:
            while self._in_turn not in (0, me):
                self._turns.wait()
            self._in_turn = me
        try:
            while self._ended:
                self._answers.cancel(self._ended.popleft())
            yield
        finally:
            with self._turns:
                self._in_turn = 0
                self._turns.notify_all()
