"""Texts to embeddings, and scores of documents for a query: one bundle of an encoder."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.model_info import EmbeddingInfo
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.devices.support.threads import interruptible
from mlcpipe.errors import ComputeError, UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.batch import Span, StepBuffer
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from mlcpipe.runtime.serving.sequence import Sequence as Tokens
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.text_pairs import EncodedText, encode_text, too_long
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.support.files import local_path
from mlcpipe.support.progress import Progress, SilentProgress
from tir_schedules.step_layout import PAGE

Floats = NDArray[np.float32]
Text = str | Sequence[int]
_SHORT_TEXTS = 64  # of a step, beyond those whose tokens fill their pages


class Embedder:
    """One bundle of an encoder. A text's embedding does not depend on the texts beside it.

    The arguments are those of `Engine`. Threads may call it together; their steps take turns.

    Raises BundleError, TargetError or ResourceError; UsageError for a bundle of a model that writes text.
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
        path = local_path(bundle)
        if path is None:
            raise UsageError("no folder of a bundle", found=bundle, next_step="compile the model first")
        began = time.perf_counter()
        self.path = path
        self._bundle = load_bundle(path, context_length, threads, device, progress or SilentProgress())
        self._device, model = self._bundle.device, self.manifest.model
        if model.embedding is None:
            raise UsageError("the model embeds no texts", where=path, next_step="load it with mlcpipe.Engine")
        self.info: EmbeddingInfo = model.embedding
        self._pages = -(-model.prefill_chunk // PAGE) + _SHORT_TEXTS
        self._lock = threading.Lock()
        self._step = StepBuffer()
        with self._device.errors():
            handle = self._device.handle
            self._cache = tvm_ffi.convert(
                [
                    tvm_runtime.empty((self._pages, state.unit_items), state.dtype, handle)
                    for state in self.manifest.states
                ]
            )
            self._out = tvm_runtime.empty((model.prefill_chunk, self.info.dimensions), "float32", handle)
        self.load_s = time.perf_counter() - began

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._bundle.manifest

    @property
    def max_tokens(self) -> int:
        """Tokens that a text may have, special ones included."""
        return self._bundle.context_length

    @property
    def device(self) -> str:
        """Where the kernels run, for people."""
        return self._device.description

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises TokenizerError for a bundle of a checkpoint that had none."""
        return open_tokenizer(self.path, decodes=False)

    def embed(
        self,
        texts: Sequence[Text],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate: int | bool | None = None,
    ) -> Floats:
        """Embeddings f32[n, dimensions] of texts, or of lists of token ids, which are taken as they are.

        Args:
            texts: n of them.
            prompt_name: one of the model's prompts to put before each text; None is its default one, "" none.
            dimensions: length of the embeddings, cut and normalized (Matryoshka); None is the model's.
            truncate: cut texts with more tokens than this; True or -1 those with more than `max_tokens`, which None
                and False refuse.

        Raises UsageError, TokenizerError, and ComputeError for a model that computes NaN.
        """
        if isinstance(texts, str):
            raise UsageError("texts", expected="a list of texts", found="a text")
        encoded = [self.encode(text, prompt_name=prompt_name, truncate=truncate) for text in texts]
        return self.finished(self._compute(encoded), dimensions)

    def finished(self, rows: Floats, dimensions: int | None = None) -> Floats:
        """Embeddings of the result of `rows`. Raises UsageError for a cross-encoder, and for too many dimensions."""
        if self.info.task != "embed":
            raise UsageError("the model embeds no texts", expected="scores of documents", next_step="use rerank")
        whole = self.info.dimensions
        if dimensions is not None and not 1 <= dimensions <= whole:
            raise UsageError("dimensions", expected=f"from 1 to {whole}", found=dimensions)
        rows = rows[:, : dimensions or whole]
        if not self.info.normalize and dimensions is None:
            return rows
        lengths = np.sqrt((rows * rows).sum(axis=1, keepdims=True, dtype=np.float32))
        normalized: Floats = rows / np.maximum(lengths, np.float32(1e-12))
        return normalized

    def rerank(self, query: str, documents: Sequence[str], *, truncate: int | bool | None = None) -> Floats:
        """How well each document answers the query, f32[n] from 0 to 1. Raises what `embed` raises."""
        return self.scores(self._compute(self.encode_pairs(query, documents, truncate=truncate)))

    def encode_pairs(
        self, query: str, documents: Sequence[str], *, truncate: int | bool | None = None
    ) -> list[EncodedText]:
        """The query with each document. Raises UsageError for a pair that is too long, and TokenizerError."""
        limit = self._limit(truncate)
        return [self._encoded(query, limit, one) for one in documents]

    def scores(self, rows: Floats) -> Floats:
        """Scores f32[n] of the result of `rows` for pairs. Raises UsageError for a model that is no cross-encoder."""
        if self.info.task != "rerank":
            raise UsageError("the model scores no documents", expected="a cross-encoder", next_step="use embed")
        with np.errstate(over="ignore"):
            scores: Floats = (1 / (1 + np.exp(-rows[:, 0].astype(np.float64)))).astype(np.float32)
        return scores

    def encode(self, text: Text, *, prompt_name: str | None = None, truncate: int | bool | None = None) -> EncodedText:
        """The tokens of a text with its prompt. Raises UsageError for one that is too long, and TokenizerError."""
        limit = self._limit(truncate)
        if not isinstance(text, str):
            return self._checked(list(text), limit)
        prompt = self._prompt(prompt_name)
        found = self._encoded(prompt + text, limit)
        if not prompt or self.info.include_prompt:
            return found
        # As in sentence-transformers: what the prompt has alone, without a special token at its end.
        alone = self._encoded(prompt, self.max_tokens).ids
        ends = bool(alone) and alone[-1] == found.ids[-1] and alone[-1] in self.tokenizer.control_token_ids
        return EncodedText(found.ids, found.types, min(len(alone) - ends, len(found.ids) - 1))

    def _prompt(self, name: str | None) -> str:
        name = self.info.default_prompt or "" if name is None else name
        if name and name not in self.info.prompts:
            expected = ", ".join(sorted(self.info.prompts)) or "none, the model has no prompts"
            raise UsageError("the name of a prompt", expected=expected, found=name)
        return self.info.prompts[name] if name else ""

    def _limit(self, truncate: int | bool | None) -> int | None:
        """The number of tokens to cut texts at; None refuses texts longer than the model takes. Raises UsageError."""
        if truncate is None or truncate is False:
            return None
        if truncate is True or truncate == -1:
            return self.max_tokens
        if not isinstance(truncate, int) or truncate < 1:
            expected = f"True, False, -1, or tokens from 1 to {self.max_tokens}"
            raise UsageError("truncate", expected=expected, found=repr(truncate)[:80])
        return min(truncate, self.max_tokens)

    def _encoded(self, text: str, limit: int | None, pair: str | None = None) -> EncodedText:
        return encode_text(self.tokenizer, text, limit or self.max_tokens, pair, cut=limit is not None)

    def _checked(self, ids: list[int], limit: int | None) -> EncodedText:
        vocab = self.manifest.model.vocab_size
        if not ids or not all(type(one) is int and 0 <= one < vocab for one in ids):
            raise UsageError("token ids", expected=f"one or more integers from 0 to {vocab - 1}", found=repr(ids)[:80])
        if len(ids) > self.max_tokens and limit is None:
            raise too_long(len(ids), self.max_tokens)
        ids = ids[: limit or self.max_tokens]
        return EncodedText(ids, [0] * len(ids))

    def _compute(self, texts: Sequence[EncodedText]) -> Floats:
        parts = [self.rows(batch) for batch in self.batches(texts)]
        return np.concatenate(parts) if parts else np.zeros((0, self.info.dimensions), np.float32)

    def rows(self, batch: Sequence[EncodedText]) -> Floats:
        """A row f32[n, width] for each text of one of `batches`, not normalized.

        Raises ComputeError.
        """
        found = np.empty((len(batch), self.info.dimensions), np.float32)
        with self._lock:
            self._embed_batch(batch, found)
        return self._finite(found)

    def token_rows(self, batch: Sequence[EncodedText]) -> Floats:
        """A row f32[t, width] for each of the t tokens of one of `batches`, before pooling, not normalized.

        Raises ComputeError.
        """
        count = sum(len(text.ids) for text in batch)
        with self._lock:
            found = self._hidden(batch, np.arange(count, dtype=np.int32)).copy()
        return self._finite(found)

    def _finite(self, found: Floats) -> Floats:
        """Raises ComputeError for numbers that are not finite."""
        if not np.isfinite(found).all():
            raise ComputeError(
                "the model computed numbers that are not finite", where=str(self.path),
                next_step="get the checkpoint again and compile it",
            )  # fmt: skip
        return found

    def batches(self, texts: Sequence[EncodedText]) -> Iterator[list[EncodedText]]:
        """Batches of texts in order, each as large as a step has rows and pages for."""
        model = self.manifest.model
        batch: list[EncodedText] = []
        rows = pages = 0
        for text in texts:
            own = len(text.ids), -(-len(text.ids) // PAGE)
            if batch and (rows + own[0] > model.prefill_chunk or pages + own[1] > self._pages):
                yield batch
                batch, rows, pages = [], 0, 0
            batch.append(text)
            rows, pages = rows + own[0], pages + own[1]
        if batch:
            yield batch

    def _embed_batch(self, batch: Sequence[EncodedText], out: Floats) -> None:
        """Write the rows of some texts to `out` f32[n, width]."""
        ends = np.cumsum([len(text.ids) for text in batch], dtype=np.int32)
        begins = np.concatenate((np.zeros(1, np.int32), ends[:-1]))
        rows = {"cls": begins, "last": ends - 1}.get(self.info.pooling)
        hidden = self._hidden(batch, np.arange(ends[-1], dtype=np.int32) if rows is None else rows)
        if rows is not None:
            out[:] = hidden
            return
        pool: Any = np.mean if self.info.pooling == "mean" else np.max
        for i, (text, begin, end) in enumerate(zip(batch, begins, ends)):
            pool(hidden[begin + text.skipped : end], axis=0, out=out[i])

    def _hidden(self, batch: Sequence[EncodedText], rows: NDArray[np.int32]) -> Floats:
        """The library's result f32[r, width] for these rows, valid until the next call."""
        device, library = self._device, self._bundle.library
        ids, types = (np.concatenate([np.array(part, np.int32) for part in parts]) for parts in
                      ([text.ids for text in batch], [text.types for text in batch]))  # fmt: skip
        step = self._step.fill(list(_spans(batch)))
        with device.errors(), interruptible(library.module, len(ids)):
            out = tvm_runtime.view(self._out, (len(rows), self.info.dimensions))
            integers = [device.tensor(values) for values in (ids, types, rows, step)]
            library.vm["embed_texts"](*integers, out, self._cache, self._bundle.params)
            return tvm_runtime.array(device.read(out))


def _spans(batch: Sequence[EncodedText]) -> Iterator[Span]:
    """Each text as a sequence whose pages follow those of the one before."""
    page = 0
    for i, text in enumerate(batch):
        count = -(-len(text.ids) // PAGE)
        tokens = Tokens(i, ScheduledRequest(tuple(text.ids), 1), [array("i", range(page, page + count))], [0])
        page += count
        yield Span(tokens, 0, len(text.ids))
