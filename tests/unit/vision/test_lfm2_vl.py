"""LFM2-VL's pictures: resized as torch resizes bytes, and cut as transformers' processor cuts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from PIL import Image

from mlcpipe.bundle import VisionInfo
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors import lfm2_vl
from mlcpipe.vision.processors.torch_resize import bilinear
from tests.models.sight_families import LFM2_VL

RNG = np.random.default_rng(3)
SIZES = [(1, 1), (1, 40), (40, 1), (64, 64), (31, 33), (95, 97), *RNG.integers(1, 200, (10, 2)).tolist()]


def info_of(**preprocessor: Any) -> VisionInfo:
    return build_tower(LFM2_VL.config, {**LFM2_VL.preprocessor, **preprocessor}).info


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bytes_are_resized_as_by_torch(size: tuple[int, int]) -> None:
    pixels = RNG.integers(0, 256, (*size, 3), np.uint8)
    for height, width in ((32, 32), (7, 64), (size[0], 5), (1, 1), (128, size[1])):
        given = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        expected = torch.nn.functional.interpolate(given, (height, width), mode="bilinear", antialias=True)
        found = bilinear(pixels, height, width)
        np.testing.assert_array_equal(found, expected[0].permute(1, 2, 0).numpy(), err_msg=str((height, width)))


@pytest.mark.everything  # with torchvision, transformers prepares the pictures of all families by it: CI is without
def test_patches_are_those_of_transformers() -> None:
    """Bit for bit, with the tiles that they are of, and in the order of their rows."""
    pytest.importorskip("torchvision", reason="transformers' processor needs torchvision")
    from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor

    info, split = info_of(), 0
    for size in SIZES:
        if max(size) > 8 * min(size):
            continue  # more rows than padding has room for
        image = Image.fromarray(RNG.integers(0, 256, (*size, 3), np.uint8))
        found = Lfm2VlImageProcessor(**LFM2_VL.preprocessor)([image], return_tensors="pt", return_row_col_info=True)
        made = lfm2_vl.prepare(image, info)
        rows, columns, (height, width) = (found[f"image_{one}"][0] for one in ("rows", "cols", "sizes"))
        tiles = [f"<|img_row_{r + 1}_col_{c + 1}|>16" for r in range(rows) for c in range(columns)]
        whole = str(int(height) * int(width) // 64)
        inner = whole if len(tiles) == 1 else f"{''.join(tiles)}<|img_thumbnail|>{whole}"
        assert "".join(map(str, made.layout)) == f"<|image_start|>{inner}<|image_end|>"
        assert len(made.tiles) == len(found["pixel_values"])
        split += len(made.tiles) > 1
        for tile, pixels, (rows, columns) in zip(made.tiles, found["pixel_values"], found["spatial_shapes"].tolist()):
            ours, places = lfm2_vl.patches(tile, info)
            flat, at = ours.reshape(rows * columns, -1), places.reshape(rows * columns, 4)
            assert (at[:, 2:] == (rows, columns)).all()
            order = np.argsort(at[:, 0] * columns + at[:, 1])
            np.testing.assert_array_equal(flat[order], pixels[: rows * columns].numpy(), err_msg=str(size))
    assert split > 3


def test_what_is_not_honoured_is_refused() -> None:
    for fields, words in (
        ({"resample": 3}, "resample is not supported"),
        ({"max_pixels_tolerance": 3.0}, "max_pixels_tolerance is not supported"),
        ({"encoder_patch_size": 8}, "encoder_patch_size is not supported"),
        ({"tile_size": 20}, "a multiple of 8"),
        ({"max_tiles": 1000}, "max_tiles"),
    ):
        with pytest.raises(ConfigError, match=words):
            info_of(**fields)
    with pytest.raises(UsageError, match="sides that make at most 16 rows"):
        lfm2_vl.prepare(Image.new("RGB", (1, 400)), info_of())


def test_a_picture_of_too_many_rows_is_refused_before_it_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    resized: list[tuple[int, int]] = []

    def seen(pixels: Any, height: int, width: int) -> Any:
        resized.append((height, width))
        return bilinear(pixels, height, width)

    monkeypatch.setattr(lfm2_vl, "bilinear", seen)
    for size in ((1, 400), (400, 1), (1, 1 << 15)):
        with pytest.raises(UsageError, match="sides that make at most 16 rows"):
            lfm2_vl.prepare(Image.new("RGB", size), info_of())
    assert not resized
    lfm2_vl.prepare(Image.new("RGB", (40, 40)), info_of())
    assert resized
