"""A stranger's file to pixels: Pillow's decoders of four formats, bounded before they run."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlcpipe.errors import UsageError, last_line
from mlcpipe.support.files import read_bounded

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # of a GIF or an animated WebP the first frame
MAX_BYTES = 32 << 20
MAX_PIXELS = 16 << 20  # at most 7 bytes each are 112 MiB: as they were read, and in RGB
MAX_SIDE = 1 << 15
_BAND = 256  # rows that lie over white at a time


def open_image(source: Any, where: str = "the picture") -> Image.Image:
    """An RGB image of a path, the bytes of a file, a PIL.Image or an array uint8 [height, width, channels].

    It stands as EXIF says; transparent pixels lie over white, as in transformers. Raises UsageError for everything
    that is no such picture, and where Pillow is missing.
    """
    images = _pillow()
    if isinstance(source, images.Image):
        return _upright(where, lambda: source)
    if isinstance(source, np.ndarray):
        channels = source.shape[2:] or (1,)
        if source.dtype != np.uint8 or source.ndim not in (2, 3) or channels[0] not in (1, 3, 4) or not source.size:
            expected = "an array uint8 [height, width, 1, 3 or 4]"
            raise UsageError(where, expected=expected, found=f"{source.dtype}{list(source.shape)}")
        flat = source[..., 0] if channels[0] == 1 and source.ndim == 3 else source
        return _upright(where, lambda: images.fromarray(np.ascontiguousarray(flat)))
    data = bytes_of(source, where, MAX_BYTES, "a path, bytes, a PIL.Image or an array")
    return _upright(where, lambda: images.open(io.BytesIO(data), formats=FORMATS), ours=True)


def bytes_of(source: Any, where: str, max_bytes: int, expected: str) -> bytes:
    """The content of a path, or bytes as they are. Raises UsageError for others, and for more than `max_bytes`."""
    if isinstance(source, (str, Path)):
        path = Path(source)
        if not path.is_file():
            raise UsageError(where, expected="a path of a file", found=str(source)[:200])
        source = read_bounded(path, max_bytes, UsageError)
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise UsageError(where, expected=expected, found=type(source).__name__)
    if len(source) > max_bytes:
        raise UsageError(where, expected=f"at most {max_bytes >> 20} MiB", found=f"{len(source) >> 20} MiB")
    return bytes(source)


def _upright(where: str, opened: Callable[[], Image.Image], *, ours: bool = False) -> Image.Image:
    """The image as its EXIF says, in RGB over white; one that is not `ours` stays as it is. Raises UsageError."""
    from PIL import Image, ImageOps

    try:
        image = opened()
        width, height = image.size
        if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE and width * height <= MAX_PIXELS):
            raise UsageError(
                where, expected=f"sides up to {MAX_SIDE} and {MAX_PIXELS >> 20} million pixels",
                found=f"{width} x {height}", next_step="make it smaller",
            )  # fmt: skip
        image.load()
        if ours:
            ImageOps.exif_transpose(image, in_place=True)
        else:
            image = ImageOps.exif_transpose(image)
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            return _over_white(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except (UsageError, MemoryError):
        raise
    except Image.UnidentifiedImageError:
        names = ", ".join(FORMATS)
        raise UsageError(f"{where} is in no known format", expected=names, found="other bytes") from None
    except Exception as error:  # whatever decoders raise for damaged files
        raise UsageError(f"{where} cannot be read", found=last_line(error)[:200]) from error


def _over_white(image: Image.Image) -> Image.Image:
    """A transparent image in RGB: in bands, so that there is no other copy of the whole."""
    from PIL import Image as images

    made = images.new("RGB", image.size)
    for top in range(0, image.height, _BAND):
        band = image.crop((0, top, image.width, min(top + _BAND, image.height))).convert("RGBA")
        white = images.new("RGBA", band.size, (255, 255, 255, 255))
        made.paste(images.alpha_composite(white, band).convert("RGB"), (0, top))
    return made


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise UsageError("pictures need Pillow", next_step='install the extra: pip install "mlcpipe[vision]"') from None
    return Image
