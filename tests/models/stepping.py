"""Steps of a serving engine without its thread, which remember the logits of every token that was drawn."""

from __future__ import annotations

import random
from collections import abc, defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.memory import many_sequences
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.core import GREEDY, Core, Drawn
from mlcpipe.runtime.serving.cost_model import CostModel
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence


@dataclass
class Steps:
    """A scheduler and an executor over one bundle. `logits[sequence.id][i]` are those of the i-th token drawn."""

    bundle: LoadedBundle
    kv_tokens: int = 1024
    limits: Limits = field(default_factory=lambda: Limits(256, prefill_chunk=64, sequences=16))
    adapter_blocks: int = 0
    swap_bytes: int = 0

    def __post_init__(self) -> None:
        # Costs of a device where a step holds few prompt rows, so that prompts come in many chunks.
        costs = (1e-3, 1e-3, 1e-3, 4e-3, 0.0, 0.0)
        cost = CostModel(costs, learn=False)
        units = many_sequences(self.bundle.manifest, self.bundle.context_length, self.kv_tokens)
        self.core = Core(self.bundle, units, self.limits, cost, self.adapter_blocks, self.swap_bytes)
        self.scheduler = self.core.scheduler
        self.logits: dict[int, list[NDArray[np.float32]]] = defaultdict(list)
        self.now = 0.0

    def submit(
        self, tokens: abc.Sequence[int], max_tokens: int, priority: int = 0, adapter: Adapter | None = None
    ) -> Sequence:
        """A greedy request; its pages are those that it would compute itself."""
        request = ScheduledRequest(
            tuple(tokens), max_tokens, GREEDY, priority=priority, arrival=self.now, deterministic=True, adapter=adapter
        )
        return self.scheduler.submit(request)

    def step(self) -> bool:
        """Compute a step; False where there was nothing to do."""
        self.now += 0.1
        step = self.scheduler.plan(self.now)
        if step is None:
            return False
        self.scheduler.settle(step, self.core.compute(step, self._take), self.now)
        return True

    def run(self) -> None:
        """Until everybody has ended."""
        while self.scheduler.has_work:
            assert self.step()

    def _take(self, drawn: Drawn) -> None:
        self.logits[drawn.sequence.id].append(drawn.logits().copy())


def prompts(vocab: int, lengths: abc.Sequence[int], seed: int) -> list[list[int]]:
    """Prompts of these lengths, half of which begin alike."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, vocab) for _ in range(max(lengths))]
    return [
        (shared if index % 2 else [])[: length // 2]
        + [rng.randrange(3, vocab) for _ in range(length - (length // 2 if index % 2 else 0))]
        for index, length in enumerate(lengths)
    ]


@dataclass(frozen=True)
class Alone:
    """A bundle, prompts, and the logits of each token of their answers, each computed alone."""

    bundle: LoadedBundle
    prompts: list[list[int]]
    expected: list[list[NDArray[np.float32]]]

    @staticmethod
    def of(bundle: LoadedBundle, lengths: abc.Sequence[int], answer: int) -> Alone:
        """Prompts of these lengths, if the context has room for them, and answers of `answer` tokens."""
        room = bundle.context_length - answer
        several = prompts(bundle.manifest.model.vocab_size, [min(length, room) for length in lengths], seed=1)
        expected = []
        for prompt in several:
            steps = Steps(bundle)
            sequence = steps.submit(prompt, answer)
            steps.run()
            expected.append(steps.logits[sequence.id])
        return Alone(bundle, several, expected)

    def check(self, steps: Steps, stagger: int = 0) -> None:
        """All prompts together, a new one each `stagger` steps, say what each says alone."""
        sequences = []
        for prompt, expected in zip(self.prompts, self.expected):
            sequences.append(steps.submit(prompt, len(expected)))
            for _ in range(stagger):
                steps.step()
        steps.run()
        for index, (sequence, expected) in enumerate(zip(sequences, self.expected)):
            found = steps.logits[sequence.id]
            assert len(found) == len(expected) > 0
            for place, (one, other) in enumerate(zip(found, expected)):
                np.testing.assert_array_equal(one, other, f"token {place} of prompt {index}")
