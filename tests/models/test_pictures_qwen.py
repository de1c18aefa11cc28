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
from mlcpipe.bundle.memory import running_bytes
from mlcpipe.errors import UsageError
from mlcpipe.runtime.pictures import seen, with_rows
from tests.conftest import EXACT
from tests.models import sight, sight_qwen, sight_videos

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
    plain, pictures = seen(messages, engine.manifest.model.vision, engine.context_length)
    return with_rows(engine.tokenizer.encode_chat(plain), pictures, engine.tokenizer), pictures


def inputs_of(tokens: list[int], images: list[Any], **config: Any) -> dict[str, Any]:
    """What transformers' model takes for a prompt; the ids of pictures are those that its processor writes."""
    ids = torch.tensor([[token if token >= 0 else sight_qwen.IMAGE for token in tokens]])
    kinds = (ids == sight_qwen.IMAGE).int()
    processor, shown = (
        Qwen2VLImageProcessorPil(**{**sight_qwen.PREPROCESSOR, **config}),
        [Image.fromarray(one) for one in images],
    )
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


def test_an_engine_shrinks_pictures_to_as_many_rows_as_it_is_asked_for(seeing: Seeing) -> None:
    """With the library that makes larger ones too; the plan counts what it writes."""
    model, engine = seeing
    image, usual = sight.noise(70, 60), engine.manifest
    with mlcpipe.Engine(engine.path, picture_rows=20) as smaller:
        tokens, pictures = prompt_of(smaller, [user(image)])
        inputs = inputs_of(tokens, [image], size={"shortest_edge": 256, "longest_edge": 20 * 64})
        with torch.no_grad():
            expected = model(**inputs).logits[0].numpy()
        found = smaller.model.all_logits(tokens, pictures)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        assert running_bytes(smaller.manifest) < running_bytes(usual)
    most = usual.model.vision.largest if usual.model.vision else 0
    for rows in (3, most + 1, True):
        with pytest.raises(UsageError, match=rf"rows of a picture; expected 4 to {most}, as compiled; found {rows}"):
            mlcpipe.Engine(engine.path, picture_rows=rows)


see_videos = pytest.mark.parametrize(
    "seeing", ["qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)], indirect=True
)


@see_videos
def test_videos_are_those_of_transformers(seeing: Seeing) -> None:
    """Frames with times, between texts and beside a picture, whose token is a video's in transformers."""
    model, engine = seeing
    shown, image = sight_videos.frames(5, 40, 60), sight.noise(40, 90)
    video = {"type": "video", "video": shown, "times_s": [0, 0.25, 0.75, 1, 2]}
    content = [{"type": "text", "text": "see"}, video, *user(image, "what?")["content"]]
    tokens, pictures = prompt_of(engine, [{"role": "user", "content": content}])
    rows = [one.rows for one in pictures]
    inputs = {**inputs_of(tokens, [image]), **sight_videos.qwen_inputs(shown, sight_videos.PREPROCESSOR)}
    begin, end = "<|vision_start|>", "<|vision_end|>"
    times = zip(("<0.1 seconds>", "<0.9 seconds>", "<2.0 seconds>"), rows)
    text = "".join(f"{time}{begin}{'<|image_pad|>' * count}{end}" for time, count in times)
    text = f"user: see{text}{begin}{'<|image_pad|>' * rows[3]}{end}what?<|im_end|>\na:"
    assert inputs["input_ids"][0].tolist() == engine.tokenizer.encode(text)
    places = (inputs["input_ids"][0] == sight_qwen.IMAGE).nonzero()[: sum(rows[:3]), 0]
    inputs["input_ids"][0, places], inputs["mm_token_type_ids"][0, places] = sight_qwen.VIDEO, 2
    with torch.no_grad():
        expected = model(**inputs).logits[0].numpy()
    found = engine.model.all_logits(tokens, pictures)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@see_videos
def test_a_file_is_its_frames(seeing: Seeing) -> None:
    """Two of a second, with their times; all further turns find them in the prefix."""
    pytest.importorskip("av", reason="files are decoded by PyAV")
    engine = seeing.engine
    data = sight_videos.file_of(sight_videos.frames(18, 48, 64), fps=9)
    frames, wanted = sight_videos.decoded(data), np.linspace(0, 17, 4).round().astype(int)
    asked = [
        [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        for part in (
            {"type": "video", "video": data},
            {"type": "video", "video": [*frames[wanted]], "times_s": [at / 9 for at in wanted]},
            {"type": "video", "video": [*frames[wanted[::-1]]], "times_s": [at / 9 for at in wanted]},
        )
    ]
    answers = [engine.chat(messages, temperature=0.0, max_tokens=6, logprobs=1) for messages in asked]
    assert answers[0].logprobs == answers[1].logprobs != answers[2].logprobs
    further = [*asked[0], {"role": "assistant", "content": answers[0].text}, user("and?")]
    rows = engine.model.core.executor.pictures
    assert rows is not None
    before = rows.encoded
    engine.chat(further, temperature=0.0, max_tokens=2)
    assert rows.encoded == before


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
