"""Qwen2-VL, Qwen3-VL and Qwen 3.5 against transformers: rows, logits, further turns, and answers beside others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import mlcpipe
from mlcpipe.runtime.pictures import marked, with_rows
from tests.conftest import EXACT
from tests.models import sight, sight_qwen

TOLERANCE = 1e-4
NO_TOKENS = list(range(257 + len(sight_qwen.SPECIAL), sight_qwen.TEXT["vocab_size"]))  # which are never drawn


class Seeing(NamedTuple):
    """The model of transformers, and an engine of its checkpoint."""

    model: Any
    engine: mlcpipe.Engine


@pytest.fixture(
    scope="module",
    params=[
        "qwen3_vl",
        pytest.param("qwen3_5", marks=pytest.mark.full),
        pytest.param("qwen2_5_vl", marks=pytest.mark.everything),
        pytest.param("qwen2_vl", marks=pytest.mark.everything),
    ],
)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp("sight")
    model = sight_qwen.write(folder / "checkpoint", request.param)
    (folder / "exact.toml").write_text(EXACT)
    bundle = mlcpipe.compile(
        folder / "checkpoint", target=str(folder / "exact.toml"), quantization="q0f32", output=folder / "bundle"
    )
    return Seeing(model, mlcpipe.Engine(bundle))


def user(*parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return {"role": "user", "content": content}


def prompt_of(engine: mlcpipe.Engine, messages: Any) -> tuple[list[int], list[Any]]:
    plain, sources = marked(messages)
    pictures = engine._maker.pictures(sources)
    return with_rows(engine.tokenizer.encode_chat(plain), pictures, engine.tokenizer), pictures


def inputs_of(tokens: list[int], images: list[Any]) -> dict[str, Any]:
    """What transformers' model takes for a prompt; the ids of pictures are those that its processor writes."""
    ids = torch.tensor([[token if token >= 0 else sight_qwen.IMAGE for token in tokens]])
    kinds = (ids == sight_qwen.IMAGE).int()
    processor, shown = Qwen2VLImageProcessorPil(**sight_qwen.PREPROCESSOR), [Image.fromarray(one) for one in images]
    made = processor(shown, return_tensors="pt") if images else {}
    return {"input_ids": ids, "mm_token_type_ids": kinds, **made}


def expected_of(seeing: Seeing, tokens: list[int], images: list[Any]) -> Any:
    with torch.no_grad():
        return seeing.model(**inputs_of(tokens, images)).logits[0].numpy()


TURNS = (
    ([sight.noise(40, 90)], ("What is it?",)),
    ([sight.noise(31, 17), sight.noise(64, 20, 1)], ("and", "or")),
    ([sight.noise(30, 30, 2)] * 2, ("", "<|image_pad|>")),
)


def test_prompts_and_logits_are_those_of_transformers(seeing: Seeing) -> None:
    for images, texts in TURNS:
        parts = [part for image, text in zip(images, texts) for part in (image, text)]
        for messages in (
            [user(*parts)],
            [user("text"), {"role": "assistant", "content": "a"}, user(*parts), user("x")],  # in a later turn
        ):
            tokens, pictures = prompt_of(seeing.engine, messages)
            expected, found = expected_of(seeing, tokens, images), seeing.engine.model.all_logits(tokens, pictures)
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=str(texts))
    tokens = list(range(3, 36))  # of text alone, whose three positions are equal
    np.testing.assert_allclose(seeing.engine.logits(tokens), expected_of(seeing, tokens, []), rtol=0, atol=TOLERANCE)


def test_rows_are_those_of_the_tower(seeing: Seeing) -> None:
    images = [sight.noise(40, 90), sight.noise(1, 190)]
    _, pictures = prompt_of(seeing.engine, [user(*images)])
    rows = seeing.engine.model.core.executor.pictures
    assert rows is not None
    inputs = inputs_of([], images)
    with torch.no_grad():
        features = seeing.model.model.visual(inputs["pixel_values"], inputs["image_grid_thw"])
    parts = [features.pooler_output, *getattr(features, "deepstack_features", ())]
    found = np.concatenate([rows._encoded(picture, 0) for picture in pictures])
    np.testing.assert_allclose(found, torch.cat(parts, dim=1).numpy(), rtol=0, atol=TOLERANCE)


def test_answers_are_those_of_transformers(seeing: Seeing) -> None:
    """Of decode steps after pictures, whose positions are not those of their keys, and of a picture after an answer."""
    model, engine = seeing
    images = [sight.noise(40, 90, 5), sight.noise(60, 20, 6)]
    messages: list[dict[str, Any]] = []
    for turn, image in enumerate(images):
        messages.append(user(image, "what?"))
        tokens, _ = prompt_of(engine, messages)
        answer = engine.chat(messages, temperature=0.0, max_tokens=8, logprobs=1)
        with torch.no_grad():
            written = model.generate(
                **inputs_of(tokens, images[: turn + 1]), max_new_tokens=8, do_sample=False, output_scores=True,
                return_dict_in_generate=True, eos_token_id=[256, 257], pad_token_id=256, suppress_tokens=NO_TOKENS,
            )  # fmt: skip
        expected = [torch.log_softmax(one[0], -1).max().item() for one in written.scores]
        found = [one.logprob for one in answer.logprobs]
        np.testing.assert_allclose(found, expected[: len(found)], rtol=0, atol=TOLERANCE)
        messages.append({"role": "assistant", "content": answer.text})


LONG = "a text that fills some pages of the prefix tree, so that what follows can be found " * 2


def test_answers_do_not_depend_on_what_is_beside_them(seeing: Seeing) -> None:
    """Alone, together, and after others with a prefix: the same bits of probabilities, which differ by picture."""
    engine = seeing.engine
    if seeing.model.config.model_type == "qwen3_5":  # whose own head drafts for texts
        assert engine.manifest.model.eagle is not None
    one, other = sight.noise(60, 96, 1), sight.noise(60, 96, 2)
    asked = [[user(one, LONG, other, "x")], [user(other, LONG, one, "x")], [user(one, LONG, one, "y")], [user(LONG)]]
    options = {"temperature": 0.0, "max_tokens": 6, "logprobs": 2}
    alone = []
    for messages in asked:
        engine.reset()
        alone.append(engine.chat(messages, **options))
    assert len({answer.logprobs[0].logprob for answer in alone}) == len(asked)
    engine.reset()
    for batch in (asked, asked[::-1]):  # the second time prefixes are found
        found = engine.chat_batch(batch, **options)
        expected = alone if batch is asked else alone[::-1]
        assert [answer.logprobs for answer in found] == [answer.logprobs for answer in expected]
