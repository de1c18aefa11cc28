"""Fields of preprocessor_config.json that families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.bundle.model_info import VideoInfo
from mlcpipe.nn.config import Fields
from mlcpipe.vision import VIDEO_PROCESSOR

WHERE = "preprocessor_config.json"
MOST_FRAMES = 4096  # that a processor may take of a video
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Fields with the values that change nothing here; those of the files' own names, kinds and types do not count.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_convert_rgb": (True, None),
    "do_rescale": (True, None),
    "do_normalize": (True, None),
    "do_center_crop": (False, None),
    "rescale_factor": (1 / 255, None),
    "input_data_format": (None,),
    "data_format": ("channels_first", None),
}


def preprocessor_fields(preprocessor: Mapping[str, Any], **neutral: tuple[Any, ...]) -> Fields:
    """The fields of a preprocessor_config.json, where those of all processors and `neutral` change nothing.

    Raises ConfigError for one that does.
    """
    fields = Fields(preprocessor, WHERE)
    fields.refuse(**{**_NEUTRAL, **neutral})
    return fields


def channels(preprocessor: Mapping[str, Any], name: str, default: tuple[float, ...] = HALF) -> tuple[float, ...]:
    """A number for each channel. Raises ConfigError."""
    fields = Fields(preprocessor, WHERE)
    return tuple(fields.numbers(name, 3)) if fields.get(name) is not None else default


def resample(fields: Fields, default: int) -> int:
    """Pillow's number of a filter. Raises ConfigError."""
    return fields.integer("resample", default, low=0, high=5)


def side(fields: Fields, name: str, default: int, high: int = 4096) -> int:
    """The pixels of a square's side, which is an object of equal `height` and `width`. Raises ConfigError."""
    table = Fields(fields.table(name), f"{WHERE} {name}")
    height = table.integer("height", default, high=high)
    table.refuse(width=(height, None), longest_edge=(None,), shortest_edge=(None,))
    return height


def video_fields(preprocessor: Mapping[str, Any], **neutral: tuple[Any, ...]) -> Fields:
    """The fields of videos, which are those of pictures where files say nothing else. Raises ConfigError as
    `preprocessor_fields`.
    """
    own = Fields(preprocessor, WHERE).table(VIDEO_PROCESSOR)
    fields = Fields(own or preprocessor, VIDEO_PROCESSOR if own else WHERE)
    fields.refuse(**{**_NEUTRAL, **neutral})
    return fields


def video_info(fields: Fields, fps: float, settings: dict[str, int]) -> VideoInfo:
    """What the manifest says of videos with these fields. Raises ConfigError."""
    mean, std = (channels(fields.values, name) for name in ("image_mean", "image_std"))
    return VideoInfo(fps=fps, settings=settings, mean=mean, std=std)
