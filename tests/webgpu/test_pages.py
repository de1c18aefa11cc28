"""Models that WebLLM cannot run: the chat page's own engine gives transformers' tokens, turn after turn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the checkpoints are written by torch")
pytest.importorskip("transformers", reason="the checkpoints are those of transformers")

import mlcpipe
from mlcpipe.bundle import read_manifest
from tests.conftest import CHAT_TEMPLATE
from tests.models import tiny
from tests.once import Once
from tests.page_build import built_once
from tests.webgpu import dawn

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

CONTEXT, PROMPT, SAID, STEPS = 128, tiny.GREEDY_PROMPT, 17, 12
PENALTIES = {"presencePenalty": -4.0, "frequencyPenalty": 1.0}  # a token that was said is likelier, twice at most
# A delta net, a scan, layers that share keys and see windows, latent attention: what TVM's cache does not hold.
CASES = (
    tiny.TinyCase("qwen3_5_text", "default"),
    tiny.TinyCase("granitemoehybrid", "default", {"num_local_experts": 0}),
    tiny.TinyCase("gemma4_text", "default"),
    tiny.TinyCase("glm4_moe_lite", "default"),
)
# Prompts are computed in several steps.
BOARD = 'base = "webgpu"\n[limits]\nmax_prefill_chunk = 8\n'


@pytest.fixture(scope="module")
def engine(packages: Path, once: Once) -> Path:
    """The chat page's own engine, built for Node."""
    return built_once(once, "build:node", packages / "dist-node") / "engine.cjs"


@pytest.mark.full_cases("qwen3_5_text-default", "glm4_moe_lite-default")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_turns_give_the_tokens_of_transformers(case: tiny.TinyCase, engine: Path, tmp_path: Path) -> None:
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint")
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    (tmp_path / "board.toml").write_text(BOARD, encoding="utf-8")
    bundle = mlcpipe.compile(
        checkpoint, target=str(tmp_path / "board.toml"), quantization="q0f32", output=tmp_path / "web",
        context_length=CONTEXT, quick=True,
    )  # fmt: skip
    manifest = read_manifest(bundle)
    assert (manifest.model.kv_cache, manifest.model.prefill_chunk) == ("pages", 8)
    prompt = list(map(int, tiny.prompt_tokens(case, PROMPT)))
    greedy = tiny.reference_greedy(case, prompt)
    # The second prompt continues after an answer, the third goes back into it and samples from the likeliest token
    # alone, the last one is the first again.
    asked = [(0, SAID, {}), (20, PROMPT + 18, {}), (6, PROMPT + 5, {"temperature": 1, "topP": 1e-6}), (0, 0, PENALTIES)]
    turns = [dawn.Turn([*prompt, *greedy[:begin]], said, STEPS, sampling) for begin, said, sampling in asked]
    *answers, penalized = dawn.chat(bundle, engine, turns, CONTEXT)
    assert [answer["tokens"] for answer in answers] == [greedy[begin : begin + STEPS] for begin, *_ in asked[:-1]]
    slots = any(state.kind == "slot" for state in manifest.states)
    back = SAID if slots else PROMPT + 5  # slots have the states after one token: the end of the first prompt
    assert [answer["reused"] for answer in answers] == [0, PROMPT + STEPS - 1, back]
    assert penalized["tokens"] == _penalized(case, prompt) != greedy[:STEPS]


def _penalized(case: tiny.TinyCase, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers' logits, with penalties of the tokens of the answer."""
    answer: list[int] = []
    for _ in range(STEPS):
        logits = tiny.reference_logits(case, [*prompt, *answer])[-1, : tiny.TOKENS]
        counts = np.bincount(answer, minlength=tiny.TOKENS)
        logits = logits - PENALTIES["presencePenalty"] * (counts > 0) - PENALTIES["frequencyPenalty"] * counts
        answer.append(int(logits.argmax()))
    return answer
