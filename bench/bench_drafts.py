"""Measures what drafts of answers gain: with and without them in turn, a drafter that knows the answer and errs.

    python -m bench.bench_drafts [--model llama-1b] [--quantization q4f16_1] [--rate 0.7] [--batches 1,2,8]
    python -m bench.bench_drafts --draft-model llama-100m
    python -m bench.bench_drafts --draft-head eagle
    python -m bench.bench_drafts --checkpoint FOLDER --head FOLDER --questions FILE

Each drafted token is right with probability `--rate`. A draft model or head computes as usual, and its tokens are
replaced.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.make_draft_head import KINDS, make_draft_head
from bench.prepare import default_work
from mlcpipe import Engine
from mlcpipe.bundle.memory import many_sequences
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving.core import GREEDY, Core
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.draft_heads import DraftHeads
from mlcpipe.runtime.serving.draft_model import DraftModel, DraftSource, ModelDrafter
from mlcpipe.runtime.serving.drafting import MOST_DRAFTED, Draft, Lookup
from mlcpipe.runtime.serving.eagle import EagleDraft
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.sequence import ScheduledRequest

_PROMPT, _ANSWER, _ROUNDS = 128, 192, 5


class Oracle:
    """Knows the answer; each token of a draft is right with probability `rate`."""

    def __init__(self, rate: float) -> None:
        self.answer: Sequence[int] = ()
        self._rate, self._draw = rate, random.Random(0)

    def propose(self, tokens: Sequence[int]) -> Draft:
        """The next tokens of the answer, some of them changed."""
        known = self.answer[len(tokens) : len(tokens) + MOST_DRAFTED]
        return Draft([token if self._draw.random() < self._rate else token ^ 1 for token in known], self._rate)

    def checked(self, drafted: int, right: int) -> None:
        """Nothing to learn."""


class ModelOracle(ModelDrafter):
    """Drafts the oracle's tokens after the model has computed as many."""

    def __init__(self, model: DraftSource, rate: float) -> None:
        super().__init__(model, Lookup(), GREEDY)
        self.oracle = Oracle(rate)

    def hold(self, tokens: list[int], length: int) -> None:
        """As many of the oracle's, after `length` tokens."""
        super().hold(self.oracle.propose(range(length)).tokens[: len(tokens)], length)


def answers(
    core: Core,
    prompts: list[tuple[int, ...]],
    oracles: Sequence[Oracle | ModelOracle | None],
    model: DraftSource | None = None,
) -> tuple[float, list[list[int]]]:
    """Tokens per second while all are running, and the answers."""
    sequences = [
        core.scheduler.submit(ScheduledRequest(prompt, _ANSWER, params=GREEDY, drafter=oracle))
        for prompt, oracle in zip(prompts, oracles)
    ]
    running, spans = core.scheduler.admission.running, []
    while core.scheduler.has_work:
        together, began = len(running) == len(sequences), time.perf_counter()
        if model is not None:
            model.propose(core.scheduler)
        step = core.scheduler.plan(time.perf_counter())
        assert step is not None
        events = core.scheduler.settle(step, core.compute(step), time.perf_counter())
        if together and len(running) == len(sequences):
            spans.append((sum(len(event.tokens) for event in events), time.perf_counter() - began))
    tokens, seconds = map(sum, zip(*spans))
    return tokens / seconds, [one.tokens for one in sequences]


def measure(core: Core, model: DraftSource | None, batch: int, rate: float) -> tuple[float, float, float, float]:
    """Median tokens per second without and with drafts and of their ratio in turn; the acceptance rate."""
    rng = random.Random(batch)
    vocab = core.bundle.manifest.model.vocab_size
    prompts = [tuple(rng.randrange(1, vocab) for _ in range(_PROMPT)) for _ in range(batch)]
    plain, drafted = [], []
    before = core.scheduler.totals.drafted, core.scheduler.totals.accepted
    for _ in range(_ROUNDS + 1):
        speed, expected = answers(core, prompts, [None] * batch)
        plain.append(speed)
        oracles = [Oracle(rate) if model is None else ModelOracle(model, rate) for _ in prompts]
        for oracle, answer in zip(oracles, expected):
            (oracle.oracle if isinstance(oracle, ModelOracle) else oracle).answer = answer
        speed, found = answers(core, prompts, oracles, model)
        drafted.append(speed)
        if found != expected:
            raise AssertionError("a draft changed an answer")
    totals = core.scheduler.totals
    stood = (totals.accepted - before[1]) / max(1, totals.drafted - before[0])
    ratio = statistics.median(with_drafts / without for without, with_drafts in zip(plain[1:], drafted[1:]))
    return statistics.median(plain[1:]), statistics.median(drafted[1:]), ratio, stood


