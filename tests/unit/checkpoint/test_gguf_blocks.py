"""Block formats of GGUF, bit for bit as the `gguf` package and llama.cpp dequantize them."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf", reason="the reference is the gguf package")

from mlcpipe.checkpoint.gguf.blocks import FORMATS, chunks
from mlcpipe.checkpoint.gguf.header import TYPES, read_header
from mlcpipe.checkpoint.gguf.native_formats import PARTS
from mlcpipe.checkpoint.safetensors_reader import CHUNK_ELEMENTS, read_chunks
from mlcpipe.errors import CheckpointError
from mlcpipe.quantization.native_formats import SCHEMES, pack_parts, unpack
from tests.unit.checkpoint.gguf_files import entry, raw_file
from tir_schedules.cpu.formats import KEPT

WITHOUT_REFERENCE = ("Q1_0", "Q2_0")
NAMES = [name for name in FORMATS if name not in WITHOUT_REFERENCE]
FEW, MANY = 200, 20_000


def random_blocks(name: str, count: int) -> NDArray[np.uint8]:
    """Random bytes, without scales that are NaN by the format's standard and numbers to llama.cpp."""
    blocks = np.random.default_rng(5).integers(0, 256, (count, FORMATS[name].nbytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[blocks[:, 0] == 255, 0] = 0
    if name == "NVFP4":
        blocks[:, :4] &= 127
    return blocks


def check(name: str, blocks: NDArray[np.uint8]) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        found = FORMATS[name].dequantize(blocks)
    assert found.dtype == np.float32
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_some_random_blocks(name: str) -> None:
    check(name, random_blocks(name, FEW))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_many_random_blocks(name: str) -> None:
    check(name, random_blocks(name, MANY))


@pytest.mark.parametrize("name", PARTS)
def test_codes_and_scales_are_what_the_blocks_mean(name: str) -> None:
    """Packed as a bundle stores them, and read back by the scheme: the same numbers, bit for bit."""
    scheme, blocks = SCHEMES[name], random_blocks(name, MANY // 4)
    parts = PARTS[name](blocks)
    packed = pack_parts(scheme, parts.codes, parts.scales, parts.subs)
    assert {key: (a.shape, a.dtype.name) for key, a in packed.items()} == scheme.shapes(
        len(blocks), FORMATS[name].elements
    )
    with np.errstate(all="ignore"):
        expected, found = FORMATS[name].dequantize(blocks), unpack(scheme, packed, FORMATS[name].elements)
    finite = np.isfinite(expected)
    assert finite.mean() > 0.5
    np.testing.assert_array_equal(found[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_every_format_that_is_kept_has_parts() -> None:
    assert set(PARTS) == set(SCHEMES) & set(FORMATS) >= KEPT & set(FORMATS)


def test_bits_of_q1_0_and_q2_0() -> None:
    """By the loops of `dequantize_row_q1_0` and `dequantize_row_q2_0` in llama.cpp's ggml-quants.c."""
    for name, bits in (("Q1_0", 1), ("Q2_0", 2)):
        blocks = random_blocks(name, 50)
        blocks[:, :2] = np.array([0.375], "<f2").view(np.uint8)
        for block, values in zip(blocks, FORMATS[name].dequantize(blocks), strict=True):
            for j, value in enumerate(values):
                code = int(block[2 + j * bits // 8]) >> (j * bits % 8) & ((1 << bits) - 1)
                assert value == 0.375 * (2 * code - 1 if bits == 1 else code - 1)


def test_sizes_are_those_of_the_package() -> None:
    known = {int(kind): sizes for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    names = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    for code, (name, elements, nbytes) in TYPES.items():
        if code in known:
            assert (elements, nbytes) == known[code]
            assert name == names[code] or code not in {form.code for form in FORMATS.values()}


def test_chunks_meet_without_a_seam(tmp_path: Path) -> None:
    blocks = random_blocks("Q4_0", 2 * CHUNK_ELEMENTS // 32 + 3)
    blocks[:, :2] = np.array([0.5], "<f2").view(np.uint8)
    path = raw_file(tmp_path / "m.gguf", entries=[entry("w", [32, len(blocks)], 0, 2)], data=blocks.tobytes())
    (info,) = read_header(path).tensors
    tracemalloc.start()
    found = read_chunks(info, chunks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(found, FORMATS["Q4_0"].dequantize(blocks))
    assert peak < found.nbytes + 16 * CHUNK_ELEMENTS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_scale_that_is_no_number_is_refused(tmp_path: Path, name: str, scale: float) -> None:
    form = FORMATS[name]
    blocks = np.full((3, form.nbytes), 0x11, np.uint8)
    if name in ("MXFP4", "NVFP4"):
        blocks[1, :1] = 255
    elif name == "IQ1_M":  # the highest nibbles of the four scales
        blocks[1, 49::2] = [0x01, 0xE1 if np.isnan(scale) else 0x01, 0xC1, 0x71]
    else:
        at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}.get(name, 0)
        blocks[1, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    assert PARTS[name](blocks[::2]).finite and not PARTS[name](blocks).finite
    path = raw_file(tmp_path / "m.gguf", entries=[entry("w", [form.elements, 3], 0, form.code)], data=blocks.tobytes())
    (info,) = read_header(path).tensors
    with pytest.raises(CheckpointError, match="tensor 'w' is not finite"):
        read_chunks(info, chunks)
