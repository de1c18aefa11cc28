"""Patches of the families' pictures, bit for bit those of transformers' processors that use Pillow; what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are resized by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from PIL import Image

from mlcpipe.bundle import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors.picture import last_keys, whole_pictures
from tests.models.sight_families import FAMILIES, SeeingFamily

RNG = np.random.default_rng(1)
SIZES = [(1, 1), (1, 300), (300, 1), (64, 64), (63, 65), (95, 97), (7, 40)]
SIZES += [(int(h), int(w)) for h, w in RNG.integers(1, 260, (12, 2))]


def info_of(family: SeeingFamily, preprocessor: Mapping[str, Any] = {}, **config: Any) -> VisionInfo:
    return build_tower({**family.config, **config}, {**family.preprocessor, **preprocessor}).info


def gemma3(image: Image.Image) -> list[Any]:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return list(Gemma3ImageProcessorPil(**FAMILIES["gemma3"].preprocessor)([image])["pixel_values"])


def mistral3(image: Image.Image) -> list[Any]:
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    square = {"patch_size": {"height": 16, "width": 16}}
    return list(PixtralImageProcessorPil(**{**FAMILIES["mistral3"].preprocessor, **square})([image])["pixel_values"])


def internvl(image: Image.Image) -> list[Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor = GotOcr2ImageProcessorPil(**FAMILIES["internvl"].preprocessor)
    return list(processor([image], crop_to_patches=True)["pixel_values"])


def gemma4(image: Image.Image) -> list[Any]:
    """The patches without padding, which the model brings from 0 ... 1 to -1 ... 1."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    found = Gemma4ImageProcessorPil(**FAMILIES["gemma4"].preprocessor)([image])
    return [2 * (found["pixel_values"][0][: 9 * found["num_soft_tokens_per_image"][0]] - np.float32(0.5))]


@pytest.mark.parametrize("reference", [gemma3, mistral3, internvl, gemma4], ids=lambda one: one.__name__)
def test_patches_are_those_of_transformers(reference: Any) -> None:
    info = info_of(FAMILIES[reference.__name__])
    processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
    patch, merge = info.settings["patch"], info.settings["merge"]
    for size in SIZES:
        if reference in (mistral3, gemma4) and max(size) > 64 * min(size):
            continue  # transformers makes no rows of them
        image = Image.fromarray(np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8))
        expected, made = reference(image), processor.prepare(image, info)
        assert len(made.tiles) == len(expected)
        assert made.rows == sum(len(processor.patches(one, info)[0]) - info.class_token for one in made.tiles)
        for tile, pixels in zip(made.tiles, expected):
            found, places = processor.patches(tile, info)
            rows = len(found) - info.class_token
            found = found[:rows].reshape(rows * merge * merge, -1)
            assert len(found) == len(np.unique(places[:rows]))
            order = np.argsort(places[:rows].reshape(-1))  # back to rows of patches
            if reference is gemma4:
                np.testing.assert_array_equal(found[order], pixels, err_msg=str(size))
                continue
            unfolded = torch.nn.functional.unfold(torch.from_numpy(pixels)[None], patch, stride=patch)[0].T.numpy()
            np.testing.assert_array_equal(found[order], unfolded, err_msg=str(size))


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gemma3", {"do_pan_and_scan": True}, {}, "do_pan_and_scan is not supported"),
    ("gemma3", {"size": {"height": 64, "width": 32}}, {}, "field width is not supported"),
    ("gemma3", {"size": {"height": 128, "width": 128}}, {}, "pixels that make 8 patches of 8"),
    ("gemma3", {}, {"mm_tokens_per_image": 9}, "the square of a divisor of 8"),
    ("gemma3", {}, {"text_config": {"sliding_window": 15}}, "at least the 16 rows of a picture"),
    ("mistral3", {"size": {"height": 64, "width": 64}}, {}, "longest_edge alone"),
    ("mistral3", {}, {"vision_feature_layer": -2}, "vision_feature_layer is not supported"),
    ("mistral3", {"size": {"longest_edge": 8192}}, {"spatial_merge_size": 1}, "at most 16384 rows"),
    ("mistral3", {"patch_size": 16}, {}, "field patch_size in preprocessor_config.json; expected 8"),
    ("gemma4", {"do_normalize": True}, {}, "do_normalize is not supported"),
    ("gemma4", {"max_soft_tokens": 71}, {}, r"one of \(70, 140"),
    ("gemma4-windows", {"max_soft_tokens": 140}, {}, "windows of 140 tokens or more"),
    ("internvl", {"max_patches": 1000}, {}, "an integer from 1 to 64"),
    ("internvl", {"size": {"height": 48, "width": 48}}, {}, "4 patches of 8 pixels"),
    ("internvl", {}, {"vision_config": {"image_size": []}}, "image_size"),
    ("internvl", {"do_rescale": False}, {}, "do_rescale is not supported"),
]


@pytest.mark.parametrize(("family", "preprocessor", "config", "words"), REFUSED, ids=str)
def test_fields_that_are_not_honoured_are_refused(family: str, preprocessor: Any, config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        info_of(FAMILIES[family], preprocessor, **config)


def test_rows_of_one_picture_are_in_one_forward() -> None:
    """Chunks end before a picture, or after it where they begin with it; what is left of a found one is whole, too."""
    tokens = [1, 2, -3, -4, -5, 7, -1, -2, 8]
    assert [whole_pictures(tokens, 0, end, 9) for end in range(1, 10)] == [1, 2, 2, 2, 5, 6, 6, 8, 9]
    assert [whole_pictures(tokens, 2, end, 9) for end in (3, 4, 5)] == [5, 5, 5]
    assert whole_pictures(tokens, 3, 4, 5) == 5
    assert whole_pictures(tokens, 2, 4, 4) == 2  # no room: later
    assert last_keys(tokens, 0, 9).tolist() == [0, 1, 4, 4, 4, 5, 7, 7, 8]
    assert last_keys(tokens, 3, 4).tolist() == [4, 4, 5, 6]
    joined = [1, ~(5 << 20), ~(5 << 20 | 1), ~(6 << 20 | 7), ~(6 << 20 | 8), 2]  # by a shifted context
    assert last_keys(joined, 0, 6).tolist() == [0, 2, 2, 4, 4, 5]
    assert [whole_pictures(joined, 1, end, 3) for end in (2, 3, 4)] == [3, 3, 3]
