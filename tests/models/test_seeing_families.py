"""Families that see, against transformers: prompts, towers, logits, steps, and the same bits beside other requests."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

import mlcpipe
from mlcpipe.runtime.pictures import completion, marked, seen, with_rows
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.interface import Request
from tests.conftest import EXACT
from tests.models import sight
from tests.models.sight_families import FAMILIES, SeeingFamily

TOLERANCE = 1e-4
Seeing = tuple[SeeingFamily, Any, Path, mlcpipe.Engine]


# Of the others CI compares processors alone, in tests/unit/vision.
OFTEN = ("gemma3",)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.full if name in OFTEN else pytest.mark.everything) for name in FAMILIES
    ],
)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """A family, the model of transformers, its checkpoint and an engine."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    model = family.write(folder / "checkpoint")
    (folder / "exact.toml").write_text(EXACT)
    bundle = mlcpipe.compile(
        folder / "checkpoint", target=str(folder / "exact.toml"), quantization="q0f32", output=folder / "bundle"
    )
    return family, model, folder / "checkpoint", mlcpipe.Engine(bundle)


@pytest.mark.everything
@pytest.mark.parametrize("name", ["gemma3", "mistral3", "internvl"])
def test_two_gguf_files_have_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Of the text, and of the tower beside it; tests/unit/checkpoint/test_mmproj.py compares what is read."""
    pytest.importorskip("gguf", reason="the files are written by the gguf package")
    from tests.unit.checkpoint.mmproj_files import write_pair

    family = FAMILIES[name]
    if name == "gemma3":  # of fewer than six layers all slide: its files do not say which
        text = {**family.config["text_config"], "layer_types": ["sliding_attention"] * 2}
        family = dataclasses.replace(family, config={**family.config, "text_config": text})
    model = family.write(tmp_path / "checkpoint")
    file = write_pair(tmp_path / "checkpoint", tmp_path / "pair")
    (tmp_path / "exact.toml").write_text(EXACT)
    bundle = mlcpipe.compile(
        file, target=str(tmp_path / "exact.toml"), quantization="q0f32", output=tmp_path / "bundle"
    )
    engine, images = mlcpipe.Engine(bundle), [sight.noise(60, 97), sight.noise(131, 40, 1)]
    messages = user(images[0], "\nWhat is it?", images[1], "and this?")
    tokens, pictures = prompt_of(engine, messages)
    inputs = family.processed(tmp_path / "checkpoint", rendered(engine, messages), images)
    with torch.no_grad():
        expected = model(**inputs).logits[0].numpy()
    np.testing.assert_allclose(engine.model.all_logits(tokens, pictures), expected, rtol=0, atol=TOLERANCE)


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def prompt_of(engine: mlcpipe.Engine, messages: Any) -> tuple[list[int], list[Any]]:
    plain, pictures = seen(messages, engine.manifest.model.vision, engine.context_length)
    completed = completion(pictures, engine.manifest.model.vision)
    return with_rows(engine.tokenizer.encode_chat(plain, completed=completed), pictures, engine.tokenizer), pictures


def rendered(engine: mlcpipe.Engine, messages: Any) -> str:
    return engine.tokenizer.chat_template("default").render(marked(messages)[0])


def processor_of(engine: mlcpipe.Engine) -> Any:
    assert engine.manifest.model.vision is not None
    return importlib.import_module(f"mlcpipe.vision.processors.{engine.manifest.model.vision.processor}")


def check_prompt(seeing: Seeing, messages: Any, images: list[Any]) -> Any:
    """Compare a prompt's tokens and logits -> what transformers' model takes."""
    family, model, checkpoint, engine = seeing
    tokens, pictures = prompt_of(engine, messages)
    inputs = family.processed(checkpoint, rendered(engine, messages), images)
    ids = inputs["input_ids"][0].tolist()
    assert len(tokens) == len(ids)
    assert [token for token in tokens if token >= 0] == [i for i, t in zip(ids, tokens) if t >= 0]
    with torch.no_grad():
        expected = model(**inputs).logits[0].numpy()
    np.testing.assert_allclose(engine.model.all_logits(tokens, pictures), expected, rtol=0, atol=TOLERANCE)
    return inputs


def test_prompts_logits_and_steps_are_those_of_transformers(seeing: Seeing) -> None:
    """With two pictures of different sizes; then of each token of an answer, with what was written so far."""
    family, model, checkpoint, engine = seeing
    images = [sight.noise(60, 97), sight.noise(131, 40, 1)]
    messages = user(images[0], "\nWhat is it?", images[1], "and this?")
    if "prepare_among" in vars(processor_of(engine)):  # one picture alone is another thing
        check_prompt(seeing, user(images[0], "x"), images[:1])
    inputs = check_prompt(seeing, messages, images)
    ids = inputs["input_ids"][0].tolist()
    engine.reset()
    answer = engine.chat(messages, temperature=0.0, max_tokens=4, logprobs=1)
    drawn = [one.token_id for one in answer.logprobs]
    grown = {**inputs, "input_ids": torch.tensor([ids + drawn])}
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            more = torch.full((1, len(drawn)), int(name == "attention_mask"), dtype=inputs[name].dtype)
            grown[name] = torch.cat([inputs[name], more], dim=1)
    known = engine.tokenizer.library.get_vocab_size()  # the others are never drawn
    with torch.no_grad():
        scores = torch.log_softmax(model(**grown).logits[0, len(ids) - 1 : -1, :known], -1).numpy()
    assert drawn == scores.argmax(-1).tolist()
    np.testing.assert_allclose([one.logprob for one in answer.logprobs], scores.max(-1), rtol=0, atol=TOLERANCE)


def test_answers_do_not_depend_on_what_is_beside_them(seeing: Seeing) -> None:
    """Alone, together, in short chunks and after others with a prefix: the same bits, which differ by picture."""
    engine = seeing[3]
    one, other = sight.noise(60, 96, 1), sight.noise(60, 96, 2)
    asked = [user(one, "a long text " * 9, other, "x"), user(other, one, "y"), user(one, one, "y"), user("text " * 9)]
    prompts = [prompt_of(engine, messages) for messages in asked]

    def answers(batching: Batching, *wanted: Any) -> list[Any]:
        with batching.together:
            streams = [
                batching.submit(Request(tokens, 4, SamplingParams(temperature=0.0), pictures=pictures, logprobs=1))
                for tokens, pictures in wanted
            ]
        return [[(event.token, event.logprob) for event in stream] for stream in streams]

    batching = Batching(engine.model.bundle, kv_tokens=2048)
    try:
        alone = [answers(batching, prompt)[0] for prompt in prompts]
        assert len({answer[0][1] for answer in alone}) == len(asked)
        assert answers(batching, *prompts[::-1]) == alone[::-1]  # of found prefixes
    finally:
        batching.close()
    vision = engine.manifest.model.vision
    assert vision is not None
    chunk = vision.rows + 8 if vision.ahead else 24
    batching = Batching(engine.model.bundle, kv_tokens=2048)
    try:
        batching._scheduler.limits = dataclasses.replace(batching._scheduler.limits, prefill_chunk=chunk)
        assert answers(batching, *prompts) == alone
    finally:
        batching.close()
