"""GLM-OCR's pictures: those of Qwen2-VL, whose bounds count the pixels of all frames, and whose small sides grow first.

The numbers are those of transformers' `image_processing_pil_glm46v.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.vision.processors import qwen2_vl
from mlcpipe.vision.processors.picture import Picture
from mlcpipe.vision.processors.qwen2_vl import limited, patches

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["limited", "patches", "prepare"]


def prepare(image: Image.Image, info: VisionInfo) -> Picture:
    """The one tile of an RGB image. Raises UsageError for sides that differ more than 200 times."""
    height, width = image.height, image.width
    side = info.settings["patch"] * info.settings["merge"]
    if height < side or width < side:
        grow = max(side / height, side / width)
        height, width = int(height * grow), int(width * grow)
    return qwen2_vl.picture_of(image, info, height, width, info.settings["frames"])
