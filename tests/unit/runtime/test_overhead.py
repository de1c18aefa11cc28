"""What Python costs a token: everything of `generate` but the compiled step and the compiled sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlcpipe import Engine, SamplingParams
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.runtime.model import LoadedModel

pytestmark = pytest.mark.alone

TOKENS = 200
ROUNDS = 5
# Of the bare loop's time, which has no penalties: 14 us a token. Seen are 2.8 without and 4.2 with one (EPYC, 2 cores, 2026-11).
LIMIT = 5.0


class Clock:
    """Adds up this thread's processor time in calls of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        began = time.thread_time()
        result = self._function(*arguments)
        self.seconds += time.thread_time() - began
        return result


def overhead(work: Callable[[], Any], clocks: list[Clock]) -> float:
    """Seconds of this thread's processor time that `work` takes outside of the clocks."""
    began = time.thread_time() - sum(clock.seconds for clock in clocks)
    work()
    return time.thread_time() - sum(clock.seconds for clock in clocks) - began


def bare_steps(model: LoadedModel, forward: Clock, sample: Clock) -> None:
    """The calls of `TOKENS` decode steps and nothing else: put the token, the step and a draw, decode, sample, read."""
    device, params, length = model.bundle.device, model.bundle.params, len(model.tokens)
    token, draw = np.zeros(1, np.int32), np.zeros(1, np.float32)
    draw_tensor = device.tensor(draw)
    temperature, top_p, min_p = (device.tensor(np.array([value], np.float32)) for value in (0.7, 0.95, 0.0))
    top_k = device.tensor(np.zeros(1, np.int32))
    pages = model._pages
    row = pages._row
    logits = tvm_runtime.view(row, (1, *row.shape))
    for _ in range(TOKENS):
        device.put(draw_tensor, draw)
        tokens, step = pages._one.fill(token, length, length + 1)
        forward(tokens, step, row, pages._pages, params)
        sampled = sample(logits, temperature, top_p, top_k, min_p, draw_tensor)
        token[0] = int(tvm_runtime.array(device.read(sampled))[0])


@pytest.mark.parametrize("prompt", [20, 1500])
@pytest.mark.parametrize(
    "extra", [{}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}], ids=str
)
def test_python_takes_little_of_a_token(
    demo: Engine, prompt: int, extra: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time against that of a bare loop over the same calls, measured in between; the best of each."""
    model = demo._model
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, **extra)
    step, sample = Clock(model._pages._few), Clock(model.bundle.library.function("sample"))
    monkeypatch.setattr(model._pages, "_few", step)
    monkeypatch.setattr(model._sampler, "_sample", sample)
    engine_s, bare_s = [], []
    for _ in range(ROUNDS):
        stream = demo.generate(list(range(5, 5 + prompt)), sampling=params, ignore_eos=True, stream=True)
        next(stream)
        engine_s.append(overhead(lambda stream=stream: [next(stream) for _ in range(TOKENS)], [step, sample]))
        bare_s.append(overhead(lambda: bare_steps(model, step, sample), [step, sample]))
        demo.reset()
    assert min(engine_s) < LIMIT * min(bare_s)
