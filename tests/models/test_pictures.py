"""Models that see, against transformers: processors, towers, logits, and answers that do not depend on what is beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
transformers = pytest.importorskip("transformers", reason="the references are transformers models")

from PIL import Image

import mlcpipe
from mlcpipe.cli.chat.renderer import PlainRenderer
from mlcpipe.cli.chat.session import Session
from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.slash_commands import Commands
from mlcpipe.errors import TemplateError, UsageError
from mlcpipe.runtime.pictures import marked, seen, with_rows
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.serving import picture_rows
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.batching import Batching
from mlcpipe.runtime.serving.context_shift import tokens_to_drop, without_dropped
from mlcpipe.runtime.serving.interface import Request
from tests.conftest import EXACT
from tests.models import sight, sight_videos

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, mlcpipe.Engine]:
    """The model of transformers, its checkpoint and an engine."""
    folder = tmp_path_factory.mktemp("sight")
    model = sight.write(folder / "checkpoint")
    (folder / "exact.toml").write_text(EXACT)
    bundle = mlcpipe.compile(
        folder / "checkpoint", target=str(folder / "exact.toml"), quantization="q0f32", output=folder / "bundle"
    )
    return model, folder / "checkpoint", mlcpipe.Engine(bundle)


def user(*parts: Any) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def prompt_of(engine: mlcpipe.Engine, messages: Any) -> tuple[list[int], list[Any]]:
    plain, pictures = seen(messages, engine.manifest.model.vision, engine.context_length)
    return with_rows(engine.tokenizer.encode_chat(plain), pictures, engine.tokenizer), pictures


def processed(checkpoint: Path, messages: Any, images: list[Any]) -> Any:
    """What transformers' processor makes of them."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    processor = Idefics3Processor(
        Idefics3ImageProcessorPil(**sight.PREPROCESSOR), tokenizer, image_seq_len=9, chat_template=sight.TEMPLATE
    )
    text = processor.apply_chat_template(marked(messages)[0], add_generation_prompt=True)
    return processor(text=[text], images=[[Image.fromarray(one) for one in images]], return_tensors="pt")


SIZES = ((60, 96), (31, 17), (200, 301), (1, 400), (48, 48))


def test_prompts_and_logits_are_those_of_transformers(seeing: Any) -> None:
    model, checkpoint, engine = seeing
    for size, text in zip(SIZES, ("What is it?", "", "<image>?", "aa", "b")):
        image = sight.noise(*size)
        messages = user(image, text)
        tokens, pictures = prompt_of(engine, messages)
        inputs = processed(checkpoint, user(image, text.replace("<image>", "")), [image])
        ids = [token if token >= 0 else 258 for token in tokens]
        if "<" not in text:  # which is text for us, as whatever a message writes
            assert ids == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            expected = model(
                input_ids=torch.tensor([ids]), pixel_values=inputs["pixel_values"],
                pixel_attention_mask=inputs["pixel_attention_mask"],
            ).logits[0].numpy()  # fmt: skip
        found = engine.model.all_logits(tokens, pictures)
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=str(size))


def test_rows_are_those_of_the_tower(seeing: Any) -> None:
    model, checkpoint, engine = seeing
    image = sight.noise(60, 96)
    inputs = processed(checkpoint, user(image), [image])
    with torch.no_grad():
        features = model.model.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"])
    _, (picture,) = prompt_of(engine, user(image))
    rows = engine.model.core.executor.pictures
    assert rows is not None
    found = np.concatenate([rows._encoded(picture, tile) for tile in range(len(picture.tiles))])
    np.testing.assert_allclose(found, features.pooler_output[0].numpy(), rtol=0, atol=TOLERANCE)


def test_videos_are_those_of_transformers(seeing: Any) -> None:
    model, _, engine = seeing
    shown = sight_videos.frames(3, 40, 60)
    content = [{"type": "video", "video": shown, "times_s": [0.5, 1, 62]}, {"type": "text", "text": "what?"}]
    tokens, pictures = prompt_of(engine, [{"role": "user", "content": content}])
    image = "<fake_token_around_image><global-img>" + "<image>" * 9 + "<fake_token_around_image>"
    text = (
        "user: You are provided the following series of three frames from a 0:01:02 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{image}\nFrame from 00:01:{image}\nFrame from 01:02:{image}"
        "\n\nwhat?<end_of_utterance>\na:"
    )
    ids = [token if token >= 0 else 258 for token in tokens]
    assert ids == engine.tokenizer.encode(text)
    pixels = sight_videos.smolvlm_inputs(shown, 2 * sight.TILE, sight.TILE, sight.PREPROCESSOR)
    with torch.no_grad():
        mask = torch.ones(pixels.shape[:2] + pixels.shape[3:], dtype=torch.int64)
        expected = model(input_ids=torch.tensor([ids]), pixel_values=pixels, pixel_attention_mask=mask).logits[0]
    found = engine.model.all_logits(tokens, pictures)
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=TOLERANCE)


