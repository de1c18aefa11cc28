"""Idefics3 (Laurencon et al. 2024) and SmolVLM (Marafioti et al. 2025): SigLIP, pixel shuffle, one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VideoInfo, VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.tower import Tower
from mlcpipe.vision import VIDEO_PROCESSOR
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile
from mlcpipe.vision.preprocessor import WHERE, channels, preprocessor_fields, video_fields, video_info
from mlcpipe.vision.processors.idefics3 import MOST_WORDS
from mlcpipe.vision.siglip import MMPROJ_NAMES, siglip

_MOST_PIXELS = 4096  # of a side, after the first resizing
_FLAGS = ("do_resize", "do_image_splitting")


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for tiles of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields = Fields(config)
    facts, body = siglip(Fields(fields.table("vision_config"), "config.json vision_config"), str(config["model_type"]))
    width = Fields(fields.table("text_config"), "config.json text_config").integer("hidden_size", 4096)
    scale = fields.integer("scale_factor", 2, high=64)
    settings = _settings(preprocessor)
    side = settings["tile"] // body.patch
    if side % scale or side != body.side:
        raise ConfigError(
            "field max_image_size", where=WHERE, found=settings["tile"],
            expected=f"pixels that make {body.side} patches of {body.patch} in a row, a multiple of {scale}",
        )  # fmt: skip
    info = VisionInfo(
        processor="idefics3",
        settings={**settings, "patch": body.patch, "merge": scale},
        mean=channels(preprocessor, "image_mean"),
        std=channels(preprocessor, "image_std"),
        token=fields.integer("image_token_id", 128257, low=0),
        rows=(side // scale) ** 2,
        merged=scale * scale,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    info = info.model_copy(update={"video": _video(preprocessor, info)})
    return Tower(facts, body, _Connector(scale * scale * facts.hidden_size, width), info)


def _settings(preprocessor: Mapping[str, Any]) -> dict[str, int]:
    """The settings of a preprocessor_config.json. Raises ConfigError for a field that is not honoured."""
    fields = preprocessor_fields(preprocessor, do_pad=(True, None))
    tile = Fields(fields.table("max_image_size"), f"{WHERE} max_image_size").integer("longest_edge", 364, high=4096)
    longest = Fields(fields.table("size"), f"{WHERE} size").integer("longest_edge", 4 * 364, high=_MOST_PIXELS)
    for name in ("size", "max_image_size"):
        if others := set(fields.table(name)) - {"longest_edge"}:
            raise ConfigError(f"field {name}", where=WHERE, expected="longest_edge alone", found=sorted(others)[0])
    settings: dict[str, int] = {"tile": tile, "longest": longest}
    settings["resample"] = fields.integer("resample", 1, low=0, high=5)
    settings |= {name: int(fields.flag(name, True)) for name in _FLAGS}
    return settings


def _video(preprocessor: Mapping[str, Any], info: VisionInfo) -> VideoInfo | None:
    """How frames are taken of a video, None of a model that was not trained on them. Raises ConfigError."""
    of_videos = Fields(preprocessor, WHERE).table(VIDEO_PROCESSOR) or preprocessor
    if of_videos.get("video_sampling") is None:
        return None
    fields = video_fields(preprocessor, do_resize=(True, None), do_pad=(True, None))
    sampling = Fields(fields.table("video_sampling"), f"{fields.where} video_sampling")
    tile = Fields(fields.table("max_image_size"), f"{fields.where} max_image_size")
    if tile.integer("longest_edge", info.settings["tile"]) != info.settings["tile"]:
        expected = f"the pictures' {info.settings['tile']}"
        raise ConfigError("field longest_edge", where=tile.where, expected=expected, found=tile.get("longest_edge"))
    of_sampling = sampling.table("video_size")
    size = Fields(fields.table("size") or of_sampling, f"{fields.where} size")  # the first one counts in transformers
    settings = {
        "most_frames": sampling.integer("max_frames", high=MOST_WORDS),
        "longest": min(size.integer("longest_edge"), _MOST_PIXELS),
        "resample": fields.integer("resample", 1, low=1, high=3),
    }
    return video_info(fields, sampling.number("fps", low=1e-3, high=1000.0), settings)


class _Connector(nn.Module):
    """modality_projection.proj, named as in the checkpoint: rows of scale * scale patches, row by row, to one."""

    def __init__(self, in_features: int, width: int) -> None:
        self.in_features, self.modality_projection = in_features, _Projection(in_features, width)

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t * scale * scale, hidden] -> one part [t, width]."""
        return [self.modality_projection.proj(op.reshape(x, (t, self.in_features)))]


class _Projection(nn.Module):
    def __init__(self, in_features: int, width: int) -> None:
        self.proj = Linear(in_features, width, quantize=False)


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: tiles of the tower's size, of a picture that is at most four of them long."""
    tile = whole["vision_config"]["image_size"]
    whole["scale_factor"] = file.integer("projector.scale_factor", 2)
    whole["image_token_id"] = file.token("<image>")
    preprocessor |= {
        "max_image_size": {"longest_edge": tile},
        "size": {"longest_edge": file.integer("preproc_image_size", 4 * tile)},
        "resample": 1,
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": tile}},
    }


MMPROJ = Mmproj(
    "idefics3",
    {"llama": "smolvlm"},
    _complete,
    {**MMPROJ_NAMES, "mm.model.fc": "tower.projector.modality_projection.proj"},
)
