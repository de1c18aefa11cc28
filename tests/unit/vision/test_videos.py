"""Frames of videos against transformers' processors: which are taken, their pixels, patches, times and texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from mlcpipe.bundle import VisionInfo
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.runtime.pictures import seen
from mlcpipe.vision import VIDEO_PROCESSOR, build_tower
from mlcpipe.vision.processors import idefics3, qwen3_vl
from mlcpipe.vision.processors.picture import Picture
from mlcpipe.vision.processors.torch_resize import resized
from mlcpipe.vision.processors.video import Video, parts_of
from tests.models import sight, sight_videos
from tests.models.sight import SAMPLING
from tests.models.sight_videos import PREPROCESSOR, frames

FILES = [(1, 25.0), (3, 30.0), (24, 8.0), (100, 29.97), (301, 24.0), (4000, 60.0), (9000, 1.5), (70, 0.5)]


def qwen(**fields: Any) -> VisionInfo:
    vision = {
        "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "depth": 1,
        "deepstack_visual_indexes": [],
    }  # fmt: skip
    whole = {"model_type": "qwen3_vl", "vision_config": vision, "text_config": {"hidden_size": 64}}
    pictures = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    return build_tower(whole, {**pictures, VIDEO_PROCESSOR: {**PREPROCESSOR, **fields}}).info


def smolvlm(**fields: Any) -> VisionInfo:
    vision = {"hidden_size": 32, "num_attention_heads": 2, "image_size": sight.TILE, "patch_size": 8}
    whole = {"model_type": "smolvlm", "vision_config": vision, "text_config": {}, "scale_factor": 2}
    return build_tower(whole, {**sight.PREPROCESSOR, "video_sampling": SAMPLING, **fields}).info


def parts(shown: Any, info: VisionInfo, **given: Any) -> tuple[list[str], list[Picture]]:
    found = [*parts_of(Video(shown, **given), "the video", info)]
    return [one for one in found if isinstance(one, str)], [one for one in found if isinstance(one, Picture)]


@pytest.mark.parametrize(("resample", "mode"), [(1, "lanczos"), (2, "bilinear"), (3, "bicubic")])
def test_bytes_are_resized_as_by_torch(resample: int, mode: str) -> None:
    rng = np.random.default_rng(5)
    for size in ((1, 1), (2, 50), (64, 48), (97, 31), (301, 120)):
        for pixels in (rng.integers(0, 256, (*size, 3), np.uint8), rng.choice([0, 255], (*size, 3)).astype(np.uint8)):
            for height, width in ((32, 32), (7, 64), (size[0], 5), (1, 1), (130, size[1])):
                expected = sight_videos.resized(pixels[None], height, width, mode)[0].permute(1, 2, 0).numpy()
                found = resized(pixels, height, width, resample)
                np.testing.assert_array_equal(found, expected, err_msg=f"{size} {height} {width}")


def test_frames_of_a_file_are_those_that_transformers_takes() -> None:
    for fields in ({}, {"fps": 0.7, "max_frames": 11}, {"fps": 30, "min_frames": 5, "max_frames": 768}):
        info, config = qwen(**fields), {**PREPROCESSOR, **fields}
        own = SimpleNamespace(**{name: config[name] for name in ("fps", "min_frames", "max_frames")})
        for count, fps in FILES:
            expected = Qwen3VLVideoProcessor.sample_frames(own, VideoMetadata(count, fps))
            assert qwen3_vl.sampled(info.video, count, fps) == expected.tolist(), (fields, count, fps)
    for sampling in (SAMPLING, {**SAMPLING, "fps": 2.5, "max_frames": 64}):
        info, own = smolvlm(video_sampling=sampling), SimpleNamespace()
        for count, fps in FILES:
            about = VideoMetadata(count, fps, duration=count / fps)
            expected = SmolVLMVideoProcessor.sample_frames(own, about, sampling["max_frames"], sampling["fps"])
            assert idefics3.sampled(info.video, count, fps) == expected.tolist(), (sampling, count, fps)


@pytest.mark.parametrize(
    "fields", [{}, {"cap_pixels_per_frame": True, "max_video_tokens": 5}, {"cap_pixels_per_frame": True}], ids=str
)
def test_frames_of_qwen_are_those_of_transformers(fields: dict[str, Any]) -> None:
    """Patches bit for bit, for an odd number of frames too; times between those of two frames."""
    info, config = qwen(**fields), {"max_video_tokens": 768, **PREPROCESSOR, **fields}
    for count, height, width in ((2, 30, 41), (3, 90, 64), (4, 7, 3), (6, 33, 150), (5, 8, 8)):
        shown, times = frames(count, height, width, count), [0.3 * at for at in range(count)]
        expected = sight_videos.qwen_inputs(shown, config)
        texts, pictures = parts(shown, info, times_s=times)
        made = np.concatenate([qwen3_vl.patches(*one.tiles, info)[0] for one in pictures])
        np.testing.assert_array_equal(made.reshape(-1, info.numbers), expected["pixel_values_videos"].numpy())
        assert len(pictures) == expected["video_grid_thw"][0, 0] == len(texts)
        assert max(one.rows for one in pictures) <= info.rows
        between = Qwen3VLProcessor._calculate_timestamps(None, list(range(count)), 1 / 0.3)
        assert texts == [f"<{one:.1f} seconds>" for one in between]


def test_a_patch_of_frames_has_no_more_rows_than_a_call_of_the_tower() -> None:
    info = qwen(size={"shortest_edge": 512, "longest_edge": 1 << 20})
    for size in ((300, 400), (9, 1600), (1600, 9), (1000, 1000)):
        height, width = qwen3_vl.video_size(2, *size, info)
        assert height * width <= 64 * info.rows and max(height, width) > 60


def test_frames_of_smolvlm_are_those_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing_smolvlm, "num2words", ["none", "one", "two", "three"].__getitem__)
    config = {**sight.PREPROCESSOR, "size": None}
    info = smolvlm(size={"longest_edge": 100})
    own = SimpleNamespace(
        image_seq_len=info.rows, image_token="<image>", fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )  # fmt: skip
    for shown, fps in ((frames(1, 20, 50), 1.0), (frames(3, 90, 31), 0.008), (frames(2, 48, 48), 0.0002)):
        expected = sight_videos.smolvlm_inputs(shown, 100, sight.TILE, config)
        times = [at / fps for at in range(len(shown))]
        found = [*parts_of(Video(shown, times), "the video", info)]
        about = VideoMetadata(len(shown), fps, duration=times[-1], frames_indices=[*range(len(shown))])
        text = processing_smolvlm.SmolVLMProcessor.replace_video_token(
            own, {"pixel_values": expected, "video_metadata": [about]}, 0
        )
        image = "<fake_token_around_image><global-img>" + "<image>" * info.rows + "<fake_token_around_image>"
        assert "".join(one if isinstance(one, str) else image for one in found) == text
        pictures = [one for one in found if isinstance(one, Picture)]
        for picture, reference in zip(pictures, expected[0], strict=True):
            patches, _ = idefics3.patches(*picture.tiles, info)
            unfolded = torch.nn.functional.unfold(reference[None], 8, stride=8)[0].T.numpy().reshape(3, 2, 3, 2, -1)
            np.testing.assert_array_equal(patches, unfolded.transpose(0, 2, 1, 3, 4).reshape(9, -1))


def test_numbers_are_written_in_words() -> None:
    written = {0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    written[999] = "nine hundred and ninety-nine"
    assert written == {number: idefics3._words(number) for number in written}


def test_equal_frames_of_videos_are_equal_pictures() -> None:
    shown, info = frames(4, 40, 40), qwen()
    _, (first, second) = parts(shown, info)
    _, (again, other) = parts(np.concatenate([shown[:2], shown[:2] + 1]), info)
    assert len({first.number, second.number, other.number}) == 3 and again.number == first.number
    _, (still, _) = parts(shown[[0, 0, 2, 2]], info)
    assert still.number not in (first.number, second.number)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shown": []}, "expected 1 to 6 frames; found 0"),
        ({"shown": frames(7, 8, 8)}, "expected 1 to 6 frames; found 7"),
        ({"shown": [frames(1, 8, 8)[0], frames(1, 8, 9)[0]]}, "one size, 8 x 8; found 9 x 8"),
        ({"shown": [b"no picture"]}, r"the video\[0\] is in no known format"),
        ({"shown": ["/no/such.png"]}, r"the video\[0\]; expected a path of a file"),
        ({"shown": frames(2, 8, 1700)}, "sides that differ at most 200 times"),
        ({"shown": frames(2, 8, 8), "times_s": [1.0]}, "times_s; expected 2 rising numbers"),
        ({"shown": frames(2, 8, 8), "times_s": [1.0, 0.5]}, "times_s; expected 2 rising numbers"),
        ({"shown": frames(2, 8, 8), "times_s": [float("nan"), 1.0]}, "times_s; expected 2 rising numbers"),
        ({"shown": frames(2, 8, 8), "times_s": [0, 1e9]}, "times_s; expected 2 rising numbers"),
        ({"shown": frames(2, 8, 8), "times_s": "01"}, "times_s; expected 2 rising numbers"),
        ({"shown": b"", "times_s": [0.0]}, "expected a list of frames"),
        ({"shown": 3}, "a path, the bytes of a file, or a list of frames; found int"),
    ],
    ids=str,
)
def test_other_things_are_refused_in_one_line(given: dict[str, Any], words: str) -> None:
    pytest.importorskip("av", reason="files are decoded by PyAV")
    with pytest.raises(UsageError, match=words) as caught:
        parts(given.pop("shown"), qwen(), **given)
    assert "\n" not in str(caught.value)


def test_models_that_see_no_videos_say_so() -> None:
    message = [{"role": "user", "content": [{"type": "video", "video": frames(2, 8, 8)}]}]
    with pytest.raises(UsageError, match="the model sees no pictures"):
        seen(message, None, 100)
    without = smolvlm(video_sampling=None)
    assert without.video is None
    with pytest.raises(UsageError, match="the model sees no videos"):
        seen(message, without, 100)
    with pytest.raises(UsageError, match="the context is full.*at most 3 rows"):
        seen(message, qwen(), 3)


def test_fields_that_are_not_honoured_are_refused() -> None:
    for fields, words in (
        ({"do_rescale": False}, "do_rescale"), ({"patch_size": 8}, "patch_size"), ({"num_frames": 3}, "num_frames"),
        ({"size": {"shortest_edge": 9000, "longest_edge": 6000}}, "pixels of a video"), ({"fps": 0}, "fps"),
        ({"min_frames": 7}, "max_frames"), ({"image_mean": [0.5]}, "image_mean"), ({"resample": 0}, "resample"),
        ({"cap_pixels_per_frame": 1}, "cap_pixels_per_frame"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{words}.*video_processor|{words}"):
            qwen(**fields)
    for sampling in ({**SAMPLING, "fps": None}, {**SAMPLING, "max_frames": 1000}, {"fps": 1}, 3):
        with pytest.raises(ConfigError, match="video_sampling"):
            smolvlm(video_sampling=sampling)
