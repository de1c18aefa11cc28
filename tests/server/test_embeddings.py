"""`mlcpipe serve` of models that embed texts or score documents."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

pytest.importorskip("torch", reason="tiny models are made by torch")
pytest.importorskip("transformers", reason="tiny models are transformers models")

import mlcpipe
from mlcpipe.errors import UsageError
from tests.conftest import QUICK
from tests.models import tiny_encoders as tiny
from tests.server.conftest import Running, running_server

TEXTS = ["a cat sat on a mat", "rain", "birds sang songs, the dog ran far away from home"]


def bundle(folder: Path, **options: Any) -> Path:
    pooling = None if "num_labels" in options else "mean"
    _, checkpoint = tiny.write("bert", folder / "checkpoint", pooling, normalize=True, num_hidden_layers=2, **options)
    return mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> mlcpipe.Embedder:
    return mlcpipe.Embedder(bundle(tmp_path_factory.mktemp("embedder")))


@pytest.fixture(scope="module")
def server(embedder: mlcpipe.Embedder) -> Iterator[Running]:
    with running_server(embedder.path, "--name", "tiny") as running:
        yield running
        assert running.end(number=signal.SIGTERM) == 0


@pytest.fixture
def client(server: Running) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=60) as made:
        yield made


def numbers(client: httpx2.Client, **fields: Any) -> Any:
    answer = client.post("/v1/embeddings", json=fields)
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def test_openai_python_gets_embeddings(server: Running, embedder: mlcpipe.Embedder) -> None:
    openai = pytest.importorskip("openai")
    made = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none").embeddings.create(input=TEXTS, model="tiny")
    np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), embedder.embed(TEXTS))
    tokens = sum(len(embedder.encode(text).ids) for text in TEXTS)
    assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == ("tiny", tokens, tokens)
    assert [one.index for one in made.data] == [0, 1, 2]


def test_a_tokenizer_with_bert_s_decoder_is_compiled_and_served(embedder: mlcpipe.Embedder) -> None:
    """As transformers saves it, and bge, MiniLM and e5 have it: what decodes word pieces cannot be streamed."""
    saved = json.loads((embedder.path.parent / "checkpoint" / "tokenizer.json").read_text())
    assert saved["decoder"]["type"] == "WordPiece" and len(embedder.encode(TEXTS[0]).ids) > 2


def test_ollama_python_gets_embeddings(server: Running, embedder: mlcpipe.Embedder) -> None:
    ollama = pytest.importorskip("ollama")
    with ollama.Client(host=server.url) as client:
        made = client.embed("tiny:latest", TEXTS)
        np.testing.assert_array_equal(np.array(made.embeddings, np.float32), embedder.embed(TEXTS))
        assert made.prompt_eval_count == sum(len(embedder.encode(text).ids) for text in TEXTS)
        one = np.array(client.embed("tiny", "cat " * 500, dimensions=16, options={"num_ctx": 5}).embeddings, np.float32)
        np.testing.assert_array_equal(one, embedder.embed(["cat " * 500], truncate=True, dimensions=16))
        one = np.array([client.embeddings("tiny", TEXTS[0]).embedding], np.float32)
        np.testing.assert_array_equal(one, embedder.embed(TEXTS[:1]))
        assert client.show("tiny").capabilities == ["embedding"]
        for wrong in ({"truncate": False}, {"options": {"temperature": 1}}, {"model": "other"}):
            with pytest.raises(ollama.ResponseError):
                client.embed(**{"model": "tiny", "input": "cat " * 500, **wrong})


def test_inputs_are_texts_or_tokens_in_any_form(client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    expected = embedder.embed(TEXTS[:1])
    ids = embedder.encode(TEXTS[0]).ids
    for given in (TEXTS[0], TEXTS[:1], ids, [ids]):
        np.testing.assert_array_equal(numbers(client, input=given), expected)
    body = client.post("/v1/embeddings", json={"input": TEXTS, "encoding_format": "base64"}).json()
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in body["data"]]
    np.testing.assert_array_equal(np.stack(decoded), embedder.embed(TEXTS))
    cut = numbers(client, input=TEXTS, dimensions=16)
    np.testing.assert_array_equal(cut, embedder.embed(TEXTS, dimensions=16))


def test_inputs_that_mix_texts_and_tokens(client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    ids = embedder.encode(TEXTS[0]).ids
    inside = ids[1:-1]
    words = TEXTS[0].split()
    assert len(inside) >= len(words)
    begin = len(embedder.encode(words[0]).ids) - 2
    mixed = [*inside[:begin], " ".join(words[1:])]
    expected = embedder.embed([inside])
    np.testing.assert_array_equal(numbers(client, input=mixed), expected)
    parts = {"content": [{"type": "text", "text": TEXTS[0][:4]}, {"type": "text", "text": TEXTS[0][4:]}]}
    several = numbers(client, input=[TEXTS[0], ids, {"prompt_string": TEXTS[0]}, parts, mixed])
    np.testing.assert_array_equal(several, np.concatenate([*[embedder.embed(TEXTS[:1])] * 4, expected]))
    for wrong in ({"content": "a"}, {"content": [{"type": "input_audio", "input_audio": {}}]}, {}, ["a", True]):
        refused = client.post("/v1/embeddings", json={"input": wrong})
        assert refused.status_code == 400 and "input" in refused.json()["error"]["message"]


def test_embeddings_of_tokens_are_the_hidden_states(client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    """llama-server's pooling `none`, and vLLM's task `token_embed`."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(embedder.path.parent / "checkpoint").eval()
    expected = [tiny.hidden_states(model, embedder.encode(text).ids) for text in TEXTS]
    found = client.post("/embedding", json={"content": TEXTS, "pooling": "none"}).json()
    pooled = client.post("/pooling", json={"input": TEXTS, "task": "token_embed"}).json()["data"]
    for index, states in enumerate(expected):
        rows = np.array(found[index]["embedding"], np.float32)
        np.testing.assert_allclose(rows, states, atol=2e-4)
        np.testing.assert_array_equal(np.array(pooled[index]["data"], np.float32), rows)
        assert not np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-3)
    whole = client.post("/embedding", json={"input": TEXTS[0]}).json()
    assert [one["index"] for one in whole] == [0]
    np.testing.assert_allclose(np.array(whole[0]["embedding"]), embedder.embed(TEXTS[:1]), atol=1e-6)
    raw = np.array(client.post("/embedding", json={"content": TEXTS[0], "embd_normalize": -1}).json()[0]["embedding"])
    np.testing.assert_allclose(raw[0], expected[0].mean(axis=0), atol=2e-4)
    refused = [
        ("/v1/embeddings", {"input": "a", "pooling": "none"}), ("/embedding", {"content": "a", "input": "b"}),
        ("/embedding", {}), ("/embedding", {"content": ["cat " * 100] * 2048, "pooling": "none"}),
        ("/embedding", {"content": "a", "embd_normalize": -2}), ("/embedding", {"content": "a", "pooling": "max"}),
        ("/pooling", {"input": "a", "task": "token_embed", "dimensions": 3}),
    ]  # fmt: skip
    for path, body in refused:
        assert client.post(path, json=body).status_code == 400, body


