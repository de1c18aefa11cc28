"""Files of strangers: formats, modes and EXIF as transformers reads them; bombs and damage are refused in words."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pictures are read by Pillow")

from PIL import Image

from mlcpipe.errors import UsageError
from mlcpipe.vision.processors.decode import MAX_BYTES, open_image

RGB = np.random.default_rng(0).integers(0, 256, (23, 37, 3), np.uint8)


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def modes() -> dict[str, Image.Image]:
    image = Image.fromarray(RGB)
    alpha = image.copy()
    alpha.putalpha(Image.fromarray(RGB[..., 0]))
    palette = image.convert("P")
    palette.info["transparency"] = 3
    sixteen = Image.fromarray((RGB[..., 0].astype(np.uint16) << 8) + 77)
    return {
        "rgb": image, "l": image.convert("L"), "1": image.convert("1"), "p": palette, "rgba": alpha,
        "la": alpha.convert("LA"), "cmyk": image.convert("CMYK"), "i16": sixteen,
    }  # fmt: skip


FORMS = {"cmyk": "JPEG"}


@pytest.mark.parametrize("mode", list(modes()))
def test_pixels_are_those_of_transformers(mode: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference is transformers")
    from transformers.image_transforms import convert_to_rgb

    raw = saved(modes()[mode], FORMS.get(mode, "PNG"))
    expected = convert_to_rgb(Image.open(io.BytesIO(raw)), return_numpy=True)
    path = tmp_path / "picture"
    path.write_bytes(raw)
    for source in (raw, path, str(path), bytearray(raw), Image.open(io.BytesIO(raw))):
        np.testing.assert_array_equal(np.asarray(open_image(source)), expected)
    assert transformers.__version__


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_stands_as_exif_says(orientation: int) -> None:
    turns = {
        1: (0, False),
        2: (0, True),
        3: (2, False),
        4: (2, True),
        5: (3, True),
        6: (3, False),
        7: (1, True),
        8: (1, False),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = np.asarray(open_image(saved(Image.fromarray(RGB), "PNG", exif=exif)))
    quarters, mirrored = turns[orientation]
    expected = np.rot90(RGB, quarters)
    np.testing.assert_array_equal(found, expected[:, ::-1] if mirrored else expected)


@pytest.mark.parametrize("form", ["WEBP", "GIF", "PNG"])
def test_of_a_moving_picture_the_first_frame_is_read(form: str) -> None:
    frames = [Image.fromarray(np.full((8, 9, 3), value, np.uint8)) for value in (255, 0)]
    options = {"lossless": True} if form == "WEBP" else {}
    raw = saved(frames[0], form, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(np.asarray(open_image(raw)), np.full((8, 9, 3), 255))


def test_arrays() -> None:
    np.testing.assert_array_equal(np.asarray(open_image(RGB)), RGB)
    grey = RGB[..., 0]
    for array in (grey, grey[..., None]):
        np.testing.assert_array_equal(np.asarray(open_image(array)), np.stack([grey] * 3, axis=-1))
    clear = np.dstack([RGB, np.zeros(RGB.shape[:2], np.uint8)])
    np.testing.assert_array_equal(np.asarray(open_image(clear)), np.full(RGB.shape, 255))
    for wrong in (RGB.astype(np.float32), RGB[..., :2], RGB[:0], np.zeros((2, 2, 2, 3), np.uint8)):
        with pytest.raises(UsageError, match="expected an array uint8"):
            open_image(wrong)


def bomb(width: int, height: int) -> bytes:
    """The file of a PNG of this size, with a few bytes of data."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (bomb(30_000, 30_000), "cannot be read; found Image size"),
        (bomb(5_000, 4_000), "expected sides up to 32768 and 16 million pixels; found 5000 x 4000"),
        (bomb(60_000, 10), "found 60000 x 10"),
        (bomb(100, 100), "cannot be read; found"),
        (saved(Image.fromarray(RGB), "PNG")[:-900], "cannot be read; found"),
        (saved(Image.fromarray(RGB), "JPEG")[:300], "cannot be read; found"),
        (saved(Image.fromarray(RGB), "TIFF"), "in no known format"),
        (saved(Image.fromarray(RGB), "BMP"), "in no known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "in no known format"),
        (b"", "in no known format"),
        (bytes(MAX_BYTES + 1), "expected at most 32 MiB; found 32 MiB"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=f"messages.*{words}"):
        open_image(raw, "messages[0].content[1]")


def test_files_that_block_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero"), "file:///etc/passwd"):
        with pytest.raises(UsageError, match="expected a path of a file"):
            open_image(path)


@pytest.mark.parametrize("mode", ["rgba", "la", "p"])
def test_bands_over_white_are_those_of_the_whole(mode: str) -> None:
    from mlcpipe.vision.processors import decode

    image = modes()[mode].resize((7, 2 * decode._BAND + 5))
    whole = image.convert("RGBA")
    whole = Image.alpha_composite(Image.new("RGBA", whole.size, (255, 255, 255, 255)), whole).convert("RGB")
    np.testing.assert_array_equal(np.asarray(open_image(saved(image, "PNG"))), np.asarray(whole))
    before = np.asarray(image).copy()
    np.testing.assert_array_equal(np.asarray(open_image(image)), np.asarray(whole))
    np.testing.assert_array_equal(np.asarray(image), before)
