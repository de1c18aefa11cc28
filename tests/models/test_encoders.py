"""Embeddings and scores of every encoder family against transformers, in float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers models")

import torch
from safetensors.numpy import save_file

import mlcpipe
from mlcpipe.compiler.export import prepare_model
from mlcpipe.encoders import build_encoder
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.conftest import QUICK
from tests.models import nomic_moe
from tests.models import tiny_encoders as tiny

TOLERANCE = 1e-4
LENGTHS = (1, 5, 16, 17, 64, 65, 128, 160, 33, 3, 90, 160, 2)
CASES = [
    ("bert", "mean", {}),
    ("modernbert", "cls", {}),
    ("nomic_bert", "max", {}),
    ("qwen3", "last", {}),
    ("eurobert", "mean", {}),
    ("gemma3_text", "mean", {}),
    ("gte", "cls", {}),
    ("jina_embeddings_v3", "mean", {}),
    ("mpnet", "mean", {}),
    ("qwen3", "mean", {"is_causal": False}),
    ("xlm-roberta", "cls", {}),
    ("bert", "cls", {"hidden_act": "gelu_new", "num_hidden_layers": 2}),
    ("modernbert", "mean", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 64}),
]


def case_id(case: tuple[str, str, dict[str, Any]]) -> str:
    return "-".join([case[0], case[1], *case[2]])


@pytest.fixture(scope="module", params=CASES, ids=case_id)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Any]:
    """The model, its pooling and an embedder of its compiled checkpoint."""
    family, pooling, options = request.param
    folder = tmp_path_factory.mktemp(family)
    model, checkpoint = tiny.write(family, folder / "checkpoint", pooling, **options)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")
    return model, pooling, mlcpipe.Embedder(bundle)


FAST = pytest.mark.fast_cases("bert-mean", "qwen3-last")


@FAST
def test_embeddings_are_those_of_transformers(built: tuple[Any, str, mlcpipe.Embedder]) -> None:
    model, pooling, embedder = built
    texts = tiny.random_ids(LENGTHS)
    expected = np.stack([tiny.pooled(tiny.hidden_states(model, ids), pooling) for ids in texts])
    found = embedder.embed(texts)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@FAST
def test_a_text_has_the_same_bits_alone_and_in_any_batch(built: tuple[Any, str, mlcpipe.Embedder]) -> None:
    *_, embedder = built
    texts = tiny.random_ids(LENGTHS)
    together = embedder.embed(texts)
    np.testing.assert_array_equal(embedder.embed(texts[::-1])[::-1], together)
    for i in (0, 4, 7, 8):
        np.testing.assert_array_equal(embedder.embed([texts[i]])[0], together[i])


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, mlcpipe.Embedder]:
    """A model with prompts that do not count, whose embeddings have length 1, in 8 bits."""
    folder = tmp_path_factory.mktemp("bert")
    model, checkpoint = tiny.write("bert", folder / "checkpoint", None)
    tiny.write_modules(checkpoint, {"pooling_mode": "mean", "include_prompt": False}, normalize=True)
    prompts = {"prompts": {"query": "the cat, ", "empty": ""}, "default_prompt_name": "query"}
    (checkpoint / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (checkpoint / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=folder / "bundle")
    return model, mlcpipe.Embedder(bundle)


def test_prompts_stand_before_texts_and_do_not_count(bert: tuple[Any, mlcpipe.Embedder]) -> None:
    model, embedder = bert
    ids = embedder.tokenizer.encode("the cat, birds sang", add_special_tokens=True)
    mean = tiny.pooled(tiny.hidden_states(model, ids), "mean", skipped=4)
    found = embedder.embed(["birds sang"])[0]
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(embedder.embed(["birds sang"], prompt_name="query")[0], found)
    plain = embedder.embed(["birds sang"], prompt_name="")[0]
    assert np.abs(plain - found).max() > 0.01
    with pytest.raises(mlcpipe.MlcpipeError, match="name of a prompt; expected empty, query; found title"):
        embedder.embed(["birds"], prompt_name="title")


def test_dimensions_cut_and_normalize(bert: tuple[Any, mlcpipe.Embedder]) -> None:
    _, embedder = bert
    whole, cut = embedder.embed(["birds sang"])[0], embedder.embed(["birds sang"], dimensions=8)[0]
    np.testing.assert_allclose(np.linalg.norm(whole), 1, rtol=1e-6)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-5, atol=1e-7)
    with pytest.raises(mlcpipe.MlcpipeError, match="dimensions; expected from 1 to 64; found 65"):
        embedder.embed(["birds"], dimensions=65)


IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"


@pytest.mark.parametrize(
    ("pooling", "layers"),
    [("mean", [(64, 96, IDENTITY, False), (96, 32, IDENTITY, True)]), ("cls", [(64, 48, TANH, True)])],
)
def test_dense_layers_after_the_pooling(pooling: str, layers: list[tuple[int, int, str, bool]], tmp_path: Path) -> None:
    """As EmbeddingGemma and older models of sentence-transformers have them."""
    model, checkpoint = tiny.write("bert", tmp_path / "checkpoint", pooling, normalize=True, num_hidden_layers=1)
    tensors = tiny.write_dense(checkpoint, *layers)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    texts = tiny.random_ids((5, 17, 64))
    expected = np.stack([tiny.pooled(tiny.hidden_states(model, ids), pooling) for ids in texts])
    for (*_, activation, _), one in zip(layers, tensors):
        expected = expected @ one["linear.weight"].T + one.get("linear.bias", 0)
        expected = np.tanh(expected) if activation == TANH else expected
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(mlcpipe.Embedder(bundle).embed(texts), expected, rtol=0, atol=TOLERANCE)
    settings = json.loads((checkpoint / "2_Dense" / "config.json").read_text())
    for changed, message in (
        ({"activation_function": TANH}, "pooling before dense layers" if pooling == "mean" else ""),
        ({"activation_function": "os.system"}, "activation_function"),
        ({"bias": not settings["bias"]}, "tensors of a dense layer"),
        ({"in_features": 7}, "in_features of a dense layer"),
    ):
        (checkpoint / "2_Dense" / "config.json").write_text(json.dumps({**settings, **changed}))
        if message:
            with pytest.raises(mlcpipe.MlcpipeError, match=message):
                mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "other")


def test_experts_of_nomic(tmp_path: Path) -> None:
    checkpoint, given = tmp_path / "checkpoint", nomic_moe.tensors()
    checkpoint.mkdir()
    save_file(given, checkpoint / "model.safetensors")
    (checkpoint / "config.json").write_text(json.dumps(nomic_moe.CONFIG))
    tiny.write_tokenizer(checkpoint)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    texts = tiny.random_ids((1, 5, 33, 90))
    expected = np.stack([nomic_moe.hidden_states(given, ids).mean(0) for ids in texts])
    np.testing.assert_allclose(mlcpipe.Embedder(bundle).embed(texts), expected, rtol=0, atol=TOLERANCE)
    for fields, message in (({"num_experts": 5}, "no stack of experts"), ({"mlp_fc2_bias": False}, "mlp_fc2_bias")):
        (checkpoint / "config.json").write_text(json.dumps({**nomic_moe.CONFIG, **fields}))
        with pytest.raises(mlcpipe.MlcpipeError, match=message):
            mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "other")


def test_frequencies_of_gte_s_first_files() -> None:
    """Fixed NTK scaling, as the published code of gte-multilingual-base and vLLM have it."""
    config = {"model_type": "new", "hidden_size": 128, "num_attention_heads": 2, "rope_theta": 20000}
    scaling = {"type": "ntk", "factor": 8.0}
    found = build_encoder({**config, "rope_scaling": scaling}).facts.ropes[0].inv_freq
    expected = (20000.0 * 8.0) ** (-np.arange(0, 64, 2) / 64) / 8.0 ** (2 / 64)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(mlcpipe.MlcpipeError, match="mixed_b"):
        build_encoder({**config, "rope_scaling": {**scaling, "mixed_b": 0.5}})


def test_biases_of_distances_are_for_cpus() -> None:
    with pytest.raises(mlcpipe.MlcpipeError, match="no biases of distances in vulkan; expected a CPU; found mpnet"):
        prepare_model({"model_type": "mpnet"}, load_target("vulkan"), load_scheme("q4f16_1"), encoder=True)


def test_long_texts_are_refused_or_cut(bert: tuple[Any, mlcpipe.Embedder]) -> None:
    _, embedder = bert
    assert embedder.max_tokens == 32
    long, fits = "cat " * 40, "cat " * 27
    with pytest.raises(mlcpipe.MlcpipeError, match="the text is too long; expected at most 32 tokens; found 45"):
        embedder.embed([long])
    np.testing.assert_array_equal(embedder.embed([long], truncate=32), embedder.embed([fits]))
    np.testing.assert_array_equal(embedder.embed([[5] * 40], truncate=7), embedder.embed([[5] * 7]))


@pytest.mark.parametrize("texts", ["a text", [[]], [[-1]], [[160]], [[True]], [[1.5]]])
def test_what_is_no_text_is_refused(bert: tuple[Any, mlcpipe.Embedder], texts: Any) -> None:
    with pytest.raises(mlcpipe.MlcpipeError, match="texts|token ids"):
        bert[1].embed(texts)


def test_no_texts_have_no_embeddings(bert: tuple[Any, mlcpipe.Embedder]) -> None:
    assert bert[1].embed([]).shape == (0, 64)


@pytest.mark.full
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", pytest.param("gte", marks=pytest.mark.everything)])
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, checkpoint = tiny.write(family, tmp_path / "checkpoint", None, num_labels=1)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    embedder = mlcpipe.Embedder(bundle)
    documents = ["a cat sat on a mat", "birds sang songs", "rain", "the dog ran far away from home " * 10]
    pairs = [embedder.tokenizer.library.encode("a cat?", one) for one in documents]
    with torch.no_grad():
        types = model.config.type_vocab_size > 1
        given = [{"input_ids": [one.ids], **({"token_type_ids": [one.type_ids]} if types else {})} for one in pairs]
        logits = [model(**{key: torch.tensor(value) for key, value in one.items()}).logits[0, 0] for one in given]
        expected = torch.sigmoid(torch.stack(logits)).numpy()
    assert pairs[0].type_ids[-1] == 1
    np.testing.assert_allclose(embedder.rerank("a cat?", documents), expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(mlcpipe.MlcpipeError, match="the model embeds no texts"):
        embedder.embed(["rain"])


@pytest.mark.full
def test_eight_bits_embed_nearly_alike(tmp_path: Path) -> None:
    model, checkpoint = tiny.write("bert", tmp_path / "checkpoint", "mean", normalize=True, hidden_size=128)
    bundle = mlcpipe.compile(checkpoint, target=QUICK, quantization="q8f16_1", output=tmp_path / "bundle")
    texts = tiny.random_ids(LENGTHS)
    expected = np.stack([tiny.hidden_states(model, ids).mean(0) for ids in texts])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    embedder = mlcpipe.Embedder(bundle)
    found = embedder.embed(texts)
    assert (found * expected).sum(axis=1).min() > 0.99
    np.testing.assert_array_equal(embedder.embed(texts[3:5]), found[3:5])


REFUSED = [
    (
        "modules.json",
        '[{"type": "a.Transformer", "path": ""}, {"type": "a.LSTM", "path": "2_LSTM"}]',
        "module 'LSTM'",
    ),
    (
        "modules.json",
        '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "2_Dense"}]',
        "2_Dense, 3_Dense with configurations",
    ),
    (
        "modules.json",
        '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../x"}]',
        "path of a module",
    ),
    (
        "modules.json",
        '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "/etc"}]',
        "path of a module",
    ),
    ("modules.json", "[]", "expected a list of 1 to 16"),
    ("modules.json", "{}", "expected a list of 1 to 16"),
    ("modules.json", "[" * 100_000, "JSON"),
    ("modules.json", '[{"type": "a.Transformer"}]', "expected Transformer, then Pooling"),
    ("1_Pooling/config.json", '{"pooling_mode": "weightedmean"}', "pooling is not supported"),
    ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', "pooling is not supported"),
    ("1_Pooling/config.json", '{"pooling_mode_cls_token": 1}', "pooling_mode_cls_token"),
    ("1_Pooling/config.json", "{}", "pooling is not supported"),
    ("config_sentence_transformers.json", '{"prompts": {"query": 1}}', "field prompts"),
    ("config_sentence_transformers.json", '{"default_prompt_name": "no"}', "field default_prompt_name"),
    ("sentence_bert_config.json", '{"do_lower_case": true}', "field do_lower_case is not supported"),
    ("sentence_bert_config.json", '{"max_seq_length": -5}', "field max_seq_length"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the smallest BERT."""
    return tiny.write("bert", tmp_path_factory.mktemp("plain") / "checkpoint", num_hidden_layers=1)[1]


@pytest.mark.parametrize(
    ("name", "content", "message"), REFUSED, ids=[f"{i}-{m[2][:20]}" for i, m in enumerate(REFUSED)]
)
def test_hostile_files_are_refused(plain: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    kept = (plain / name).read_text() if (plain / name).exists() else None
    (plain / name).write_text(content)
    try:
        with pytest.raises(mlcpipe.MlcpipeError, match=message):
            mlcpipe.compile(plain, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    finally:
        (plain / name).unlink() if kept is None else (plain / name).write_text(kept)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"hidden_act": "swoosh"}, "unknown activation"),
        ({"architectures": ["BertForQuestionAnswering"]}, "architecture"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "labels of"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
    ],
)
def test_fields_that_change_the_result_are_refused(
    plain: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, **fields}))
    try:
        with pytest.raises(mlcpipe.MlcpipeError, match=message):
            mlcpipe.compile(plain, target=QUICK, quantization="q0f32", output=tmp_path / "bundle")
    finally:
        (plain / "config.json").write_text(json.dumps(config))
