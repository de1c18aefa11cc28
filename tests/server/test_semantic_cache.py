"""`mlcpipe serve --semantic-cache`: similar questions get the answer that is kept, and nobody gets another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("torch", reason="tiny models are made by torch")
transformers = pytest.importorskip("transformers", reason="tiny models are transformers models")
pytestmark = pytest.mark.full

import mlcpipe
from tests.conftest import DEMO, QUICK
from tests.models import tiny_encoders as tiny
from tests.models.adapter_files import config, random_pairs, write_adapter
from tests.server.conftest import Running, running_server

ASKED, SIMILAR, OTHER = "What is mlcpipe?", "what is mlcpipe", "birds sang songs, the dog ran far away from home"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("encoder")
    _, checkpoint = tiny.write("bert", folder / "checkpoint", "mean", normalize=True, num_hidden_layers=2)
    encoder = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")
    asked, similar, other = mlcpipe.Embedder(encoder).embed([ASKED, SIMILAR, OTHER])
    low, high = float(asked @ other), float(asked @ similar)
    assert low < high
    model = mlcpipe.compile(DEMO, target=QUICK, quantization="q4f16_1", output=folder / "model", adapters=True)
    options = ("--semantic-cache", encoder, "--semantic-threshold", (low + high) / 2, "--semantic-entries", 4)
    keys = ("--api-key", "one", "--api-key", "two", "--adapter-ranks", 16)
    with running_server(model, *options, *keys, "--threads", 2) as running:
        yield running


def ask(server: Running, text: str, key: str = "one", **fields: Any) -> tuple[str | None, str]:
    """What the header says, and the answer."""
    messages = [*fields.pop("before", []), {"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 150, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    if not fields.get("stream"):
        return answer.headers.get("x-cache"), answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [one["choices"][0]["delta"].get("content") or "" for one in events]
    return answer.headers.get("x-cache"), "".join(parts)


def test_similar_questions_get_the_kept_answer(server: Running) -> None:
    said, answer = ask(server, ASKED)
    assert said == "miss" and "mlcpipe" in answer
    assert ask(server, ASKED) == ask(server, SIMILAR) == ("hit", answer)
    assert ask(server, SIMILAR, stream=True) == ("hit", answer)
    assert ask(server, OTHER)[0] == "miss"


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "two"},
        {"temperature": 0.5, "seed": 1},
        {"before": [{"role": "system", "content": "Be brief."}]},
        {"stop": ["zzz"]},
        {"user": "b"},
        {"metadata": {"user_id": "b"}},
    ],
)
def test_what_else_differs_is_another_question(server: Running, fields: dict[str, Any]) -> None:
    ask(server, ASKED)
    said, answer = ask(server, ASKED, stream=True, **fields)
    assert said == "miss"
    assert ask(server, ASKED, **fields) in (("hit", answer), ("miss", answer))  # one that was cut off is not kept


def test_an_adapter_of_the_same_name_gives_its_own_answers(server: Running, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(DEMO))
    headers, name = {"Authorization": "Bearer one"}, "adapter"

    def post(path: str, **body: str) -> None:
        assert httpx2.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=60).status_code == 200

    for seed in range(2):
        folder = write_adapter(tmp_path / str(seed), random_pairs(model, 8, seed), config(8))
        post("load_lora_adapter", lora_name=name, lora_path=str(folder))
        assert ask(server, ASKED, model=name)[0] == "miss"
        post("unload_lora_adapter", lora_name=name)


def test_what_is_not_kept(server: Running) -> None:
    for _ in range(2):
        assert ask(server, ASKED, max_tokens=1)[0] == "miss"
        assert ask(server, ASKED, logprobs=True)[0] is None
        assert ask(server, ASKED, prompt_logprobs=0)[0] is None
        assert ask(server, ASKED, n=2)[0] is None


def test_the_oldest_answer_gives_way(server: Running) -> None:
    ask(server, ASKED, max_tokens=140)
    assert ask(server, ASKED, max_tokens=140)[0] == "hit"
    for number in range(4):
        assert ask(server, ASKED, max_tokens=141 + number)[0] == "miss"
    assert ask(server, ASKED, max_tokens=140)[0] == "miss"
