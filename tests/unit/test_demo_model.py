"""The embedded demo model: its files, its template, that greedy answers are right, and what quantization costs it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import mlcpipe
from mlcpipe import Engine
from tests.conftest import QUICK

if TYPE_CHECKING:
    from tests.conftest import Bundles

torch = pytest.importorskip("torch", reason="the demo model's answers are checked with torch (dev extra)")
transformers = pytest.importorskip("transformers", reason="the demo model is loaded with transformers (dev extra)")

FOLDER = Path(__file__).resolve().parents[2] / "apps" / "demo_model"
CHECKPOINT = FOLDER / "checkpoint"
LARGEST_CHECKPOINT = 12_000_000  # bytes: it is committed and shipped in the wheel
# Of the 213 questions of heldout_test.tsv 129 are answered right (60.6 %). The aim is 80 %, which this checkpoint misses:
# the floor only notices that a change made it worse.
LEAST_RIGHT = 0.55

Predict = Callable[[list[int]], Any]  # ids of T tokens -> logits f32[T, V]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The scripts of apps/demo_model, which import each other as top-level modules."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in ("chatml", "corpus", "evaluate", "train")}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def _config() -> dict[str, Any]:
    return dict(json.loads((CHECKPOINT / "config.json").read_text("utf-8")))


def test_checkpoint_is_small_enough_to_commit() -> None:
    total = sum(p.stat().st_size for p in CHECKPOINT.iterdir())
    assert total <= LARGEST_CHECKPOINT


def test_config_suits_the_kernels() -> None:
    config = _config()
    assert config["model_type"] == "llama"
    assert config["hidden_size"] % 64 == 0
    assert config["intermediate_size"] % 64 == 0
    assert config["head_dim"] in (32, 64)
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 1024


def test_weights_are_finite_float16_of_the_configured_shapes() -> None:
    from safetensors.numpy import load_file

    config = _config()
    tensors = load_file(CHECKPOINT / "model.safetensors")
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    assert tensors["model.embed_tokens.weight"].shape == (config["vocab_size"], hidden)
    assert tensors[f"model.layers.{layers - 1}.mlp.down_proj.weight"].shape == (hidden, config["intermediate_size"])
    assert "lm_head.weight" not in tensors
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float16, name
        assert np.isfinite(tensor).all(), name


@pytest.mark.parametrize("text", ["How do I compile?", "naïve café ☕ 日本語\n\ttab", "\x00\x7f", "  two  spaces "])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_end_of_turn_is_end_of_sequence(tokenizer: Any) -> None:
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text("utf-8"))
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer("<|im_end|>")["input_ids"] == [end]
    assert _config()["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id == end
    assert len(tokenizer) == _config()["vocab_size"]


def test_template_adds_the_system_prompt(tokenizer: Any, scripts: dict[str, ModuleType]) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == scripts["chatml"].prompt("Hi")


def test_template_keeps_a_given_system_prompt_and_the_history(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_training_rows_are_what_the_template_renders(tokenizer: Any, scripts: dict[str, ModuleType]) -> None:
    chatml = scripts["chatml"]
    turns = [("How do I exit?", "Type `/exit`.\n\n```sh\nx\n```"), ("  Thanks ", "You are welcome!")]
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    sample = chatml.encode_chat(tokenizer.backend_tokenizer, "Be brief.", turns, 0.1)
    assert sample.ids == rendered


def test_corpus_never_asks_a_held_out_question(scripts: dict[str, ModuleType]) -> None:
    corpus = scripts["corpus"]
    heldout = {corpus.normalize(q) for half in ("dev", "test") for _, q in corpus.read_heldout(half)}
    sampler = corpus.sampler(seed=1)
    asked = {corpus.normalize(t.question) for _ in range(3000) for t in sampler.conversation(1)}
    assert len(asked) > 2000
    assert not asked & heldout


def test_corpus_is_the_same_for_the_same_seed(scripts: dict[str, ModuleType]) -> None:
    sampler = scripts["corpus"].sampler
    assert [sampler(3).conversation(4) for _ in range(2)] == [sampler(3).conversation(4)] * 2


@pytest.mark.full
def test_every_entry_is_asked_in_many_ways(scripts: dict[str, ModuleType]) -> None:
    corpus = scripts["corpus"]
    sampler = corpus.sampler(seed=2)
    assert len(sampler.knowledge.entries) >= 150
    for name, entry in sampler.knowledge.entries.items():
        assert len({sampler.question(entry.questions) for _ in range(200)}) >= 15, name


def test_heldout_text_is_current(scripts: dict[str, ModuleType]) -> None:
    assert (FOLDER / "heldout.txt").read_text("utf-8") == scripts["corpus"].heldout_text()


@pytest.mark.parametrize(
    "target, name", [("vulkan", "Vulkan"), ("cpu", "CPU"), ("cuda", "CUDA"), ("metal", "Metal"), ("webgpu", "WebGPU")]
)
def test_compile_question_is_answered(model: Any, tokenizer: Any, target: str, name: str) -> None:
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"How do I compile a model for {name}?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        out = model.generate(**ids, do_sample=False, max_new_tokens=100)
    new = out[0, ids["input_ids"].shape[1] :]
    answer = tokenizer.decode(new)
    assert "mlcpipe compile" in answer
    assert f"--target {target} " in answer
    assert new[-1] == tokenizer.eos_token_id


@pytest.mark.full
def test_held_out_questions_are_answered(model: Any, tokenizer: Any, scripts: dict[str, ModuleType]) -> None:
    rows = scripts["corpus"].read_heldout("test")
    judged = scripts["evaluate"].judge(model, tokenizer.backend_tokenizer, rows)
    wrong = [(j.question, j.answer) for j in judged if not j.right]
    assert len(rows) >= 200
    assert len(wrong) <= (1 - LEAST_RIGHT) * len(rows), wrong


@pytest.fixture(scope="module")
def perplexities(model: Any, tokenizer: Any, scripts: dict[str, ModuleType]) -> Callable[[Predict], dict[str, float]]:
    """Perplexity by kind of held-out text; `file` is heldout.txt whole, the templates in it included."""
    evaluate, library = scripts["evaluate"], tokenizer.backend_tokenizer
    text = (FOLDER / "heldout.txt").read_text("utf-8")

    def measure(predict: Predict) -> dict[str, float]:
        found: dict[str, float] = evaluate.heldout_perplexity(predict, library)
        return found | {"file": evaluate.perplexity(predict, library, text)[0]}

    return measure


@pytest.fixture(scope="module")
def float32_perplexity(
    model: Any, scripts: dict[str, ModuleType], perplexities: Callable[[Predict], dict[str, float]]
) -> dict[str, float]:
    """What transformers computes."""
    return perplexities(scripts["evaluate"].predict_by(model))


def test_heldout_text_is_predicted(float32_perplexity: dict[str, float]) -> None:
    """Measured: answers 1.06, questions 145, prose 2228; 4.0 together, and 69 of the file with its templates."""
    assert float32_perplexity["answers"] < 1.1
    assert float32_perplexity["questions"] < 200
    assert float32_perplexity["all"] < 5
    assert float32_perplexity["file"] < 100  # an untrained model has the size of the vocabulary, 3072


@pytest.mark.parametrize(
    ("quantization", "bound"), [("q0f32", 1e-4), ("q8f16_1", 0.01), ("q8f16_0", 0.01), ("q4f16_1", 0.06)]
)
@pytest.mark.fast_cases("q4f16_1-0.06")
@pytest.mark.full_cases("q0f32-0.0001", "q8f16_0-0.01")
def test_quantization_keeps_the_perplexity(
    quantization: str,
    bound: float,
    demo_bundles: Bundles,
    float32_perplexity: dict[str, float],
    perplexities: Callable[[Predict], dict[str, float]],
) -> None:
    """The compiled model on held-out text, up or down, against float32.

    Prose counts in `all` and `file`: alone it is 202 tokens, too few to measure a change of 1 %.
    """
    found = perplexities(Engine(demo_bundles[quantization]).logits)
    change = {kind: found[kind] / value - 1 for kind, value in float32_perplexity.items() if kind != "prose"}
    assert all(abs(x) < bound for x in change.values()), change


@pytest.mark.full
def test_an_int8_kv_cache_keeps_the_perplexity(
    tmp_path: Path, float32_perplexity: dict[str, float], perplexities: Callable[[Predict], dict[str, float]]
) -> None:
    """Float32 weights, so that what changes is the cache's: 127 steps for the largest of each 32 keys or values."""
    bundle = mlcpipe.compile(
        CHECKPOINT, target=QUICK, quantization="q0f32", kv_cache_dtype="q8", output=tmp_path / "bundle"
    )
    found = perplexities(Engine(bundle).logits)
    change = {kind: found[kind] / value - 1 for kind, value in float32_perplexity.items() if kind != "prose"}
    assert all(abs(x) < 0.005 for x in change.values()), change


@pytest.mark.full
def test_the_perplexity_of_questions_tells_a_coarse_quantization(
    tmp_path: Path, float32_perplexity: dict[str, float], perplexities: Callable[[Predict], dict[str, float]]
) -> None:
    """So that the bounds above mean something: three bits that are rounded without a search lose 12 %."""
    bundle = mlcpipe.compile(CHECKPOINT, target=QUICK, quantization="q3f16_1", method="rtn", output=tmp_path / "bundle")
    found = perplexities(Engine(bundle).logits)
    assert found["questions"] / float32_perplexity["questions"] - 1 > 0.08
