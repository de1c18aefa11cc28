"""What adapters must do to a tiny model: the logits of merged weights, and requests that know nothing of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlcpipe
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.serving.adapters import Adapter, read_packed
from mlcpipe.runtime.serving.sequence import Sequence
from tests.models import tiny
from tests.models.adapter_files import Pairs, config, merge, random_pairs, write_adapter
from tests.models.stepping import Steps, prompts

CASES = {case.id: case for cases in tiny.tiny_checkpoints().values() for case in cases}
TOKENS, PREFILL, ANSWER = 40, 20, 12


def model_of(name: str) -> Any:
    return tiny.build_model(CASES[name], tiny.settled_seed(CASES[name]))


def reference(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, atol=1e-4 * max(1.0, float(np.abs(expected).max())), rtol=0)


def assert_is_merged(bundle: Path, name: str, folder: Path, pairs: Pairs, scales: Any) -> None:
    """Prompt and steps give the logits of the model with the adapter in its weights, which differ from its own."""
    tokens = tiny.prompt_tokens(CASES[name], TOKENS)
    expected = reference(merge(model_of(name), pairs, scales), tokens)
    engine = mlcpipe.Engine(bundle, adapter=folder)
    assert np.abs(expected - reference(model_of(name), tokens)).max() > 0.1
    assert_close(engine.logits(tokens), expected)
    if not CASES[name].length_dependent:
        assert_close(engine.logits_stepwise(tokens, prefill_tokens=PREFILL), expected[PREFILL - 1 :])


class Batch:
    """A bundle with three adapters, and what each prompt says with each of them, or none, alone."""

    def __init__(self, bundle: LoadedBundle, name: str, folder: Path) -> None:
        self.bundle, model = bundle, model_of(name)
        self.packed = [
            read_packed(write_adapter(folder / str(i), random_pairs(model, rank, i), config(rank)), str(i), bundle.manifest.model)
            for i, rank in enumerate((8, 20, 16))
        ]  # fmt: skip
        lengths = (40, 16, 65, 33, 17, 64, 1, 100)
        self.prompts = prompts(bundle.manifest.model.vocab_size, lengths, seed=1)
        self.choices = [None, 0, 1, 2, 0, 0, 1, None]

    def steps(self, order: tuple[int, ...] = (0, 1, 2), **more: Any) -> tuple[Steps, list[Adapter]]:
        """An engine that has loaded the adapters in this order."""
        steps = Steps(self.bundle, adapter_blocks=6, **more)
        assert steps.core.executor.adapters is not None
        loaded = {i: steps.core.executor.adapters.load(self.packed[i]) for i in order}
        return steps, [loaded[i] for i in range(3)]

    def submit(self, steps: Steps, adapters: list[Adapter], index: int, choice: int | None) -> Sequence:
        return steps.submit(self.prompts[index], ANSWER, adapter=None if choice is None else adapters[choice])

    def alone(self, index: int, choice: int | None) -> list[np.ndarray]:
        steps, adapters = self.steps()
        sequence = self.submit(steps, adapters, index, choice)
        steps.run()
        return steps.logits[sequence.id]