LONG = "a text that fills some pages of the prefix tree, so that what follows can be found " * 2


def test_answers_do_not_depend_on_what_is_beside_them(seeing: Any) -> None:
    """Alone, together, and after others with a prefix: the same bits of probabilities, which differ by picture."""
    _, _, engine = seeing
    one, other = sight.noise(60, 96, 1), sight.noise(60, 96, 2)
    asked = [user(one, LONG, other, "x"), user(other, LONG, one, "x"), user(one, LONG, one, "y"), user(LONG)]
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


def test_a_picture_is_computed_once(seeing: Any) -> None:
    """For both places in a prompt, and not for the next turn, whose prefix is found as if it were text."""
    _, _, engine = seeing
    engine.reset()
    rows, image = engine.model.core.executor.pictures, sight.noise(40, 96, 3)
    assert rows is not None
    rows._kept.clear()
    before, first = rows.encoded, user(image, LONG, image, "x")
    answer = engine.chat(first, temperature=0.0, max_tokens=4)
    tiles = 2 * 1 + 1
    assert rows.encoded - before == tiles
    rows._kept.clear()
    turns = [*first, {"role": "assistant", "content": [{"type": "text", "text": answer.text}]}, *user("more")]
    again = engine.chat(turns, temperature=0.0, max_tokens=4)
    assert rows.encoded - before == tiles
    assert again.stats.cached_tokens > len(prompt_of(engine, first)[0]) - 16


