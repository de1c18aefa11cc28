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
from mlcpipe.runtime.serving.step import DecodeRows

pytestmark = pytest.mark.alone

TOKENS = 200
ROUNDS = 5
# Times the bare loop, which takes 23 us a token and has no penalties: seen are 1.8, and 3.1 with penalties (EPYC, 2026-11).
LIMIT = 4.0


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


def bare_steps(model: LoadedModel, sample: Clock) -> None:
    """The calls of `TOKENS` decode steps and nothing else: put the token, the step and a draw, decode, sample, read."""
    device = model.bundle.device
    draw = np.zeros(1, np.float32)
    draw_tensor = device.tensor(draw)
    temperature, top_p, min_p = (device.tensor(np.array([value], np.float32)) for value in (0.7, 0.95, 0.0))
    top_k = device.tensor(np.zeros(1, np.int32))
    token, conversation = 0, model.core.scheduler.admission.running[0]
    for _ in range(TOKENS):
        device.put(draw_tensor, draw)
        logits = model.core.executor.decode([DecodeRows(conversation, [token], 1)]).launch()
        logits = tvm_runtime.view(logits, (1, *logits.shape))
        sampled = sample(logits, temperature, top_p, top_k, min_p, draw_tensor)
        token = int(tvm_runtime.array(device.read(sampled))[0])


@pytest.mark.parametrize("prompt", [20, 1500])
@pytest.mark.parametrize(
    "extra", [{}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}], ids=str
)
def test_python_takes_little_of_a_token(
    demo: Engine, prompt: int, extra: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processor time against that of a bare loop over the same calls, measured after it; the best of several pairs."""
    model = demo._model
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, **extra)
    step, sample = Clock(model.core.executor._decode), Clock(model.bundle.library.function("sample"))
    monkeypatch.setattr(model.core.executor, "_decode", step)
    monkeypatch.setattr(model.core.sampler, "_sample", sample)
    engine_s, bare_s = [], []
    for _ in range(ROUNDS):
        stream = demo.generate(list(range(5, 5 + prompt)), sampling=params, ignore_eos=True, stream=True)
        next(stream)
        engine_s.append(overhead(lambda stream=stream: [next(stream) for _ in range(TOKENS)], [step, sample]))
        bare_s.append(overhead(lambda: bare_steps(model, sample), [step, sample]))
        demo.reset()
    assert min(engine / bare for engine, bare in zip(engine_s, bare_s)) < LIMIT
