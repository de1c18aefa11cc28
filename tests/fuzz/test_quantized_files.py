"""Damaged quantized checkpoints are read or refused in one line, in bounded memory and time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

resource = pytest.importorskip("resource", reason="memory is measured by getrusage")

from tests.fuzz.findings import finding
from tests.fuzz.quantized_files import fuzz, open_all
from tests.unit.checkpoint import bitsandbytes_files, mxfp4_files
from tests.unit.checkpoint.float_files import write_mxfp8, write_sparse
from tests.unit.checkpoint.helpers import write_tensors
from tests.unit.checkpoint.quantized_files import Form, write

CASES = 150
MAX_GROWTH_BYTES = 512 << 20


def _fp8(folder: Path) -> None:
    tensors = {"m.q_proj.weight": np.full((64, 256), 56, np.uint8).view(ml_dtypes.float8_e4m3fn),
               "m.q_proj.weight_scale_inv": np.ones((2, 2), np.float32)}  # fmt: skip
    fields = {"quant_method": "fp8", "weight_block_size": [32, 128]}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": fields}))
    write_tensors(folder / "model.safetensors", tensors)


def _bitsandbytes(folder: Path) -> None:
    bitsandbytes_files.write(folder, bitsandbytes_files.four_bits("nf4", True)[0])


SOURCES: dict[str, Callable[[Path], object]] = {
    "gptq": partial(write, method="gptq", form=Form(3, 32)),
    "awq": partial(write, method="awq", form=Form(4, 64)),
    "mlx": partial(write, method="mlx", form=Form(6, 64, "biases")),
    "compressed-tensors": partial(write, method="compressed-tensors", form=Form(4, 32)),
    "int-quantized": partial(write, method="int-quantized", form=Form(8, 0)),
    "nvfp4": partial(write, method="nvfp4", form=Form(4, 16, "floats")),
    "mxfp4": partial(write, method="mxfp4", form=Form(4, 32, "floats")),
    "sparse": write_sparse,
    "mlx-mxfp8": write_mxfp8,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4-experts": mxfp4_files.write,
}


def _resident_bytes() -> int:
    kilobytes: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


@pytest.mark.parametrize("method", SOURCES)
def test_some_damaged_checkpoints(method: str, tmp_path: Path) -> None:
    SOURCES[method](tmp_path)
    assert finding(lambda: open_all(tmp_path)) == ""
    case, before = tmp_path / "case", _resident_bytes()
    case.mkdir()
    assert fuzz(tmp_path, case, range(CASES), 600) == []
    assert _resident_bytes() - before < MAX_GROWTH_BYTES


@pytest.mark.everything
@pytest.mark.parametrize("method", SOURCES)
def test_damaged_checkpoints_for_an_hour(method: str, tmp_path: Path) -> None:
    """Seeds that no run before had; MLCPIPE_FUZZ_SECONDS sets another time."""
    SOURCES[method](tmp_path)
    first, seconds = int(time.time()) * 1_000_000, float(os.environ.get("MLCPIPE_FUZZ_SECONDS", "3600"))
    case, before = tmp_path / "case", _resident_bytes()
    case.mkdir()
    assert fuzz(tmp_path, case, range(first, first + 10**9), seconds) == []
    assert _resident_bytes() - before < MAX_GROWTH_BYTES
