"""Tiny Dream and LLaDA: logits, and the answers of the published loops, token for token; a compile of each serves all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import load_bundle
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request
from tests.conftest import QUICK
from tests.models import tiny
from tests.models.whole_answers import DREAM, LLADA, Asked, all_logits, dream, llada, write_dream, write_llada
from tests.server.conftest import running_server

pytestmark = pytest.mark.full
CONTEXT = 64
PROMPT = tiny.prompt_tokens(DREAM, 19)
DREAMS = (
    Asked("entropy"),
    Asked("maskgit_plus", steps=10, temperature=0.8, seed=3),
    Asked("topk_margin", tokens=20, steps=7),
    Asked("origin", steps=12, temperature=0.9, seed=5),
    Asked("entropy", steps=40, temperature=0.7, alg_temp=0.3, seed=6),
)
LLADAS = (
    Asked("low_confidence"),
    Asked("low_confidence", steps=9, block=8),
    Asked("low_confidence", steps=12, block=12, temperature=0.8, seed=2),
    Asked("random", steps=6, seed=4),
)
WRITTEN: dict[str, tuple[Callable[[Path], Path], Callable[..., list[int]], tiny.TinyCase]] = {
    "dream": (write_dream, dream, DREAM),
    "llada": (write_llada, llada, LLADA),
}
CASES = [("dream", how) for how in DREAMS] + [("llada", how) for how in LLADAS]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: mlcpipe.compile(
            write(folder / f"{name}-checkpoint"), target=QUICK, quantization="q0f32", output=folder / name,
            context_length=CONTEXT,
        )
        for name, (write, _, _) in WRITTEN.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def engines(bundles: dict[str, Path]) -> Iterator[dict[str, mlcpipe.Engine]]:
    with mlcpipe.Engine(bundles["dream"]) as one, mlcpipe.Engine(bundles["llada"]) as other:
        yield {"dream": one, "llada": other}


def settings(how: Asked) -> dict[str, Any]:
    return {
        "temperature": how.temperature, "top_p": 1.0, "seed": how.seed, "steps": how.steps, "block": how.block,
        "remasking": how.remasking, "alg_temp": how.alg_temp,
    }  # fmt: skip


def request(how: Asked, prompt: list[int], **options: Any) -> Request:
    return Request(prompt, how.tokens, mlcpipe.SamplingParams(**settings(how)), **options)


@pytest.mark.parametrize("name", WRITTEN)
def test_all_tokens_of_a_text_see_each_other(engines: dict[str, mlcpipe.Engine], name: str) -> None:
    tokens = tiny.prompt_tokens(WRITTEN[name][2], 50)
    np.testing.assert_allclose(engines[name].logits(tokens), all_logits(WRITTEN[name][2], tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "how"), CASES, ids=lambda one: one if isinstance(one, str) else one.remasking)
def test_the_published_loop_token_for_token(engines: dict[str, mlcpipe.Engine], name: str, how: Asked) -> None:
    found = engines[name].generate(PROMPT, max_tokens=how.tokens, ignore_eos=True, **settings(how))
    assert found.token_ids == WRITTEN[name][1](PROMPT, how)
    assert found.finish_reason == "length"


@pytest.mark.parametrize(("name", "hows"), (("dream", DREAMS), ("llada", LLADAS)), ids=WRITTEN)
def test_answers_beside_others_have_the_tokens_of_each_alone(
    bundles: dict[str, Path], name: str, hows: tuple[Asked, ...]
) -> None:
    """Steps have rows for one or two of them at a time, and pages for as many."""
    prompts = [tiny.prompt_tokens(DREAM, 8 + 5 * i) for i in range(len(hows))]
    batching = Batching(load_bundle(bundles[name]), kv_tokens=2 * CONTEXT)
    try:
        with batching.together:
            streams = [batching.submit(request(how, prompt)) for how, prompt in zip(hows, prompts)]
        together = [[event.token for event in stream] for stream in streams]
        again = list(batching.submit(request(hows[0], prompts[0])))
    finally:
        batching.close()
    assert together == [WRITTEN[name][1](prompt, how) for prompt, how in zip(prompts, hows)]
    assert [event.token for event in again] == together[0]
    assert again[-1].cached_tokens == 0, "no keys stay"


def test_what_is_decided_is_sent_and_a_stop_token_ends_the_answer(
    bundles: dict[str, Path], engines: dict[str, mlcpipe.Engine]
) -> None:
    how = LLADAS[1]
    whole = llada(PROMPT, how)
    stop = next(token for at, token in enumerate(whole) if 8 <= at < 20 and token not in whole[:at])
    batching = Batching(load_bundle(bundles["llada"]), kv_tokens=CONTEXT)
    try:
        events = list(batching.submit(request(how, PROMPT, stop_ids=frozenset({stop}))))
    finally:
        batching.close()
    assert [event.token for event in events] == whole[: whole.index(stop) + 1]
    assert events[-1].finish_reason == "stop"
    chunks = list(engines["llada"].generate(PROMPT, max_tokens=24, ignore_eos=True, stream=True, **settings(how)))
    ends = np.cumsum([len(chunk.token_ids) for chunk in chunks])
    assert len(chunks) > 3 and {8, 16, 24} <= set(ends.tolist()), "each block is sent as soon as it is decided"
    assert [token for chunk in chunks for token in chunk.token_ids] == whole


def test_a_default_answer_fills_what_is_left(engines: dict[str, mlcpipe.Engine]) -> None:
    found = engines["dream"].generate(PROMPT, temperature=0, steps=4, ignore_eos=True)
    assert found.token_ids == dream(PROMPT, Asked("entropy", tokens=CONTEXT - len(PROMPT), steps=4))


def test_a_chat_is_answered_as_a_whole(engines: dict[str, mlcpipe.Engine]) -> None:
    question, how = tiny.prompt_tokens(DREAM, 12), Asked("topk_margin", tokens=16, steps=5)
    messages = [{"role": "user", "content": " ".join(f"w{token}" for token in question)}]
    found = engines["dream"].chat(messages, max_tokens=16, logit_bias={2: -100.0}, **settings(how))
    assert found.token_ids == dream([*question, 5, 6], how, never=(2,))
    assert found.text.split() == [f"w{token}" for token in found.token_ids]


def test_what_makes_no_sense_is_refused_by_name(engines: dict[str, mlcpipe.Engine]) -> None:
    refused = (
        ("llada", {"remasking": "entropy"}, "remasking; expected low_confidence, random; found entropy"),
        ("llada", {"alg_temp": 0.5}, "alg_temp does not apply"),
        ("llada", {"block": 8, "steps": 8}, "steps; expected a multiple of the 3 blocks"),
        ("dream", {"block": 8}, "block is for LLaDA"),
        ("dream", {"threshold": 0.5}, "threshold is for models that denoise blocks"),
        ("dream", {"logprobs": 2}, "denoises answers has no logprobs"),
        ("dream", {"presence_penalty": 1.0}, "denoises answers has no presence_penalty"),
    )
    for name, given, what in refused:
        with pytest.raises(UsageError, match=what):
            engines[name].generate(PROMPT, max_tokens=24, **given)
    with pytest.raises(UsageError, match="denoises answers, and has no next token"):
        engines["dream"].prefill(PROMPT)
    with pytest.raises(TypeError, match="cfg_scale"):
        engines["llada"].generate(PROMPT, cfg_scale=1.5)


@pytest.mark.everything
def test_the_command_line_takes_the_settings(bundles: dict[str, Path]) -> None:
    how, given = DREAMS[2], ("--remasking", "topk_margin", "--temperature", "0", "--steps", "7", "--max-tokens", "20")
    tokens = [token for token in PROMPT if str(token)[0] not in "12"]  # whose words begin with those of control tokens
    prompt = " ".join(f"w{token}" for token in tokens)
    command = [sys.executable, "-m", "mlcpipe", "chat", str(bundles["dream"]), "--raw", "--prompt", prompt, *given]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, stdin=subprocess.DEVNULL)
    answer = [f"w{token}" for token in dream(tokens, how)]
    assert found.stdout.split() == answer[: answer.index("w2") if "w2" in answer else None]


@pytest.mark.everything
def test_a_server_takes_the_settings(bundles: dict[str, Path]) -> None:
    how = DREAMS[4]
    body = {"prompt": PROMPT, "max_tokens": how.tokens, "ignore_eos": True, **settings(how)}
    with (
        running_server(bundles["dream"], "--threads", 2) as server,
        httpx2.Client(base_url=server.url, timeout=60) as client,
    ):
        found = client.post("/v1/completions", json=body)
        refused = client.post("/v1/completions", json={**body, "cfg_scale": 1.5})
    assert found.json()["choices"][0]["text"].split() == [f"w{token}" for token in dream(PROMPT, how)]
    assert refused.status_code == 400 and "cfg_scale" in refused.json()["error"]["message"]
