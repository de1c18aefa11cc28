"""What tests of draft heads share: a bundle with a head, and answers that must be those without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mlcpipe
from mlcpipe import SamplingParams
from mlcpipe.bundle.memory import many_sequences
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving import draft_model
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.core import GREEDY, Core
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.draft_model import ModelDrafter
from mlcpipe.runtime.serving.drafting import Lookup, Search
from mlcpipe.runtime.serving.eagle import EagleDraft
from mlcpipe.runtime.serving.interface import Request
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.open_drafts import draft_source
from mlcpipe.runtime.serving.sequence import ScheduledRequest
from tests.conftest import QUICK
from tests.models import tiny

CASE = next(case for case in tiny.family_cases("llama") if case.variant == "default")
VOCAB, CONTEXT = 160, 128


def compiled(checkpoint: Path, head: Path | None, bundle: Path, target: str = QUICK, **options: Any) -> LoadedBundle:
    options = {"quantization": "q0f32", "kv_cache_dtype": "f32", **options}
    made = mlcpipe.compile(checkpoint, target=target, context_length=CONTEXT, draft_head=head, output=bundle, **options)
    return load_bundle(made, CONTEXT, 2)


@contextmanager
def engine(
    bundle: LoadedBundle, drafts: bool = True, kv_tokens: int = 8 * CONTEXT, **options: Any
) -> Iterator[Batching]:
    made = Batching(bundle, kv_tokens=kv_tokens, max_sequences=8, drafts=drafts, **options)
    try:
        yield made
    finally:
        made.close()


def answers(made: Batching, count: int, tokens: int = 40) -> list[list[int | None]]:
    """Greedy ones, and others that draw, with penalties and without."""
    sampling = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=5),
    )
    prompt = tiny.prompt_tokens(CASE, 40)
    with made.together:
        streams = [
            made.submit(Request(prompt[index : index + 20], tokens, sampling[index % 3])) for index in range(count)
        ]
    return [[event.token for event in stream] for stream in streams]


def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is worth its time or not; from the head alone."""
    monkeypatch.setattr(draft_model, "_TRIALS", 1 << 30)
    monkeypatch.setattr(CostModel, "may_draft", lambda self, load, rows: True)
    monkeypatch.setattr(CostModel, "draft_rows", lambda self, load, gains: len(gains))
    monkeypatch.setattr(Search, "pays", lambda self: True)


def assert_same_answers(bundle: LoadedBundle, count: int) -> None:
    """With a head that drafts and without, from a cold cache and from prefixes."""
    with engine(bundle, drafts=False) as plain:
        expected = answers(plain, count)
        assert plain.stats().drafted == 0
    with engine(bundle) as drafting:
        assert answers(drafting, count) == expected
        assert answers(drafting, count) == expected
        assert drafting.stats().drafted > 20 * count


def assert_logits_of_drafts(
    bundle: LoadedBundle,
    prompts: list[list[int]],
    expected: Callable[[list[int], int], Iterator[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of every drafted token: `expected(tokens, count)` yields logits [V] of the next ones after `tokens`."""
    core = Core(bundle, many_sequences(bundle.manifest, bundle.context_length, 4 * CONTEXT), Limits(CONTEXT))
    head, seen, checked = draft_source(core, None, 4 * CONTEXT, 4), list[Any](), 0
    assert head is not None

    def copied(guess: Callable[..., Any], *given: Any) -> Any:
        logits = guess(*given)
        seen.append(tvm_runtime.array(bundle.device.read(logits)).copy())
        return logits

    for name in ("_guess_first", "_guess_next") if isinstance(head, EagleDraft) else ("_guess",):
        monkeypatch.setattr(head, name, partial(copied, getattr(head, name)))
    for prompt in prompts:
        drafter = ModelDrafter(head, Lookup(), GREEDY)
        core.scheduler.submit(ScheduledRequest(tuple(prompt), 8, params=GREEDY, drafter=drafter))
    for now in itertools.count():
        head.propose(core.scheduler)
        for index, one in enumerate(core.scheduler.admission.running if seen else ()):
            with torch.no_grad():
                for found, logits in zip(seen, expected(one.tokens, len(seen))):
                    np.testing.assert_allclose(found[index], logits.numpy(), atol=2e-4, rtol=1e-4)
                    checked += 1
        seen.clear()
        if (step := core.scheduler.plan(now)) is None:
            break
        core.scheduler.settle(step, core.compute(step), now)
    assert checked > 10 * len(prompts)


def assert_drafts_stand(bundle: LoadedBundle, expected: list[int]) -> None:
    """Of a head that knows the greedy answer most drafts stand."""
    with engine(bundle) as drafting:
        [answer] = answers(drafting, 1)
        stats = drafting.stats()
    assert answer == expected
    assert stats.drafted >= 24 and stats.accepted > 0.8 * stats.drafted
