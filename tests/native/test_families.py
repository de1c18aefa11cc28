"""Every family's tiny model gives the same bits of logits and the same tokens as in Python, also after saving a chat and
where several answers share fewer pages than they need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the tiny checkpoints are made by torch")
pytest.importorskip("transformers", reason="the tiny checkpoints are transformers models")

import mlcpipe
from mlcpipe import SamplingParams
from mlcpipe.bundle.memory import many_sequences
from tests.conftest import QUICK
from tests.models import tiny
from tests.native.engine import NativeEngine, Runtime

pytestmark = pytest.mark.full
GREEDY = SamplingParams(temperature=0.0)
# The other cases are for `make test-everything`.
_USUAL = ("llama", "gemma2", "gemma3_text", "olmo2", "qwen3_moe", "gpt_oss", "nemotron_h")
USUAL = {*(f"{name}-default" for name in _USUAL), "llama-dynamic", "phi3-longrope", "mistral-no_window"}
CASES = [
    pytest.param(case, id=case.id, marks=[] if case.id in USUAL else [pytest.mark.everything])
    for cases in tiny.tiny_checkpoints().values()
    for case in cases
]


@pytest.mark.parametrize("case", CASES)
def test_a_family_computes_the_same(case: tiny.TinyCase, runtime: Runtime, tmp_path: Path) -> None:
    """The tokens cross the length where RoPE changes in the cases that have one; the second prompt is shorter again."""
    bundle = mlcpipe.compile(
        tiny.write_tiny(case, tmp_path / "checkpoint"), target=QUICK, quantization="q0f32",
        output=tmp_path / "bundle", context_length=case.context_length,
    )  # fmt: skip
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    native = runtime.open(copy, threads=2)
    engine = mlcpipe.Engine(bundle, threads=2)
    tokens = tiny.prompt_tokens(case, 40)
    np.testing.assert_array_equal(native.logits(tokens), engine.logits(tokens))
    params = SamplingParams(temperature=0.8, seed=3)
    answers = {}
    for length in (20, 36, 10):
        expected = engine.generate(tokens[:length], sampling=params, max_tokens=24, ignore_eos=True)
        found = native.generate(tokens[:length], params, max_tokens=24)
        assert found.tokens == expected.token_ids
        assert found.cached_tokens == expected.stats.cached_tokens
        answers[length] = found.tokens
        _saves_and_goes_on(engine, native, tokens[:length] + found.tokens, tmp_path)
    native.close()
    _answers_together(runtime, copy, engine, {length: (tokens[:length], params, answers[length]) for length in answers})


def _answers_together(runtime: Runtime, bundle: Path, engine: mlcpipe.Engine, asked: dict[int, Any]) -> None:
    """In the pages of one context, those of layers with a window among them."""
    options = {"context_length": engine.context_length, "sequences": 3, "kv_tokens": engine.context_length}
    units = many_sequences(engine.manifest, engine.context_length, options["kv_tokens"])
    assert runtime.plan(bundle, **options).kv_bytes == units.nbytes(engine.manifest.states)
    several = runtime.open(bundle, threads=2, **options)
    answers = [several.submit(tokens, params, max_tokens=24) for tokens, params, _ in asked.values()]
    while several.step():
        pass
    assert [one.tokens for one in answers] == [tokens for _, _, tokens in asked.values()]
    several.close()


def _saves_and_goes_on(engine: mlcpipe.Engine, native: NativeEngine, tokens: list[int], folder: Path) -> None:
    """Each continues what the other saved as it does without a file. Both have answered with the last of `tokens`."""
    engine.save(folder / "python")
    native.save(folder / "native")
    assert (folder / "python").read_bytes() == (folder / "native").read_bytes()
    turn = [*tokens, 7]
    expected = native.generate(turn, max_tokens=12)
    engine.generate([5, 6], max_tokens=1, ignore_eos=True)
    engine.load(folder / "native")
    found = engine.generate(turn, sampling=GREEDY, max_tokens=12, ignore_eos=True)
    assert (found.token_ids, found.stats.cached_tokens) == (expected.tokens, expected.cached_tokens)
    native.call("reset")  # it would find the same turn in the conversation that it kept
    native.restore(folder / "python")
    restored = native.generate(turn, max_tokens=12)
    assert (restored.tokens, restored.cached_tokens) == (expected.tokens, expected.cached_tokens)