class _Off:
    """Proposes nothing."""

    def propose(self, tokens: Sequence[int]) -> Draft:
        """No tokens."""
        return Draft([], 0.0)

    def checked(self, drafted: int, right: int) -> None:
        """Nothing was checked."""


def compare(engine: Engine, questions: Sequence[str], batch: int) -> Iterator[tuple[str, float, float]]:
    """For drafts by lookup and by the bundle's head: tokens per second relative to none, and the acceptance rate."""
    core = Core(
        engine.model.bundle,
        many_sequences(engine.manifest, engine.context_length, batch * 512),
        Limits(512, sequences=batch, queue=batch),
        CostModel(),
    )
    source, totals = _source(core, None, batch), core.scheduler.totals
    assert source is not None
    made: dict[str, Callable[[], Any]] = {
        "none": _Off, "lookup": Lookup, "head": lambda: ModelDrafter(source, Lookup(), GREEDY)
    }  # fmt: skip
    prompts = [tuple(engine.tokenizer.encode_chat([{"role": "user", "content": one}])) for one in questions]
    speeds: dict[str, list[float]] = {name: [] for name in made}
    counts = {name: [0, 0] for name in made}
    for _ in range(_ROUNDS + 1):
        for begin in range(0, len(prompts) - batch + 1, batch):
            expected = None
            for name, drafter in made.items():
                before = totals.drafted, totals.accepted
                speed, found = answers(core, prompts[begin : begin + batch], [drafter() for _ in range(batch)], source)
                if found != (expected := expected or found):
                    raise AssertionError("a draft changed an answer")
                speeds[name].append(speed)
                counts[name][0] += totals.drafted - before[0]
                counts[name][1] += totals.accepted - before[1]
    skip = len(prompts) // batch  # the first round
    for name in ("lookup", "head"):
        ratios = [one / none for one, none in zip(speeds[name][skip:], speeds["none"][skip:])]
        yield name, statistics.median(ratios), counts[name][1] / max(1, counts[name][0])


def _load(name: str, options: argparse.Namespace, kind: str | None = None) -> LoadedBundle:
    checkpoint, head = options.work / name, options.work / f"{name}-{kind}"
    if not checkpoint.is_dir():
        make_checkpoint(name, checkpoint)
    if kind and not head.is_dir():
        make_draft_head(kind, name, head)
    given = str(head) if kind else None
    return load_bundle(
        prepare_bundle(str(checkpoint), target="cpu", quantization=options.quantization, draft_head=given), 512
    )


def _source(core: Core, smaller: LoadedBundle | None, batch: int) -> DraftSource | None:
    """The drafter for `core`: a model, or the bundle's head."""
    model = core.bundle.manifest.model
    if smaller is not None:
        return DraftModel(smaller, batch * 512, batch)
    if model.eagle is not None:
        return EagleDraft(core, batch * 512)
    return DraftHeads(core) if model.draft_heads else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--draft-model", choices=SHAPES, help="whose time counts, too (default: none)")
    parser.add_argument("--draft-head", choices=KINDS, help="whose time counts, too (default: none)")
    parser.add_argument("--work", type=Path, default=default_work(), help="folder that keeps checkpoints")
    parser.add_argument("--quantization", default="q4f16_1")
    parser.add_argument("--rate", type=float, default=0.7)
    parser.add_argument("--batches", default="1,2,8")
    parser.add_argument("--checkpoint", help="beside --head and --questions: drafts of a trained head, as they are")
    parser.add_argument("--head", help="its folder")
    parser.add_argument("--questions", type=Path, help="a text with one in a line")
    options = parser.parse_args(arguments)
    if options.checkpoint:
        made = prepare_bundle(
            options.checkpoint, target="cpu", quantization=options.quantization, draft_head=options.head
        )
        table, questions = (
            Table("answers", "drafts", "beside none", "stood"),
            options.questions.read_text().splitlines(),
        )
        for batch in map(int, options.batches.split(",")):
            for name, ratio, stood in compare(Engine(made), questions, batch):
                table.add_row(str(batch), name, f"{ratio:.2f}", f"{stood:.0%}")
        stdout_console().print(table)
        return 0
    bundle = _load(options.model, options, options.draft_head)
    smaller = options.draft_model and _load(options.draft_model, options)
    table = Table("answers", "tokens/s without", "with drafts", "ratio", "drafted tokens that stood")
    for batch in map(int, options.batches.split(",")):
        core = Core(
            bundle,
            many_sequences(bundle.manifest, bundle.context_length, batch * 512),
            Limits(512, sequences=batch, queue=batch),
            CostModel(),
        )
        plain, drafted, ratio, stood = measure(core, _source(core, smaller, batch), batch, options.rate)
        table.add_row(str(batch), f"{plain:.1f}", f"{drafted:.1f}", f"{ratio:.2f}", f"{stood:.0%}")
    stdout_console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
