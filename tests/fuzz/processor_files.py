"""Damaged files of how pictures and videos are made ready: each is refused, or makes some ready in bounded memory."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mlcpipe.bundle import VisionInfo
from mlcpipe.checkpoint.checkpoint import PROCESSOR_CONFIGS, read_preprocessor
from mlcpipe.vision import build_tower
from mlcpipe.vision.processors.picture import Picture
from mlcpipe.vision.processors.video import Video, parts_of
from tests.fuzz import findings
from tests.fuzz.mutate import damage_json_file, odd_file
from tests.models import sight, sight_qwen, sight_videos
from tests.models.sight_families import FAMILIES

CONFIG = "config.json"
_MOST_ROWS = 10_000  # of the largest call of these towers
_PICTURES = tuple(np.full(size, 90, np.uint8) for size in ((9, 70, 3), (64, 41, 3)))


def _wholes() -> list[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any] | None]]:
    """config.json, and what processor_config.json has of pictures and of videos, of each family."""
    found: list[Any] = [(one.config, one.preprocessor, None) for one in FAMILIES.values()]
    for name, (text, vision) in sight_qwen.KINDS.items():
        config = {"model_type": name, "text_config": {**sight_qwen.TEXT, **text}, **sight_qwen.TEXT}
        config["vision_config"] = {**sight_qwen.VISION, **vision}
        found.append((config, sight_qwen.PREPROCESSOR, sight_videos.PREPROCESSOR if name.startswith("qwen3") else None))
    smol = {"model_type": "smolvlm", "text_config": sight.TEXT, "vision_config": sight.VISION, "scale_factor": 2}
    pictures = {**sight.PREPROCESSOR, "video_sampling": sight.SAMPLING}
    return [*found, (smol, pictures, None), (smol, sight.PREPROCESSOR, pictures)]


WHOLES = _wholes()


def _write(folder: Path, number: int, together: bool) -> list[Path]:
    """The files of a family, with both parts `together` or each in its own; those that may be damaged."""
    config, pictures, videos = WHOLES[number]
    alone, whole, alone_of_videos = (folder / name for name in PROCESSOR_CONFIGS)
    for path in (alone, whole, alone_of_videos):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    if together:
        both = {"image_processor": pictures} | ({} if videos is None else {"video_processor": videos})
        whole.write_text(json.dumps(both))
        return [whole]
    alone.write_text(json.dumps(pictures))
    if videos is None:
        return [alone]
    alone_of_videos.write_text(json.dumps(videos))
    return [alone, alone_of_videos]


def write(folder: Path) -> None:
    """The whole files of a family."""
    _write(folder, 0, True)


def read(folder: Path) -> None:
    """Make pictures and a video ready. Raises MlcpipeError where that is refused."""
    preprocessor = read_preprocessor(folder)
    if preprocessor is None:
        return
    info = build_tower(json.loads((folder / CONFIG).read_text()), preprocessor).usual
    assert info == VisionInfo.model_validate_json(info.model_dump_json())
    assert info.most <= _MOST_ROWS, f"{info.most} rows"
    processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
    for pixels in _PICTURES:
        _patches(processor.prepare(Image.fromarray(pixels), info), info)
    if info.video is not None:
        assert len(processor.sampled(info.video, 3000, 29.97)) <= info.video.settings["most_frames"]
        for part in parts_of(Video(np.stack(_PICTURES[1:])), "the video", info):
            if isinstance(part, Picture):
                _patches(part, info)


def _patches(picture: Picture, info: VisionInfo) -> None:
    processor = importlib.import_module(f"mlcpipe.vision.processors.{info.processor}")
    assert sum(tile.nbytes for tile in picture.tiles) < 1 << 28
    made, places = processor.patches(picture.tiles[0], info)
    assert len(made) == len(places) <= info.most and np.isfinite(made).all()


def fuzz(source: Path, folder: Path, seeds: Iterable[int], seconds: float) -> list[str]:
    """The findings of `seeds`, until `seconds` have passed, each with its seed; the files stay in `folder`."""

    def make(seed: int) -> None:
        draw = random.Random(seed)
        path = draw.choice(_write(folder, draw.randrange(len(WHOLES)), draw.random() < 0.5))
        if draw.random() < 0.97:
            damage_json_file(draw, path)
        else:
            odd_file(draw, path)

    return findings.fuzz(make, lambda: read(folder), seeds, seconds)