def test_a_picture_that_fails_ends_its_own_answer_alone(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts in one step; the others' tokens are those without it."""
    _, _, engine = seeing
    good, bad = (prompt_of(engine, user(sight.noise(40, 96, seed), "x")) for seed in (7, 8))
    wrong = {tile.tobytes() for tile in bad[1][0].tiles}
    batching = Batching(engine.model.bundle, kv_tokens=1024)
    rows = batching._core.executor.pictures
    assert rows is not None
    usual = rows._patches

    def patches(tile: Any, info: Any) -> Any:
        found, places = usual(tile, info)
        return (found * np.float32(np.nan), places) if tile.tobytes() in wrong else (found, places)

    def asked(prompt: tuple[list[int], list[Any]]) -> Any:
        return batching.submit(Request(prompt[0], 5, SamplingParams(temperature=0.0), pictures=prompt[1]))

    try:
        alone = [event.token for event in asked(good)]
        monkeypatch.setattr(rows, "_patches", patches)
        rows._kept.clear()
        with batching.together:
            streams = [asked(one) for one in (good, bad, good)]
        ends = [[*stream] for stream in streams]
        assert [event.token for event in ends[0]] == [event.token for event in ends[2]] == alone
        assert len(ends[1]) == 1 and "the tower computed numbers that are not finite" in str(ends[1][0].error)
        monkeypatch.setattr(rows, "_patches", usual)
        assert [*asked(bad)][-1].finish_reason == "length"
    finally:
        batching.close()


def answered(batching: Batching, *prompts: tuple[list[int], list[Any]], count: int) -> list[list[tuple[int, float]]]:
    """Tokens and log-probabilities of greedy answers to prompts that come together."""
    settings = SamplingParams(temperature=0.0)
    with batching.together:
        streams = [
            batching.submit(Request(tokens, count, settings, pictures=pictures, logprobs=0))
            for tokens, pictures in prompts
        ]
    return [[(event.token, event.logprob) for event in stream] for stream in streams]


def test_preempted_prompts_see_again(seeing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that outgrow the pages have the bits of those alone, though the tower has to compute its rows again."""
    _, _, engine = seeing
    prompts = [prompt_of(engine, user(sight.noise(40, 96, seed), "abcdefg")) for seed in (9, 10, 11)]
    count = 160
    monkeypatch.setattr(picture_rows, "PICTURE_ROWS_BYTES", 1)  # one tile is kept
    batching = Batching(engine.model.bundle, kv_tokens=512)
    rows = batching._core.executor.pictures
    assert rows is not None
    try:
        alone = [answered(batching, one, count=count)[0] for one in prompts]
        batching._core.forget()
        before = rows.encoded
        assert answered(batching, *prompts, count=count) == alone
        assert batching.stats().preemptions > 0
        assert rows.encoded - before > sum(len(pictures[0].tiles) for _, pictures in prompts)
    finally:
        batching.close()


def test_shifted_contexts_keep_what_is_left_of_pictures(seeing: Any) -> None:
    """An answer continues as after a new prompt of the kept tokens, also where a picture lost its middle."""
    _, checkpoint, engine = seeing
    context = 128
    short = mlcpipe.Engine(checkpoint.parent / "bundle", context_length=context)
    batching = Batching(short.model.bundle, kv_tokens=context, context_shift=True)
    plain = Batching(short.model.bundle, kv_tokens=context)
    try:
        for text in ("x", "a text beyond the context " * 3):
            tokens, pictures = prompt_of(engine, user(sight.noise(40, 96, 12), text))
            found = answered(batching, (tokens, pictures), count=context)[0]
            written = [*tokens, *(token for token, _ in found)]
            shifts = [
                at
                for at in range(len(tokens), len(written))
                if tokens_to_drop(at, context) > tokens_to_drop(at - 1, context)
            ]
            at = shifts[0]
            kept = without_dropped(written[:at], tokens_to_drop(at, context))
            assert sum(token < 0 for token in kept) not in (0, pictures[0].rows)
            again = answered(plain, (kept, pictures), count=8)[0]
            assert again == found[at - len(tokens) :][:8]
    finally:
        batching.close()
        plain.close()


def test_what_is_refused(seeing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, engine = seeing
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "adapter", Adapter("one", tmp_path, 0, 1))
        with pytest.raises(UsageError, match="an adapter sees no pictures; found one"):
            engine.chat(user(sight.noise(9, 9), "x"))
    for source, words in (
        (b"no picture", "in no known format; expected JPEG, PNG, WEBP, GIF"),
        (tmp_path / "none.png", "expected a path of a file; found"),
        (3, "expected a path, bytes, a PIL.Image or an array; found int"),
        (None, "found no image"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.chat(user(source, "what?"))
    with pytest.raises(UsageError, match="context is full.*expected pictures of at most 512 rows"):
        engine.chat(user(*[sight.noise(96, 96, seed) for seed in range(20)]))
    with pytest.raises(TemplateError, match="another number of pictures; expected 1; found 2"):
        engine.chat(user(sight.noise(9, 9), "<image>"), allow_control_tokens=True)
    engine.chat(user(sight.noise(9, 9), "x"), max_tokens=1)
    with pytest.raises(UsageError, match="a chat with pictures is not saved"):
        engine.save(tmp_path / "chat")


def test_the_chat_of_the_command_line_shows_pictures(seeing: Any, tmp_path: Path) -> None:
    """With the question that they are shown for, in later turns, after a reload, and again with /regen."""
    _, _, engine = seeing
    image, path = sight.noise(40, 96, 4), tmp_path / "picture.png"
    Image.fromarray(image).save(path)
    shown: list[str] = []
    session = Session(engine, Settings().with_values({"temperature": 0, "max_tokens": 5}))
    commands = Commands(session, shown.append, lambda: None, lambda: None, shown.append)
    renderer = PlainRenderer(lambda text: None)
    assert commands.run(f"/image {path}")
    answer = session.ask("what?", renderer)
    options = {"temperature": 0.0, "max_tokens": 5}
    assert answer.text == engine.chat(user(image, "what?"), **options).text
    turns = [*user(image, "what?"), {"role": "assistant", "content": answer.text}, *user("and?")]
    assert session.ask("and?", renderer).text == engine.chat(turns, **options).text
    assert session.context_tokens()[0] > 40
    session.save(tmp_path / "chat.json")
    again = Session(engine, Settings())
    assert again.load(tmp_path / "chat.json") == 4
    again.undo()
    assert again.regenerate(renderer).text == answer.text
    (tmp_path / "video.mp4").write_bytes(sight_videos.file_of(sight_videos.frames(9, 32, 48), fps=4))
    assert commands.run(f"/video {tmp_path / 'video.mp4'}")
    answer = session.ask("and this?", renderer)
    turns += [{"role": "assistant", "content": session.messages[3]["content"]}]
    turns += [{"role": "user", "content": [
        {"type": "video", "video": tmp_path / "video.mp4"}, {"type": "text", "text": "and this?"}]}]  # fmt: skip
    assert answer.text == engine.chat(turns, **options).text
    assert session.messages[4]["videos"] == [str(tmp_path / "video.mp4")]
    for wrong, words in ((tmp_path / "none", "expected a path of a file"), (tmp_path / "chat.json", "no known format")):
        with pytest.raises(UsageError, match=words):
            commands.run(f"/image {wrong}")
