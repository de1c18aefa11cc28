"""Tiles and patches of Idefics3 and SmolVLM, bit for bit those of transformers' processor that uses Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are resized by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from PIL import Image
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from mlcpipe.bundle import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors import idefics3

SIZES = [(1, 1), (1, 400), (400, 1), (37, 53), (48, 48), (49, 48), (95, 97), (130, 96), (3, 300), (250, 249)]
RNG = np.random.default_rng(0)
RANDOM = [(int(h), int(w)) for h, w in RNG.integers(1, 320, (60, 2))]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"do_image_splitting": False},
    {"do_resize": False},
    {"resample": 3, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3, 0.7, 0.9]},
    {"size": {"longest_edge": 60}},
    {"max_image_size": {"longest_edge": 56}, "size": {"longest_edge": 4 * 56}},
]


def info_of(config: dict[str, Any], tile: int, patch: int = 8) -> VisionInfo:
    vision = {"hidden_size": 32, "num_attention_heads": 2, "image_size": tile, "patch_size": patch}
    whole = {"model_type": "idefics3", "vision_config": vision, "text_config": {}, "scale_factor": 1}
    return build_tower(whole, config).info


def picture_of(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8))


MANY = {"resample": 1}  # sizes, with what is the default


@pytest.mark.parametrize("options", [*OPTIONS, pytest.param(MANY, marks=pytest.mark.everything)], ids=str)
def test_pixels_are_those_of_transformers(options: dict[str, Any]) -> None:
    config = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 48}, **options}
    tile = config["max_image_size"]["longest_edge"]
    processor, info = SmolVLMImageProcessorPil(**config), info_of(config, tile)
    for size in SIZES + RANDOM[: len(RANDOM) if options == MANY else 0 if options else 12]:
        if options.get("do_resize") is False and max(size) > 40 * min(size):
            continue  # hundreds of tiles
        image = picture_of(size)
        expected = processor([image], return_tensors="np", return_row_col_info=True)
        made = idefics3.prepare(image, info)
        pixels = expected["pixel_values"][0]
        assert len(made.tiles) == len(pixels)
        assert sum(isinstance(part, int) for part in made.layout) == len(pixels)
        assert expected["rows"][0][0] * expected["cols"][0][0] == len(pixels) - 1
        for one, reference in zip(made.tiles, pixels):
            patches, _ = idefics3.patches(one, info)
            unfolded = torch.nn.functional.unfold(torch.from_numpy(reference)[None], 8, stride=8)[0].T.numpy()
            np.testing.assert_array_equal(patches, unfolded, err_msg=str(size))


@pytest.mark.parametrize("side", [2, 7, 26, 27, 32, 37, 48])
def test_places_are_those_of_the_bucketised_table(side: int) -> None:
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.clamp(torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1.0 - 1e-6)
    bucket = torch.bucketize(fractions, boundaries, right=True).numpy()
    np.testing.assert_array_equal(idefics3._places(side), (bucket[:, None] * side + bucket).reshape(-1))


def test_pictures_are_equal_by_their_pixels() -> None:
    info = info_of({"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 48}}, 48)
    one, same, other = (idefics3.prepare(picture_of(size), info) for size in ((50, 60), (50, 60), (51, 60)))
    assert one.number == same.number != other.number
    assert one.id_of(0) == same.id_of(0) != one.id_of(1)
    assert one.id_of(5) < 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_rescale": False}, {"rescale_factor": 0.5}, {"do_center_crop": True}, {"size": {"height": 3, "width": 4}},
        {"size": {"longest_edge": 5000}}, {"image_mean": [0.5]}, {"resample": 9},
        {"max_image_size": {"longest_edge": 40}}, {"do_normalize": False},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_are_not_honoured_are_refused(wrong: dict[str, Any]) -> None:
    config = {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 48}, **wrong}
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}|longest_edge"):
        info_of(config, 48)
