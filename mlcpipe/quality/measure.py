"""Measures a bundle against its reference on a text: both compute the same windows side by side.

The text is cut into windows of 512 tokens, as llama-perplexity does: the first half of each is context, the second half
is scored, and each begins with BOS if the tokenizer adds one. At most 64 MiB of logits of either model exist at a time.
Prefill computes a window at once; decode computes its second half token by token.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle import Manifest, read_manifest, write_manifest
from mlcpipe.bundle.memory import one_sequence, running_bytes
from mlcpipe.bundle.origin import SIGNATURE, accept, origin_of
from mlcpipe.bundle.quality import QualityInfo
from mlcpipe.errors import ComputeError, ResourceError, UsageError
from mlcpipe.host.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.quality.reference import SCHEMES
from mlcpipe.quality.statistics import Scores, compare, score
from mlcpipe.runtime.engine import Engine
from mlcpipe.runtime.model import LoadedModel
from mlcpipe.support.defaults import QUALITY_DECODE_TOKENS, QUALITY_TOKENS
from mlcpipe.support.files import read_utf8, text_hash
from mlcpipe.support.progress import Progress

OWN_TEXT = Path(__file__).with_name("text.txt")
"""The text that is measured on where no other is given: prose of mlcpipe's documentation of 2026-11-23."""
WINDOW = 512
_MIN_TOKENS = 3  # one of context, one that counts, and its successor
_MAX_TEXT_BYTES = 256 << 20
_CHARACTERS = 16  # of the text per wanted token, as a first guess
_SCRATCH_BYTES = 512 << 20  # logits of both models, and copies of some rows in float64


@dataclass(frozen=True)
class QualityOptions:
    """What to measure: `tokens` of the text in prefill, the first `decode_tokens` of them in decode too.

    `reference` is a bundle, as `prepare_reference` gives; `threads` and `device` are those of Engine.
    """

    bundle: Path
    reference: Path
    text: Path = OWN_TEXT
    tokens: int = QUALITY_TOKENS
    decode_tokens: int = QUALITY_DECODE_TOKENS
    threads: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Report:
    """`decode_tok_s` and `share` (of the memory's read bandwidth) hold for this machine; None if it means nothing."""

    quality: QualityInfo
    bundle_bytes: int
    decode_tok_s: float
    share: float | None
    notes: tuple[str, ...]


