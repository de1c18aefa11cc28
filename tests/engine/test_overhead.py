"""What Python costs a token: everything of `generate` but the compiled step and the compiled sampler."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from mlcpipe import Engine, SamplingParams

pytestmark = pytest.mark.alone

TOKENS = 200
LIMIT_S = 150e-6


class Clock:
    """Adds up the processor's time that calls of a function take on this thread."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        began = time.thread_time()
        result = self._function(*arguments)
        self.seconds += time.thread_time() - began
        return result


@pytest.mark.parametrize("prompt", [20, 1500])
@pytest.mark.parametrize(
    "extra", [{}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.5, "frequency_penalty": 0.5}], ids=str
)
def test_python_takes_little_of_a_token(
    demo: Engine, prompt: int, extra: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor's time, best of five runs, as others use the machine; penalties count, the draw does not."""
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, **extra)
    decode = Clock(demo._library.decode)
    monkeypatch.setattr(demo._library, "decode", decode)
    function = demo._library.function

    sample = Clock(function("sample"))
    monkeypatch.setattr(demo._library, "function", lambda name: sample if name == "sample" else function(name))
    overheads = []
    for _ in range(5):
        stream = demo.generate(list(range(5, 5 + prompt)), sampling=params, ignore_eos=True, stream=True)
        next(stream)
        decode.seconds = sample.seconds = 0.0
        began = time.thread_time()
        for _ in range(TOKENS):
            next(stream)
        overheads.append((time.thread_time() - began - decode.seconds - sample.seconds) / TOKENS)
    assert min(overheads) < LIMIT_S
