"""What is written is read back by our reader and by the safetensors package; rounding is that of ml_dtypes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors

from mlcpipe.checkpoint.safetensors_reader import read_bytes, read_float32, read_header
from mlcpipe.checkpoint.safetensors_writer import SafetensorsWriter, narrowed
from mlcpipe.errors import CheckpointError
from tests.conftest import TinyLlama, write_llama

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copy_with_a_smaller_tensor(dtype: str, tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", TinyLlama(dtype=dtype), tokenizer=False) / "model.safetensors"
    infos, target = read_header(source), tmp_path / "model.safetensors"
    cut = infos[0].name
    with target.open("wb") as file:
        writer = SafetensorsWriter(file, infos)
        for info in infos:
            if info.name == cut:
                values = read_float32(info)[1:]
                writer.add(cut, dtype, values.shape, narrowed(values, dtype, cut).data)
            else:
                writer.add(info.name, dtype, info.shape, read_bytes(info))
        writer.finish()
    found = {info.name: read_float32(info) for info in read_header(target)}
    expected = {info.name: read_float32(info)[int(info.name == cut) :] for info in infos}
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    with safetensors.safe_open(target, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert opened.get_slice(cut).get_shape() == list(expected[cut].shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_rounded_to_the_nearest(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, np.uint64).astype(np.uint32)
    halves = (np.arange(4096, dtype=np.uint32) << 16) + 0x3F808000  # between two bfloat16
    values = np.concatenate([bits, halves]).view(np.float32)
    values = values[np.isfinite(values) & (np.abs(values) < 6e4)]
    expected = values.astype(DTYPES[dtype])
    assert narrowed(values, dtype, "w").tobytes() == expected.tobytes()


@pytest.mark.parametrize(("dtype", "value"), [("float16", 7e4), ("bfloat16", 3.4e38)])
def test_a_number_that_does_not_fit_is_refused(dtype: str, value: float) -> None:
    with pytest.raises(CheckpointError, match=f"'w' does not fit {dtype}"):
        narrowed(np.array([1, value], np.float32), dtype, "w")
