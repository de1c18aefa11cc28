"""LLaVA-OneVision's pictures: tiles as transformers' processor cuts them, and rows as its model packs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are resized by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from PIL import Image
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from mlcpipe.bundle import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors import llava_onevision
from tests.models.sight_families import LLAVA_ONEVISION

RNG = np.random.default_rng(4)
SIZES = [(1, 1), (1, 40), (40, 1), (16, 16), (48, 48), (31, 33), (200, 90), *RNG.integers(1, 90, (12, 2)).tolist()]
PIXELS = RNG.standard_normal((48, 5), np.float32)  # a tower: from a patch's numbers to a row
NEWLINE = RNG.standard_normal(5, np.float32)


def info_of(preprocessor: Mapping[str, Any] = MappingProxyType({}), **config: Any) -> VisionInfo:
    return build_tower({**LLAVA_ONEVISION.config, **config}, {**LLAVA_ONEVISION.preprocessor, **preprocessor}).info


def unfolded(tiles: Any) -> Any:
    """Tiles [n, 3, 16, 16] -> patches [n, 16, 48]."""
    return torch.nn.functional.unfold(torch.as_tensor(np.asarray(tiles)), 4, stride=4).transpose(1, 2)


def test_pictures_are_those_of_transformers() -> None:
    """One alone: its tiles bit for bit, and its rows; many of these are resampled."""
    info = info_of().model_copy(update={"width": 5})
    processor, resampled = LlavaOnevisionImageProcessorPil(**LLAVA_ONEVISION.preprocessor), 0
    config = SimpleNamespace(**LLAVA_ONEVISION.config)
    config.vision_config = SimpleNamespace(**LLAVA_ONEVISION.config["vision_config"])

    def encoded(tile: Any) -> Any:
        patches, places = llava_onevision.patches(tile, info)
        assert places.reshape(-1).tolist() == [*range(16), 0]
        return np.concatenate([patches[:-1] @ PIXELS, NEWLINE[None]])

    for size in SIZES:
        image = Image.fromarray(RNG.integers(0, 256, (*size, 3), np.uint8))
        found = processor([image])
        made = llava_onevision.prepare(image, info)
        expected = unfolded(found["pixel_values"][0])
        cut = [made.tiles[0]]
        for canvas in made.tiles[1:]:
            cut += [
                canvas[r : r + 16, c : c + 16] for r in range(0, len(canvas), 16) for c in range(0, canvas.shape[1], 16)
            ]
        if len(made.tiles) > 1:  # else nothing of the grid is kept
            assert len(cut) == len(expected)
        for tile, patches in zip(cut, expected):
            np.testing.assert_array_equal(
                llava_onevision.patches(tile, info)[0][:-1], patches.numpy(), err_msg=str(size)
            )
        features = [expected @ torch.from_numpy(PIXELS)]
        packed, _ = LlavaOnevisionModel.pack_image_features(
            SimpleNamespace(config=config), features, torch.tensor([size]), torch.from_numpy(NEWLINE), "anyres_max_2"
        )
        rows = np.concatenate([llava_onevision.packed(made, tile, encoded) for tile in range(len(made.tiles))])
        assert made.layout == (len(rows),) and sum(made.counts) == len(rows) <= info.rows + info.packed
        np.testing.assert_allclose(rows, packed[0].numpy(), rtol=0, atol=1e-5, err_msg=str(size))
        resampled += len(made.held) > 0 and made.held[0] * (made.held[1] + 1) != made.counts[1]
    assert 3 < resampled < len(SIZES) - 3


def test_several_pictures_are_squares() -> None:
    info, processor = info_of(), LlavaOnevisionImageProcessorPil(**LLAVA_ONEVISION.preprocessor)
    shown = [Image.fromarray(RNG.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]
    found = processor([shown])
    for image, expected in zip(shown, found["pixel_values"]):
        made = llava_onevision.prepare_among(image, info)
        assert made.layout == (17,) and len(made.tiles) == 1
        tile = llava_onevision.patches(made.tiles[0], info)[0][:-1]
        np.testing.assert_array_equal(tile, unfolded(expected[:1])[0].numpy(), err_msg=str(image.size))


def test_the_padding_is_part_of_what_tells_pictures_apart() -> None:
    info = info_of()
    black = [llava_onevision.prepare(Image.new("RGB", size), info) for size in ((47, 29), (47, 20))]
    assert [tile.shape for tile in black[0].tiles] == [tile.shape for tile in black[1].tiles]
    assert black[0].rows != black[1].rows and black[0].number != black[1].number


def test_what_is_not_honoured_is_refused() -> None:
    vision = LLAVA_ONEVISION.config["vision_config"]
    for preprocessor, config, words in (
        ({"do_pad": False}, {}, "do_pad is not supported"),
        ({"crop_size": 16}, {}, "crop_size is not supported"),
        ({"size": {"height": 32, "width": 32}}, {}, "4 patches of 4"),
        ({"image_grid_pinpoints": [[16, 17]]}, {}, "multiples of 16"),
        ({"image_grid_pinpoints": [[16, 1 << 30]]}, {}, "million pixels"),
        ({"image_grid_pinpoints": [[-16, -16]]}, {}, "multiples of 16"),
        ({"image_grid_pinpoints": [[16, 16]]}, {}, "those of config.json"),
        ({}, {"image_grid_pinpoints": "all"}, "multiples of 16"),
        ({}, {"vision_aspect_ratio": "anyres"}, "anyres_max_9"),
        ({}, {"vision_feature_layer": -2}, "vision_feature_layer is not supported"),
        ({}, {"vision_feature_select_strategy": "default"}, "select_strategy is not supported"),
        ({}, {"vision_config": {**vision, "model_type": "clip_vision_model"}}, "model_type is not supported"),
    ):
        with pytest.raises(ConfigError, match=words):
            info_of(preprocessor, **config)
