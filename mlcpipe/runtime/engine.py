"""The generation loop: tokenize, prefill what the cache lacks, decode and sample, detokenize."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest
from mlcpipe.checkpoint.json_files import read_json_object
from mlcpipe.errors import BundleError, UsageError
from mlcpipe.progress import Progress, SilentProgress
from mlcpipe.runtime import tvm_runtime
from mlcpipe.runtime.library import Library
from mlcpipe.runtime.sampler import Sampler
from mlcpipe.runtime.sampling_params import Chunk, Completion, SamplingParams, Stats, TokenLogprob
from mlcpipe.runtime.streaming import TextStream
from mlcpipe.runtime.tokenizer import Tokenizer

_MAX_CONFIG_BYTES = 16 << 20
Message = Mapping[str, Any]


class Engine:
    """One bundle, one conversation at a time.

    The KV cache is kept between calls: a prompt that begins like the previous one (the next turn of a chat) only
    computes what is new. Not safe for use by two threads at once.

    Args:
        bundle: folder that `mlcpipe.compile` made.
        context_length: tokens to serve; None is what the bundle allows and memory has room for.
        threads: threads of the kernels; None is MLCPIPE_THREADS or the physical cores.
        device: of a bundle for Vulkan, `vulkan:0` and so on; None is the best, a discrete GPU before an integrated one.
        progress: is told what loading onto a device does, and how many bytes of the weights it has copied.

    Raises BundleError, TargetError or ResourceError in words.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        device: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.path = Path(bundle)
        self._library = Library(self.path, context_length, threads, device, progress or SilentProgress())
        self._cached: list[int] = []  # tokens of the KV cache; empty also where an interrupt left it unknown
        self._measured: list[int] | None = None  # the sequence of `decode`
        self._greedy: Sampler | None = None  # of `prefill` and `decode`
        self._tokenizer: Tokenizer | None = None

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._library.manifest

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self._library.context_length

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.manifest.model.vocab_size

    @property
    def threads(self) -> int:
        """Threads of the kernels."""
        return self._library.threads

    @property
    def device(self) -> str:
        """Where the kernels run, for people: "CPU", or a GPU with its number, name, driver and kind."""
        return self._library.place.title

    @property
    def on_host(self) -> bool:
        """Whether that is the CPU."""
        return self._library.on_host

    @property
    def variant(self) -> str:
        """Which variant of the kernels runs: the best for this CPU, or what MLCPIPE_CPU_VARIANT asks for."""
        return self._library.variant.name

    @property
    def load_s(self) -> float:
        """Seconds that opening the bundle took."""
        return self._library.load_s

    @property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises TokenizerError for a bundle of a checkpoint that had none."""
        if self._tokenizer is None:
            config, generation = (
                read_json_object(path, limit=_MAX_CONFIG_BYTES, error=BundleError) if path.is_file() else {}
                for path in (self.path / "config.json", self.path / "generation_config.json")
            )
            self._tokenizer = Tokenizer.load(self.path, generation_config=generation, config=config)
            tvm_runtime.trim()  # with 128,000 tokens reading it takes 80 MiB more than it holds
        return self._tokenizer

    def reset(self) -> None:
        """Forget the conversation."""
        self._library.clear()
        self._cached = []

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        stream: Literal[False] = ...,
    ) -> Completion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        stream: Literal[True],
    ) -> Generator[Chunk, None, None]: ...

    def chat(
        self,
        messages: Sequence[Message],
        *,
        sampling: SamplingParams = SamplingParams(),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        stream: bool = False,
    ) -> Completion | Generator[Chunk, None, None]:
        """Answer a conversation: messages {"role", "content"}, through the checkpoint's chat template.

        `stream=True` gives chunks as they come; the last has `finish_reason` and `stats`.
        Raises TemplateError, UsageError (context full).
        """
        prompt = self.tokenizer.chat_template().render(list(messages), add_generation_prompt=True)
        tokens = self.tokenizer.encode(prompt)
        chunks = self._generate(tokens, sampling, stop, max_tokens, False, continues=False)
        return chunks if stream else _complete(chunks)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams = ...,
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
        sampling: SamplingParams = ...,
        stop: Sequence[str] = ...,
        max_tokens: int | None = ...,
        ignore_eos: bool = ...,
        stream: Literal[True],
    ) -> Generator[Chunk, None, None]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams = SamplingParams(),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        stream: bool = False,
    ) -> Completion | Generator[Chunk, None, None]:
        """Continue raw text or token ids, without a chat template. `ignore_eos` goes on to `max_tokens`."""
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        chunks = self._generate(tokens, sampling, stop, max_tokens, ignore_eos, continues=True)
        return chunks if stream else _complete(chunks)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits f32[len(tokens), vocab_size] after each token of a new sequence.

        They are memory besides what was counted when the bundle was opened, and up to 64 MiB more while this runs.
        """
        self._check_room(len(tokens))
        self.reset()
        self._library.set_prompt_length(len(tokens))
        try:
            return self._library.all_logits(tokens)
        finally:
            self._library.set_prompt_length(0)
            self.reset()

    def logits_stepwise(self, tokens: Sequence[int], *, prefill_tokens: int) -> NDArray[np.float32]:
        """Logits f32[len(tokens) - prefill_tokens + 1, vocab_size]: a prefill, then one decode step a token."""
        self.reset()
        read = self._library.read
        rows = [read(self._extend(list(tokens[:prefill_tokens])))[0, 0].copy()]
        for token in tokens[prefill_tokens:]:
            rows.append(read(self._append(self._cached, token, None))[0, 0].copy())
        self.reset()
        return np.stack(rows)

    def prefill(self, tokens: Sequence[int]) -> int:
        """Append tokens to the sequence -> the most probable next token. For measurements; see `generate`."""
        return self._best.next(self._extend([*self._cached, *tokens]))

    def decode(self, token: int) -> int:
        """Append one token -> the most probable next one. For measurements."""
        self._library.token_ids([token])
        if self._cached is not self._measured:
            self._cached = self._measured = list(self._cached)  # it may be the list of a generation that goes on
        return self._best.next(self._append(self._cached, token, self._best))

    @property
    def _best(self) -> Sampler:
        """The compiled sampler of the most probable token."""
        if self._greedy is None:
            self._greedy = Sampler(self._library, SamplingParams(temperature=0.0), ())
        return self._greedy

    def _extend(self, tokens: list[int]) -> Any:
        """Make the cache hold `tokens` -> logits of the last one, computing as little as possible.

        Keeps the list itself: whoever calls changes it by `_append` only.
        """
        self._check_room(len(tokens))
        library, shared = self._library, self._reusable(tokens)
        held, self._cached = self._cached, []  # an interrupt from here on leaves nothing to build on
        if shared:
            library.pop(len(held) - shared)
        else:
            library.clear()
        fresh = tokens[shared:]
        library.set_prompt_length(len(tokens))
        logits = library.decode(fresh[0]) if len(fresh) == 1 and shared else library.prefill(fresh)
        self._cached = tokens
        return logits

    def _append(self, tokens: list[int], token: int, sampler: Sampler | None) -> Any:
        """One decode step after `tokens`, to which `token` is added -> its logits, for `sampler`.

        The cache holds `tokens` already, unless the engine did something else since: then they are computed again.
        """
        self._check_room(len(tokens) + 1)
        current = self._cached is tokens
        if current:
            self._cached = []  # until the step is done
        crosses = len(tokens) == self.manifest.model.recompute_above
        tokens.append(token)
        if not current or crosses or len(tokens) == 1:
            return self._extend(tokens)
        self._library.set_prompt_length(len(tokens))
        logits = self._library.decode(token, sampler)
        self._cached = tokens
        return logits

    def _reusable(self, tokens: list[int]) -> int:
        """How many tokens at the start of `tokens` the cache holds; never all, as the last one gives the logits."""
        limit = self.manifest.model.recompute_above
        if limit is not None and (len(tokens) > limit) != (len(self._cached) > limit):
            return 0  # keys in the cache have the frequencies of the other side of the limit
        return min(_common_prefix(self._cached, tokens), len(tokens) - 1)

    def _check_room(self, count: int) -> None:
        if count > self.context_length:
            raise UsageError(
                "the context is full",
                expected=f"at most {self.context_length} tokens",
                found=count,
                next_step="start a new conversation, or load with a larger context",
            )

    def _generate(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop: Sequence[str],
        max_tokens: int | None,
        ignore_eos: bool,
        *,
        continues: bool,
    ) -> Generator[Chunk, None, None]:
        if not prompt:
            raise UsageError("the prompt has no tokens", expected="at least one")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise UsageError("max_tokens", expected="an integer from 1", found=repr(max_tokens))
        if len(prompt) >= self.context_length:
            raise UsageError(
                "the prompt does not fit the context",
                expected=f"fewer than {self.context_length} tokens",
                found=len(prompt),
                next_step="shorten it, start a new conversation, or load with a larger context",
            )
        self._library.token_ids(prompt)
        limit = min(max_tokens or self.context_length, self.context_length - len(prompt))
        text_of = None
        if not ignore_eos or stop or sampling.logprobs or (self.path / "tokenizer.json").is_file():
            eos = frozenset() if ignore_eos else self.tokenizer.eos_token_ids
            text_of = TextStream(self.tokenizer, stop, eos, continues=continues)
        return self._stream(prompt, sampling, Sampler(self._library, sampling, prompt), text_of, limit)

    def _stream(
        self, prompt: list[int], sampling: SamplingParams, sampler: Sampler, text_of: TextStream | None, limit: int
    ) -> Generator[Chunk, None, None]:
        began = time.perf_counter()
        tokens = list(prompt)
        cached = self._reusable(tokens)
        logits = self._extend(tokens)
        token, count = sampler.next(logits), 1  # which waits for what a device still computes
        prefill_s, decode_s, decode_bytes = time.perf_counter() - began, 0.0, 0
        while True:
            began = time.perf_counter()
            logprobs = [sampler.logprob(logits, token, self.tokenizer)] if sampling.logprobs else None
            text = text_of.push(token) if text_of is not None else ""
            done = "stop" if text_of is not None and text_of.stopped else "length" if count == limit else None
            decode_s += time.perf_counter() - began  # without the time that the caller takes between chunks
            if done is not None:
                text += text_of.flush() if text_of is not None else ""
                stats = Stats(
                    prompt_tokens=len(prompt),
                    cached_tokens=cached,
                    completion_tokens=count,
                    prefill_s=prefill_s,
                    decode_s=decode_s,
                    load_s=self.load_s,
                    decode_bytes=decode_bytes,
                )
                yield Chunk(text, [token], logprobs, done, stats)
                return
            yield Chunk(text, [token], logprobs)
            began = time.perf_counter()
            logits = self._append(tokens, token, sampler)
            token, count = sampler.next(logits), count + 1
            decode_s += time.perf_counter() - began
            decode_bytes += self._library.decode_bytes()


def _common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens with which both begin."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i in range(n) if one[i] != other[i])


def _complete(chunks: Iterator[Chunk]) -> Completion:
    """All chunks of an answer as one."""
    parts = list(chunks)
    last = parts[-1]
    assert last.stats is not None and last.finish_reason is not None
    logprobs: list[TokenLogprob] | None = [p for c in parts for p in c.logprobs or []] or None
    tokens = [token for c in parts for token in c.token_ids]
    return Completion("".join(c.text for c in parts), tokens, last.finish_reason, logprobs, last.stats)
