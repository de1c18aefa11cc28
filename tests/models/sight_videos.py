"""Videos for tiny models that see, and what transformers' processors make of their frames."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.models import sight

# Of Qwen3-VL, for `video_preprocessor_config.json`.
PREPROCESSOR: dict[str, Any] = {
    "size": {"shortest_edge": 512, "longest_edge": 6000}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "image_mean": [0.4, 0.5, 0.3], "image_std": [0.4, 0.5, 0.6], "fps": 2, "min_frames": 2, "max_frames": 6,
}  # fmt: skip


def frames(count: int, height: int, width: int, seed: int = 0) -> Any:
    """Different random frames uint8 [count, height, width, 3]."""
    return np.stack([sight.noise(height, width, seed + at) for at in range(count)])


def file_of(shown: Any, fps: int = 8, *, codec: str = "mpeg4", form: str = "mp4", **options: str) -> bytes:
    """A video file of frames uint8 [count, height, width, 3], of even sides."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width, stream.pix_fmt = *shown.shape[1:3], "yuv420p"
        if codec == "mpeg4":
            stream.bit_rate = 8_000_000
        for frame in shown:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def decoded(data: bytes) -> Any:
    """All frames of a file, as transformers reads them by PyAV."""
    import av

    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def resized(shown: Any, height: int, width: int, mode: str) -> torch.Tensor:
    """uint8 [count, rows, columns, 3] -> uint8 [count, 3, height, width], as torchvision does it."""
    given = torch.from_numpy(np.ascontiguousarray(shown)).permute(0, 3, 1, 2)
    if tuple(given.shape[2:]) == (height, width):
        return given
    return torch.nn.functional.interpolate(given, (height, width), mode=mode, antialias=True)


def normalized(pixels: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    """As transformers' processors of torch do it."""
    mean, std = (255 * torch.tensor(config.get(f"image_{name}", [0.5] * 3))[:, None, None] for name in ("mean", "std"))
    return (pixels.float() - mean) / std


def qwen_inputs(shown: Any, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What transformers' Qwen3-VL takes for a video's frames."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    patch, merge, together = (config[f"{name}_size"] for name in ("patch", "merge", "temporal_patch"))
    bounds, longest = config["size"], config["size"]["longest_edge"]
    if config.get("cap_pixels_per_frame"):
        most = min(config["max_video_tokens"] * (patch * merge) ** 2, longest // len(shown))
        longest = len(shown) * max(most, int(bounds["shortest_edge"] * 1.05))
    size = smart_resize(
        len(shown), *shown.shape[1:3], together, patch * merge, min_pixels=bounds["shortest_edge"], max_pixels=longest
    )
    given = normalized(resized(shown, *size, "bicubic"), config)
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, given[None], patch, merge, together)
    return {"pixel_values_videos": patches[0], "video_grid_thw": torch.tensor([grid])}


def smolvlm_inputs(shown: Any, longest: int, tile: int, config: Mapping[str, Any]) -> torch.Tensor:
    """What transformers' SmolVLM takes for a video's frames, f32[1, count, 3, tile, tile]."""
    from transformers.models.smolvlm.video_processing_smolvlm import get_resize_output_image_size

    first = torch.from_numpy(np.ascontiguousarray(shown)).permute(0, 3, 1, 2)
    once = resized(shown, *get_resize_output_image_size(first, longest), "lanczos").permute(0, 2, 3, 1).numpy()
    return normalized(resized(once, tile, tile, "lanczos"), config)[None]