def test_clients_at_once_get_the_bits_that_each_gets_alone(client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    texts = [" ".join(TEXTS * (1 + i % 3)) for i in range(24)]
    expected = embedder.embed(texts)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: numbers(client, input=text)[0], texts))
    np.testing.assert_array_equal(np.stack(found), expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "expected 1 to 2048 texts, found 0"),
    ({"input": ["a"] * 2049}, "found 2049"),
    ({"input": [[]]}, "token ids"),
    ({"input": [160]}, "token ids"),
    ({"input": [-1]}, "token ids"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": ["a", 5.5]}, "input"),
    ({}, "input"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 65}, "from 1 to 64"),
    ({"input": "cat " * 500}, "expected at most 160 tokens; found 502"),
    ({"input": "cat " * 500_000}, "the text is too long; expected at most 1051136 characters"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 161}, "from 1 to 160"),
    ({"input": "a", "prompt_name": "query"}, "prompt"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_bad_bodies_get_400_and_the_reason(client: httpx2.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("text", ["cat " * 500_000, [5] * 500])
def test_long_texts_are_cut_where_asked(text: Any, client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    cut = embedder.embed([text], truncate=160)
    np.testing.assert_array_equal(numbers(client, input=text, truncate_prompt_tokens=-1), cut)
    for truncate in (True, -1, 1000):
        np.testing.assert_array_equal(embedder.embed([text], truncate=truncate), cut)
    for truncate in (None, False):
        with pytest.raises(UsageError, match="expected at most 160 tokens"):
            embedder.embed([text], truncate=truncate)
    for wrong in (0, -2, 1.5, "160"):
        with pytest.raises(UsageError, match="truncate; expected True, False, -1, or tokens from 1 to 160"):
            embedder.embed([text], truncate=wrong)  # type: ignore[arg-type]


def test_another_model_and_other_paths_are_not_there(client: httpx2.Client) -> None:
    assert client.post("/v1/embeddings", json={"input": "a", "model": "other"}).status_code == 404
    absent = client.post("/v1/chat/completions", json={"messages": []})
    assert absent.status_code == 404 and "this model embeds texts" in absent.json()["error"]["message"]
    refused = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert refused.status_code == 400
    assert "ask /v1/embeddings" in refused.json()["error"]["message"]


def test_models_health_and_metrics(client: httpx2.Client) -> None:
    numbers(client, input="rain")
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["meta"]["embedding"]["pooling"]) == ("tiny", 160, "mean")
    assert client.get("/health").json() == {"status": "ok"}
    assert "mlcpipe_request_success_total" in client.get("/metrics").text


def other_forms(client: httpx2.Client, scores: Any, order: list[int]) -> None:
    """Cohere's second version, TEI's texts, vLLM's score: the same scores."""
    asked = {"query": "who sat?", "documents": TEXTS}
    cohere = client.post("/v2/rerank", json={**asked, "top_n": 2}).json()
    assert [one["index"] for one in cohere["results"]] == order[:2] and cohere["meta"]["api_version"] == {
        "version": "2"
    }
    cut = client.post("/v2/rerank", json={**asked, "max_tokens_per_doc": 2}).json()["results"]
    short = client.post("/rerank", json={**asked, "documents": ["a cat", "rain", "birds sang"]}).json()["results"]
    assert cut == short and client.post("/v2/rerank", json={**asked, "documents": ["cat " * 900]}).status_code == 200
    tei = {"query": "who sat?", "texts": TEXTS}
    found = client.post("/rerank", json={**tei, "return_text": True}).json()
    assert [(one["index"], one["text"]) for one in found] == [(index, TEXTS[index]) for index in order]
    np.testing.assert_array_equal(np.array([one["score"] for one in found], np.float32), scores[order])
    raw = np.array([one["score"] for one in client.post("/rerank", json={**tei, "raw_scores": True}).json()])
    np.testing.assert_allclose(1 / (1 + np.exp(-raw)), scores[order], atol=1e-6)
    for names in (("text_1", "text_2"), ("queries", "documents")):
        body = client.post("/score", json=dict(zip(names, ("who sat?", TEXTS)))).json()
        np.testing.assert_array_equal(np.array([one["score"] for one in body["data"]], np.float32), scores)
    assert client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": TEXTS}).status_code == 400


def test_scores_of_an_embedder_are_cosines(client: httpx2.Client, embedder: mlcpipe.Embedder) -> None:
    rows = embedder.embed([TEXTS[0], *TEXTS])
    expected = rows[1:] @ rows[0] / np.linalg.norm(rows[1:], axis=1) / np.linalg.norm(rows[0])
    body = client.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS}).json()
    np.testing.assert_allclose([one["score"] for one in body["data"]], expected, atol=1e-6)
    assert body["data"][0]["score"] == pytest.approx(1, abs=1e-6) and expected[1] < 0.999
    ones, others = ([f"{side}{index}" for index in range(1025)] for side in "ab")
    many = client.post("/score", json={"text_1": ones, "text_2": others})
    assert many.status_code == 200 and len(many.json()["data"]) == 1025
    pooled = client.post("/pooling", json={"input": TEXTS, "model": "tiny"}).json()["data"]
    np.testing.assert_array_equal(np.array([one["data"] for one in pooled], np.float32), embedder.embed(TEXTS))
    assert client.post("/pooling", json={"input": TEXTS, "task": "classify"}).status_code == 400
    assert client.post("/rerank", json={"query": "a", "texts": ["b"]}).status_code == 400
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/version").json() == {"version": mlcpipe.__version__}


