"""Pixels, patches and positions of Qwen's pictures, bit for bit those of transformers' processor that uses Pillow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are resized by Pillow")
torch = pytest.importorskip("torch", reason="the references are computed by torch")
pytest.importorskip("transformers", reason="the references are transformers processors")

from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel, Qwen3VLTextRotaryEmbedding
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from mlcpipe.bundle import VisionInfo
from mlcpipe.bundle.memory import tower_pages
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.nn import mrope
from mlcpipe.runtime.serving.picture_positions import moved_by
from mlcpipe.runtime.serving.sequence import ScheduledRequest, Sequence
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors import glm_ocr, qwen2_5_vl, qwen2_vl, qwen3_vl
from mlcpipe.vision.processors.picture import Picture
from tests.models.sight_families import GLM_OCR

SIZES = [(1, 1), (1, 200), (200, 1), (37, 53), (8, 8), (20, 12), (28, 20), (64, 64), (97, 31), (3, 300), (250, 249)]
RANDOM = [(int(h), int(w)) for h, w in np.random.default_rng(0).integers(1, 200, (200, 2))]
CONFIG: dict[str, Any] = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 4096}}
OPTIONS: list[dict[str, Any]] = [
    {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    {"resample": 2, "merge_size": 1, "temporal_patch_size": 3},
    {"size": None, "min_pixels": 100, "max_pixels": 700},
]


def info_of(config: dict[str, Any], **vision: Any) -> VisionInfo:
    sizes = {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "depth": 1, **vision}
    sizes |= {"spatial_merge_size": config.get("merge_size", 2), "deepstack_visual_indexes": []}
    sizes["temporal_patch_size"] = config.get("temporal_patch_size", 2)
    whole = {"model_type": "qwen3_vl", "vision_config": {**sizes, **vision}, "text_config": {"hidden_size": 64}}
    return build_tower(whole, {name: value for name, value in config.items() if value is not None}).info


def picture_of(size: tuple[int, int], info: VisionInfo) -> tuple[Image.Image, Picture]:
    image = Image.fromarray(np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8))
    return image, qwen2_vl.prepare(image, info)


MANY = {"resample": 3}  # sizes, with what is the default


@pytest.mark.parametrize("options", [{}, *OPTIONS, pytest.param(MANY, marks=pytest.mark.everything)], ids=str)
def test_patches_are_those_of_transformers(options: dict[str, Any]) -> None:
    config = {**CONFIG, **options}
    processor, info = Qwen2VLImageProcessorPil(**config), info_of(config)
    for size in SIZES + RANDOM[: len(RANDOM) if options == MANY else 0 if options else 20]:
        if max(size) > 200 * min(size):
            continue
        image, made = picture_of(size, info)
        expected = processor([image], return_tensors="np")
        (tile,), grid = made.tiles, expected["image_grid_thw"][0]
        patches, places = qwen2_vl.patches(tile, info)
        assert made.layout == (len(patches),) and len(patches) <= info.rows, size
        np.testing.assert_array_equal(patches.reshape(-1, info.numbers), expected["pixel_values"], err_msg=str(size))
        of_patches = places.reshape(-1, 4)
        position = get_vision_position_ids(torch.from_numpy(grid)[None], info.settings["merge"]).numpy()
        np.testing.assert_array_equal(of_patches[:, :2], position)
        assert (of_patches[:, 2:] == grid[1:]).all()


def test_patches_of_glm_ocr_are_those_of_transformers() -> None:
    """Whose bounds count all frames, an odd number of pixels too, and whose sides grow to a square first."""
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    sizes: dict[str, Any] = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    for bounds in ((512, 8192), (513, 1001), (1, 300)):
        config = {**sizes, "size": dict(zip(("shortest_edge", "longest_edge"), bounds)), "image_mean": [0.5, 0.4, 0.6]}
        processor = Glm46VImageProcessorPil(**config)
        info = build_tower(GLM_OCR.config, config).info
        for size in (*SIZES[:9], *RANDOM[:40], (1, 190), (7, 900)):
            image = Image.fromarray(np.random.default_rng(size[0]).integers(0, 256, (*size, 3), np.uint8))
            made = glm_ocr.prepare(image, info)
            found = glm_ocr.patches(made.tiles[0], info)[0]
            assert made.layout == (len(found),) and len(found) <= info.rows, size
            expected = processor([image], return_tensors="np")["pixel_values"]
            np.testing.assert_array_equal(found.reshape(-1, info.numbers), expected, err_msg=str(size))
    with pytest.raises(UsageError, match="sides that differ at most 200 times"):
        glm_ocr.prepare(Image.new("RGB", (8, 1700)), info)


def test_fields_of_glm_ocr_that_are_not_honoured_are_refused() -> None:
    vision = GLM_OCR.config["vision_config"]
    for preprocessor, fields, words in (
        ({"do_rescale": False}, {}, "do_rescale"), ({"temporal_patch_size": 3}, {}, "temporal_patch_size"),
        ({"size": {"shortest_edge": 9000, "longest_edge": 8192}}, {}, "pixels of a picture"),
        ({}, {"out_hidden_size": 63}, "out_hidden_size"), ({}, {"attention_dropout": 0.1}, "attention_dropout"),
        ({}, {"num_heads": 5}, "num_heads"), ({}, {"in_channels": 1}, "in_channels"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            whole = {**GLM_OCR.config, "vision_config": {**vision, **fields}}
            build_tower(whole, {**GLM_OCR.preprocessor, **preprocessor})


class _Model(SimpleNamespace):
    """What `get_rope_index` reads of a model."""

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    get_vision_position_ids = Qwen3VLModel.get_vision_position_ids


def test_positions_are_those_of_transformers() -> None:
    """Of texts with pictures, also one that is there twice, and of what an answer adds, in any part of it."""
    info, rng = info_of(CONFIG), np.random.default_rng(1)
    pictures = [picture_of(size, info)[1] for size in ((40, 90), (64, 20), (30, 30))]
    for _ in range(10):
        tokens, kinds, grids = [5], [0], list[list[int]]()
        for one in rng.integers(0, 3, int(rng.integers(1, 5))):
            picture, text = pictures[one], int(rng.integers(1, 9))
            tokens += [*map(picture.id_of, range(picture.rows)), *[5] * text]
            kinds += [1] * picture.rows + [0] * text
            grids.append([1, *(side // 4 for side in picture.tiles[0].shape[:2])])
        known = torch.tensor([max(0, token) for token in tokens])[None]
        expected, delta = Qwen3VLModel.get_rope_index(
            _Model(), known, torch.tensor(kinds)[None], image_grid_thw=torch.tensor(grids)
        )
        request = ScheduledRequest(tuple(tokens), 9, pictures={one.number: one for one in pictures})
        sequence, count, last = Sequence(0, request, [], []), len(tokens), len(tokens) - text
        after = np.arange(count, count + 5) + int(delta[0, 0])
        whole = np.concatenate([expected[:, 0].numpy(), np.broadcast_to(after, (3, 5))], axis=1)
        for begin, rows in ((0, count + 5), (3, 7), (last - 2, 2), (last - 1, 3), (last, 4), (count, 1)):
            found = np.broadcast_to(sequence.rope_positions(begin, rows), (3, rows))
            np.testing.assert_array_equal(found, whole[:, begin : begin + rows])
        moved, _ = moved_by(tokens[:1] + tokens[3:], request.pictures)  # the first two rows are dropped
        assert moved is not None
        np.testing.assert_array_equal(moved[:, 1:], expected[:, 0, 3:last].numpy())
    assert Sequence(0, ScheduledRequest((1, 2), 9), [], []).moved is None


@pytest.mark.parametrize("sections", [(24, 20, 20), (11, 11, 10), (4, 2, 2), (2, 5, 9)], ids=str)
def test_pairs_turn_as_in_transformers(sections: tuple[int, int, int]) -> None:
    pairs = sum(sections)
    axes = torch.arange(3.0)[:, None, None].expand(3, 1, pairs).clone()
    rope = SimpleNamespace(mrope_section=list(sections))
    expected = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(rope, axes)[0, :pairs]
    assert list(mrope.interleaved(sections)(pairs)) == expected.tolist()


def test_windows_are_those_of_transformers() -> None:
    """Of pictures of any size; their pages are never more than the memory plan has."""
    vision = {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "depth": 9, "window_size": 32}
    whole = {"model_type": "qwen2_5_vl", "vision_config": {**vision, "fullatt_block_indexes": [7]}, "hidden_size": 64}
    info = build_tower(whole, CONFIG).info
    for size in (*SIZES, (8, 1600), (1600, 8), (60, 260)):
        tile, side = np.zeros((*qwen2_vl.smart_resize(*size, 8, 256, 4096), 3), np.uint8), info.settings["window"]
        grid = torch.tensor([[1, tile.shape[0] // 4, tile.shape[1] // 4]])
        order, ends = get_vision_window_index(grid, 2, side * 8, 4)
        assert qwen2_5_vl.windows(tile, info) == np.diff(ends.numpy()).tolist(), size
        made, places = qwen2_5_vl.patches(tile, info)
        plain = qwen2_vl.patches(tile, info.model_copy(update={"places": 4}))[1].reshape(-1, 4, 4)
        assert made.shape == (len(order), 4 * info.numbers)
        np.testing.assert_array_equal(places.reshape(-1, 4, 5)[:, :, :4], plain[order.numpy()])
        np.testing.assert_array_equal(places.reshape(-1, 4, 5)[:, 0, 4], np.argsort(order.numpy()))
        assert sum(-(-count // 16) for count in qwen2_5_vl.windows(tile, info)) <= tower_pages(info)


def test_what_is_refused() -> None:
    info = info_of(CONFIG)
    with pytest.raises(UsageError, match="sides that differ at most 200 times; found 201 x 1; crop it"):
        picture_of((1, 201), info)
    wrong: list[dict[str, Any]] = [
        {"do_rescale": False}, {"do_resize": False}, {"rescale_factor": 0.5}, {"size": {"height": 3, "width": 4}},
        {"image_mean": [0.5]}, {"resample": 9}, {"patch_size": 8}, {"min_pixels": 10_000},
    ]  # fmt: skip
    for one in wrong:
        with pytest.raises(ConfigError, match=next(iter(one)).replace("min_pixels", "pixels")):
            info_of({**CONFIG, **one})
    for vision in (
        {"num_heads": 3}, {"num_position_embeddings": 17}, {"out_hidden_size": 63}, {"rope_parameters": {"rope_type": "x"}},
        {"deepstack_visual_indexes": [1]}, {"deepstack_visual_indexes": [0, 0]}, {"in_channels": 4},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="rope_type" if "rope_parameters" in vision else next(iter(vision))):
            info_of(CONFIG, **vision)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "glm_ocr"])
def test_pictures_have_2048_rows_if_nobody_asks_for_more(kind: str) -> None:
    """As many as the checkpoint's processor makes, for which the library is compiled; they are never more."""
    pictures = {"patch_size": 4, "size": {"shortest_edge": 256, "longest_edge": 1 << 19}}
    whole = GLM_OCR.config if kind == "glm_ocr" else {
        "model_type": kind, "hidden_size": 64, "text_config": {"hidden_size": 64},
        "vision_config": {"hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4, "depth": 1,
                          "deepstack_visual_indexes": [], "fullatt_block_indexes": []},
    }  # fmt: skip
    tower = build_tower(whole, pictures)
    processor = {"qwen3_vl": qwen3_vl, "qwen2_5_vl": qwen2_5_vl, "glm_ocr": glm_ocr}[kind]
    counted = tower.info.settings["counted"]
    image = Image.new("RGB", (1000, 900))
    (usual,), (most,) = (processor.prepare(image, one).layout for one in (tower.usual, tower.info))
    assert 1900 < usual <= 2048 < tower.usual.largest == tower.info.rows and usual < most <= (1 << 13) // counted
    (asked,) = processor.prepare(image, processor.limited(tower.usual, 3000)).layout
    assert 2800 < asked <= 3000
    assert processor.limited(tower.usual, 1 << 14) == tower.info.model_copy(update={"largest": tower.info.rows})
    assert tower.bounds()["t"] == tower.info.rows


def test_there_are_never_more_rows_than_the_manifest_says() -> None:
    """For any sides: whatever grows is rounded up, and a narrow picture keeps one row of blocks."""
    for side, shortest, longest in ((32, 65536, 2048 * 1024), (28, 3136, 1003520), (8, 256, 4096), (8, 1, 64)):
        most = qwen2_vl.most_rows(side, shortest, longest)
        for height in (*range(1, 300, 7), 1000, 4096, 32768):
            for width in (height, height + 1, 3 * height, 199 * height, 200 * height):
                found = qwen2_vl.smart_resize(height, width, side, shortest, longest)
                assert found[0] * found[1] <= most * side * side, (height, width, side)
