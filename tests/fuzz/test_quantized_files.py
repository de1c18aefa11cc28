"""Damaged quantized checkpoints, adapters, draft heads, saved pages and processors are read or refused in one line, in
bounded memory and time.
"""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

resource = pytest.importorskip("resource", reason="memory is measured by getrusage")

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.draft_heads import with_draft_head
from mlcpipe.checkpoint.peft import read_adapter
from tests.fuzz import processor_files, saved_pages
from tests.fuzz.findings import finding
from tests.fuzz.quantized_files import Parser, read_all
from tests.models.head_files import EAGLE, random_eagle, random_heads, write_eagle
from tests.unit.checkpoint import bitsandbytes_files, mxfp4_files, peft_files
from tests.unit.checkpoint.float_files import write_fields, write_mxfp8, write_sparse
from tests.unit.checkpoint.helpers import write_tensors
from tests.unit.checkpoint.quantized_files import Form, write

CASES = 150
MAX_GROWTH_BYTES = 512 << 20


def _fp8(folder: Path) -> None:
    tensors = {"m.q_proj.weight": np.full((64, 256), 56, np.uint8).view(ml_dtypes.float8_e4m3fn),
               "m.q_proj.weight_scale_inv": np.ones((2, 2), np.float32)}  # fmt: skip
    fields = {"quant_method": "fp8", "weight_block_size": [32, 128]}
    write_fields(folder, tensors, fields)


def _bitsandbytes(folder: Path) -> None:
    bitsandbytes_files.write(folder, bitsandbytes_files.four_bits("nf4", True)[0])


def _bitnet(folder: Path) -> None:
    codes = np.random.default_rng(7).integers(0, 3, (4, 16, 64), np.uint8)
    tensors = {"m.q_proj.weight": np.bitwise_or.reduce(codes << np.arange(0, 8, 2, np.uint8)[:, None, None]),
               "m.q_proj.weight_scale": np.ones(1, np.float32)}  # fmt: skip
    write_fields(folder, tensors, {"quant_method": "bitnet"})


def _adapter(folder: Path) -> None:
    peft_files.write(folder, peft_files.config(), peft_files.tensors())


def _read_adapter(folder: Path) -> None:
    read_adapter(folder, peft_files.MODULES, "llama")


def _draft_head(folder: Path) -> None:
    """As Medusa's authors save it, under the name that the model's own tensors have."""
    heads = {f"medusa_head.{name}": array for name, array in random_heads(64).items()}
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    write_tensors(folder / "model.safetensors", heads)


def _eagle_head(folder: Path) -> None:
    config = {**EAGLE, "draft_vocab_size": 32}
    write_eagle(folder, random_eagle(64, config), config)


def _read_draft_head(folder: Path) -> None:
    model = Checkpoint(folder, {"hidden_size": 64, "vocab_size": 64, "num_hidden_layers": 3}, {}, {}, ())
    read_all(with_draft_head(model, folder))


PARSERS: dict[str, Any] = {
    "gptq": Parser(partial(write, method="gptq", form=Form(3, 32))),
    "awq": Parser(partial(write, method="awq", form=Form(4, 64))),
    "mlx": Parser(partial(write, method="mlx", form=Form(6, 64, "biases"))),
    "compressed-tensors": Parser(partial(write, method="compressed-tensors", form=Form(4, 32))),
    "int-quantized": Parser(partial(write, method="int-quantized", form=Form(8, 0))),
    "nvfp4": Parser(partial(write, method="nvfp4", form=Form(4, 16, "floats"))),
    "mxfp4": Parser(partial(write, method="mxfp4", form=Form(4, 32, "floats"))),
    "sparse": Parser(write_sparse),
    "mlx-mxfp8": Parser(write_mxfp8),
    "fp8": Parser(_fp8),
    "bitsandbytes": Parser(_bitsandbytes),
    "bitnet": Parser(_bitnet),
    "adapter": Parser(_adapter, _read_adapter, "adapter_config.json", "adapter_model.safetensors"),
    "draft-head": Parser(_draft_head, _read_draft_head),
    "eagle-head": Parser(_eagle_head, _read_draft_head),
    "mxfp4-experts": Parser(mxfp4_files.write),
    "mlx-experts": Parser(mxfp4_files.write_mlx),
    "saved-pages": saved_pages,
    "processors": processor_files,
}


def _resident_bytes() -> int:
    kilobytes: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


@pytest.mark.parametrize("name", PARSERS)
def test_some_damaged_files(name: str, tmp_path: Path) -> None:
    assert _fuzz(name, tmp_path, range(CASES), 600) == []


@pytest.mark.everything
@pytest.mark.parametrize("name", PARSERS)
def test_damaged_files_for_an_hour(name: str, tmp_path: Path) -> None:
    """Seeds that no run before had; MLCPIPE_FUZZ_SECONDS sets another time."""
    first, seconds = int(time.time()) * 1_000_000, float(os.environ.get("MLCPIPE_FUZZ_SECONDS", "3600"))
    assert _fuzz(name, tmp_path, range(first, first + 10**9), seconds) == []


def test_every_parser_has_its_hour() -> None:
    """In the weekly workflow."""
    workflow = (Path(__file__).parents[2] / ".github" / "workflows" / "weekly.yml").read_text()
    listed = re.search(r"parser:\s*\[([^]]*)\]", workflow)
    assert listed is not None
    assert set(re.split(r",\s*", listed[1])) == set(PARSERS)


def _fuzz(name: str, folder: Path, seeds: range, seconds: float) -> list[str]:
    """The findings, of which one may be the memory."""
    parser, case = PARSERS[name], folder / "case"
    parser.write(folder)
    assert finding(lambda: parser.read(folder)) == ""
    case.mkdir()
    before = _resident_bytes()
    found: list[str] = parser.fuzz(folder, case, seeds, seconds)
    grown = _resident_bytes() - before
    return found if grown < MAX_GROWTH_BYTES else [*found, f"took {grown >> 20} MiB"]