def test_documents_come_best_first(tmp_path: Path) -> None:
    path = bundle(tmp_path, num_labels=1)
    scores = mlcpipe.Embedder(path).rerank("who sat?", TEXTS)
    order = [int(index) for index in np.argsort(-scores)]
    with running_server(path) as running, httpx2.Client(base_url=running.url, timeout=60) as client:
        asked = {"query": "who sat?", "documents": [*TEXTS[:2], {"text": TEXTS[2]}]}
        body = client.post("/v1/rerank", json={**asked, "top_n": 2, "return_documents": True}).json()
        assert [one["index"] for one in body["results"]] == order[:2]
        assert [one["document"]["text"] for one in body["results"]] == [TEXTS[i] for i in order[:2]]
        found = np.array([one["relevance_score"] for one in body["results"]], np.float32)
        np.testing.assert_array_equal(found, scores[order[:2]])
        long = {"query": "cat " * 9000, "documents": ["a"] * 1000, "truncate_prompt_tokens": -1}
        assert client.post("/v1/rerank", json={**long, "max_tokens_per_doc": 1}).status_code == 400
        for wrong in ({"documents": []}, {"documents": "a"}, {"query": 1}, {"top_n": 0}, {"texts": TEXTS}, long):
            assert client.post("/v1/rerank", json={**asked, **wrong}).status_code == 400
        other_forms(client, scores, order)
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 400
