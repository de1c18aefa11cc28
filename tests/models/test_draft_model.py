"""Drafts by another model: no answer changes by them, whatever they say, and pages come back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from mlcpipe import SamplingParams
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving import draft_model
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.cost_model import CostModel, Load
from mlcpipe.runtime.serving.draft_model import DraftModel, check_pair
from mlcpipe.runtime.serving.drafting import Search
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.step import Step
from mlcpipe.runtime.text.tokenizer import Tokenizer
from tests.conftest import Bundles

CONTEXT = 256


@pytest.fixture(scope="module")
def bundle(demo_bundles: Bundles) -> LoadedBundle:
    return load_bundle(demo_bundles["q4f16_1"], CONTEXT, 2)


@contextmanager
def engine(bundle: LoadedBundle, draft: LoadedBundle | None, kv_tokens: int = 8 * CONTEXT) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=kv_tokens, max_sequences=8, draft_model=draft)
    try:
        yield made
    finally:
        made.close()


def requests(count: int, vocab: int, tokens: int = 40) -> list[Request]:
    """Greedy ones, and others that draw, with penalties and without; prompts up to several chunks."""
    rng = random.Random(count)
    sampling = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, seed=5),
    )
    return [
        Request([rng.randrange(3, vocab) for _ in range(rng.choice([3, 20, 150]))], tokens, sampling[index % 3])
        for index in range(count)
    ]


def answers(made: Batching, asked: list[Request]) -> list[list[int | None]]:
    with made.together:
        streams = [made.submit(request) for request in asked]
    return [[event.token for event in stream] for stream in streams]


def wrong(share: float) -> Callable[[DraftModel, Step], list[int]]:
    """`DraftModel._compute` that errs in so many of its tokens."""
    compute, rng = DraftModel._compute, random.Random(0)
    return lambda self, step: [token ^ (rng.random() < share) for token in compute(self, step)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is worth its time or not."""
    monkeypatch.setattr(draft_model, "_TRIALS", 1 << 30)
    monkeypatch.setattr(CostModel, "may_draft", lambda self, load, rows: True)
    monkeypatch.setattr(CostModel, "draft_rows", lambda self, load, gains: len(gains))
    monkeypatch.setattr(Search, "pays", lambda self: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_answers_are_the_same(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch, share: float, count: int) -> None:
    """The model drafts for itself: without errors nearly all stands at any temperature, as both draw with equal numbers.

    What they computed as a prompt, and what as an answer, differs: so do their logits, a little.
    """
    asked = requests(count, bundle.manifest.model.vocab_size)
    with engine(bundle, None) as plain:
        expected = answers(plain, asked)
    monkeypatch.setattr(DraftModel, "_compute", wrong(share))
    with engine(bundle, bundle) as drafting:
        assert answers(drafting, asked) == expected
        assert answers(drafting, asked) == expected  # from prefixes that are there
        stats, model = drafting.stats(), drafting._answers._draft_model
        assert model is not None
        assert stats.drafted > 20 * count
        assert (stats.accepted > 0.8 * stats.drafted) == (share == 0.0)
        assert len(model._followers) <= count
        for one in list(model._followers):
            model._release(one)
        model._pool.invariants([])


@pytest.mark.usefixtures("always")
def test_too_few_pages_are_no_drafts(bundle: LoadedBundle) -> None:
    """Preempted answers get drafts again when they resume."""
    asked = requests(5, bundle.manifest.model.vocab_size)
    with engine(bundle, None) as plain:
        expected = answers(plain, asked)
    with engine(bundle, bundle, kv_tokens=CONTEXT) as drafting:
        assert answers(drafting, asked) == expected
        assert drafting.stats().preemptions > 0 and drafting.stats().drafted > 0


def test_a_draft_model_that_fails_costs_no_answer(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: DraftModel, step: Step) -> list[int]:
        raise RuntimeError("no more")

    asked = requests(2, bundle.manifest.model.vocab_size)
    with engine(bundle, None) as plain:
        expected = answers(plain, asked)
    monkeypatch.setattr(DraftModel, "_compute", fails)
    with engine(bundle, bundle) as drafting, pytest.warns(UserWarning, match="draft model failed.*no more"):
        assert answers(drafting, asked) == expected


@pytest.mark.parametrize(
    ("draft_s", "rate", "expected"), [(1e-3, 0.7, range(2, 9)), (8e-3, 0.7, [0]), (1e-3, 0.05, [0])]
)
def test_the_number_of_tokens_follows_costs_and_rates(draft_s: float, rate: float, expected: list[int]) -> None:
    costs = CostModel((9e-3, 1e-3, 0.0, 0.0, 0.0, 0.0), learn=False)
    assert costs.draft_length(Load(decode=1, decode_keys=100), [rate], draft_s, 8) in expected


def test_other_tokens_are_refused(demo_bundles: Bundles) -> None:
    ours, theirs = (
        Tokenizer.load(demo_bundles["q4f16_1"], generation_config={}, config={"vocab_size": 1 << 20}) for _ in range(2)
    )
    check_pair(ours, theirs)
    theirs.library.add_tokens(["another one"])
    with pytest.raises(UsageError, match=r"the draft model.*'another one'"):
        check_pair(ours, theirs)
