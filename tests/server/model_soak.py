"""Random requests to a server of several models, with cancels: what is answered is compared with what each answers alone.

By hand, on a server that runs: `python -m tests.server.model_soak URL REQUESTS`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx2

PROMPTS = ("Hello", "What is a compiler?", "1 2 3 4 5 6")
TOKENS = 6


def chat_body(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A request with one answer."""
    return {
        "model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "deterministic": True, **fields,
    }  # fmt: skip


async def soak(
    url: str, expected: Mapping[str, Mapping[str, Any]], requests: int, *, clients: int = 8, seed: int = 0
) -> Counter[str]:
    """Send `requests`, a fifth of which leave early -> what became of them.

    `expected`: model -> prompt -> text, or the embedding. Raises AssertionError for any other answer.
    """
    draw, ended = random.Random(seed), Counter[str]()
    left = iter(range(requests))

    async def one(client: httpx2.AsyncClient) -> None:
        model = draw.choice(list(expected))
        prompt, stream = draw.choice(PROMPTS), draw.random() < 0.4
        right = expected[model][prompt]
        if isinstance(right, list):
            path, body, stream = "/v1/embeddings", {"model": model, "input": prompt}, False
        else:
            path, body = "/v1/completions", chat_body(model, prompt, stream=stream)
        work = asyncio.ensure_future(client.post(path, json=body))
        if draw.random() < 0.2:
            await asyncio.wait({work}, timeout=draw.random() * 0.2)
            if not work.done():
                work.cancel()
                await asyncio.wait({work})
                ended["cancelled"] += 1
                return
        answer = await work
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code == 503 and answer.headers["retry-after"], error
            assert error["code"] == "overloaded", error
            ended["refused"] += 1
            return
        if isinstance(right, list):
            found: Any = answer.json()["data"][0]["embedding"]
        elif stream:
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]", answer.text
            found = "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
        else:
            found = answer.json()["choices"][0]["text"]
        assert found == right, (model, prompt, found, right)
        ended["answered"] += 1

    async def client() -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=300) as made:
            for _ in left:
                await one(made)

    await asyncio.gather(*(client() for _ in range(clients)))
    return ended


def alone(url: str) -> dict[str, dict[str, Any]]:
    """What each model of a server answers, one after the other."""
    with httpx2.Client(base_url=url, timeout=300) as client:
        answers: dict[str, dict[str, Any]] = {}
        for listed in client.get("/v1/models").json()["data"]:
            model, own = listed["id"], {}
            for prompt in PROMPTS:
                answer = client.post("/v1/completions", json=chat_body(model, prompt))
                if answer.status_code == 200:
                    own[prompt] = answer.json()["choices"][0]["text"]
                    continue
                answer = client.post("/v1/embeddings", json={"model": model, "input": prompt})
                if answer.status_code == 200:
                    own[prompt] = answer.json()["data"][0]["embedding"]
            if own:
                answers[model] = own
        return answers


if __name__ == "__main__":
    sys.stdout.write(f"{asyncio.run(soak(sys.argv[1], alone(sys.argv[1]), int(sys.argv[2])))}\n")