def measure(opts: QualityOptions, progress: Progress) -> Report:
    """Raises UsageError (unsuitable text or vocabulary), ResourceError, ComputeError (NaN) and what Engine raises."""
    text = read_text(opts.text)
    engine, reference, tokens, windows = _open(opts, text, progress)
    own, other = engine.manifest, reference.manifest
    some = windows[: max(1, opts.decode_tokens // len(windows[0]))]
    pair = _Pair(engine.model, reference.model)
    prefill = _over(windows, pair.prefill, "prefill", progress)
    decode = _over(some, pair.decode, "decode", progress)
    step_s = statistics.median(pair.step_s)
    quality = QualityInfo(
        reference=other.name or opts.reference.name,
        reference_hash=other.checkpoint_hash,
        reference_quantization=other.quantization,
        text="mlcpipe's documentation" if opts.text == OWN_TEXT else ascii(opts.text.name)[1:-1],
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        window=len(windows[0]),
        variant=engine.variant,
        bits_per_weight=8 * own.memory_plan.stored_bytes / _numbers(other),
        prefill=compare(prefill),
        decode=compare(decode),
    )
    return Report(
        quality,
        sum(info.bytes for info in own.files.values()),
        1 / step_s,
        _share(engine, step_s, 3 * len(windows[0]) // 4),
        tuple(_notes(opts, tokens, windows, len(some))),
    )


def score_prefill(opts: QualityOptions, progress: Progress) -> Scores:
    """The scores of every position in prefill, so that bundles can be compared position by position.

    Raises what `measure` raises.
    """
    engine, reference, _, windows = _open(opts, read_text(opts.text), progress)
    return _over(windows, _Pair(engine.model, reference.model).prefill, "prefill", progress)


def score_decode(opts: QualityOptions, progress: Progress) -> Scores:
    """The same in decode, of the first `decode_tokens`."""
    engine, reference, _, windows = _open(opts, read_text(opts.text), progress)
    some = windows[: max(1, opts.decode_tokens // len(windows[0]))]
    return _over(some, _Pair(engine.model, reference.model).decode, "decode", progress)


def _open(opts: QualityOptions, text: str, progress: Progress) -> tuple[Engine, Engine, int, list[list[int]]]:
    """Bundle, reference, the number of tokens and their windows."""
    own, other = (read_manifest(path) for path in (opts.bundle, opts.reference))
    window = min(WINDOW, own.model.context_length, other.model.context_length)
    _check_pair(own, other, window)
    for manifest, whose in ((own, "bundle"), (other, "reference")):
        if text_hash(text) in manifest.fitted_to:
            raise UsageError(
                f"the {whose}'s weights were fitted to this text", where=opts.text,
                next_step="measure on another --text",
            )  # fmt: skip
    progress.stage("load")
    engine = Engine(opts.bundle, context_length=window, threads=opts.threads, device=opts.device, progress=progress)
    reference = Engine(opts.reference, context_length=window, threads=opts.threads)
    tokens, bos = _tokens(engine, reference, text, opts.tokens)
    return engine, reference, len(tokens), _windows(tokens, bos, window)


def record(bundle: Path, measured: Manifest, quality: QualityInfo) -> str | None:
    """Write the result into the manifest of the bundle that was measured -> None, or why it was not written.

    A bundle that was accepted or compiled here stays accepted.
    """
    if (bundle / SIGNATURE).exists():
        return "the bundle is signed, so its manifest stays as it is: measure before you sign"
    if read_manifest(bundle) != measured:
        return "the bundle changed while it was measured, so the result is not written"
    known = origin_of(bundle).accepted
    write_manifest(bundle, measured.model_copy(update={"quality": quality}))
    if known:
        accept(bundle)
    return None


class _Pair:
    """A model and its reference; `step_s` are the seconds of the decode steps so far."""

    def __init__(self, model: LoadedModel, reference: LoadedModel) -> None:
        self._model, self._reference = model, reference
        self._rows = min(model.max_logit_rows, reference.max_logit_rows)
        self.step_s: list[float] = []

    def prefill(self, tokens: list[int]) -> Iterator[Scores]:
        """The scores of the second half of a window."""
        first = len(tokens) // 2
        parts = (model.logit_parts(tokens[:-1], first, self._rows) for model in (self._model, self._reference))
        for logits, expected in zip(*parts, strict=True):
            following = tokens[first + 1 : first + 1 + len(logits)]
            yield _score(logits, expected, following)
            first += len(logits)

    def decode(self, tokens: list[int]) -> Iterator[Scores]:
        """The same, computed by the bundle token by token."""
        at = len(tokens) // 2
        self._model.reset()
        self._model.prefill(tokens[:at], None)
        for expected in self._reference.logit_parts(tokens[:-1], at, self._rows):
            for own_expected in expected:
                began = time.perf_counter()
                self._model.step(tokens[at], None)
                logits = self._model.read_logits()  # waits for the device
                self.step_s.append(time.perf_counter() - began)
                at += 1
                yield _score(logits[None], own_expected[None], [tokens[at]])


def _score(logits: NDArray[np.float32], expected: NDArray[np.float32], following: list[int]) -> Scores:
    for numbers, whose in ((logits, "bundle"), (expected, "reference")):
        if not np.isfinite([numbers.max(), numbers.min()]).all():  # NaN is both
            raise ComputeError(
                f"the {whose} computed logits that are not finite", next_step="`mlcpipe chat` names the weight or layer"
            )
    return score(logits, expected, np.array(following))


def _over(
    windows: list[list[int]], scored: Callable[[list[int]], Iterator[Scores]], kind: str, progress: Progress
) -> Scores:
    """The scores of all windows."""
    parts = []
    progress.stage(f"score {kind}, tokens")
    progress.steps_total(sum(len(tokens) - 1 - len(tokens) // 2 for tokens in windows))
    for tokens in windows:
        for scores in scored(tokens):
            parts.append(scores)
            progress.advance(len(scores.nll))
    return Scores.joined(parts)


def read_text(path: Path) -> str:
    """A text to measure on. Raises UsageError."""
    return read_utf8(path, _MAX_TEXT_BYTES, UsageError, "text")


def _check_pair(own: Manifest, reference: Manifest, window: int) -> None:
    """Raises UsageError for another vocabulary, ResourceError if both models do not fit into memory."""
    if own.model.vocab_size != reference.model.vocab_size:
        raise _other_vocabulary(f"{own.model.vocab_size} tokens", f"{reference.model.vocab_size}")
    need = _SCRATCH_BYTES + sum(
        one.memory_plan.weights_bytes + running_bytes(one) + one_sequence(one, window).nbytes(one.states)
        for one in (own, reference)
    )
    if need > (free := free_memory()).nbytes:
        raise ResourceError(
            "not enough memory for bundle and reference together",
            expected=f"{byte_size(need)} free, {byte_size(reference.memory_plan.weights_bytes)} of them for the "
            f"reference in {reference.quantization}",
            found=free,
            next_step="close other programs, or measure on a larger machine",
        )


def _other_vocabulary(expected: object, found: object) -> UsageError:
    return UsageError(
        "the reference has another vocabulary", expected=expected, found=found,
        next_step="give the checkpoint that the bundle was compiled from",
    )  # fmt: skip


def _tokens(engine: Engine, reference: Engine, text: str, most: int) -> tuple[list[int], int | None]:
    """The first `most` tokens of the text, or all, and BOS if the tokenizer puts it first.

    Encodes no more of a long text than needed. Raises UsageError for a text that is too short.
    """
    characters = _CHARACTERS * most
    while len(own := _encoded(engine, text[:characters])) <= most and characters < len(text):
        characters *= 2
    other = _encoded(reference, text[:characters])
    if own != other:
        at = next((i for i, pair in enumerate(zip(own, other)) if pair[0] != pair[1]), min(len(own), len(other)))
        raise _other_vocabulary(f"the bundle's tokens of the text, {len(own)}", f"others from token {at} on")
    if (count := min(len(own), most)) < _MIN_TOKENS:
        what = "the text is too short" if most >= _MIN_TOKENS else "--tokens"
        raise UsageError(what, expected=f"at least {_MIN_TOKENS} tokens", found=count)
    bos = engine.tokenizer.bos_token_id
    return own[:most], bos if own[0] == bos else None


def _encoded(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode(text, add_special_tokens=True)


def _windows(tokens: list[int], bos: int | None, window: int) -> list[list[int]]:
    """Whole windows of the tokens, or one shorter window."""
    size = min(window, len(tokens))
    windows = [tokens[begin : begin + size] for begin in range(0, len(tokens) - size + 1, size)]
    return windows if bos is None else [[bos, *one[1:]] for one in windows]


def _numbers(reference: Manifest) -> int:
    """Weights of a model, from its unquantized bundle."""
    return reference.memory_plan.weights_bytes // SCHEMES[reference.quantization]


def _share(engine: Engine, step_s: float, length: int) -> float | None:
    """Share of the read bandwidth; None for devices, and for weights that fit the cache."""
    plan = engine.manifest.memory_plan
    if not engine.on_host or plan.weights_read < last_cache_bytes():
        return None
    moved = plan.weights_read + length * engine.manifest.kv_bytes_per_token
    return moved / step_s / 1e9 / read_bandwidth_gb_s(engine.threads)


def _notes(opts: QualityOptions, tokens: int, windows: list[list[int]], decoded: int) -> Iterator[str]:
    size, half = len(windows[0]), len(windows[0]) // 2
    if tokens < opts.tokens:
        yield f"the text has {tokens} tokens, fewer than the {opts.tokens} of --tokens"
    used, first = len(windows) * size, decoded * size
    yield f"{used} tokens in windows of {size}, the first {half} of each as context; decode: the first {first}"
