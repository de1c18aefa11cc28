"""`make check-gpu` on Mesa's software device: every part runs and says what a GPU's owner wants to know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.check_gpu.parts import PARTS, gpus
from bench.check_gpu.synthetic import device_weights
from mlcpipe.devices import cpu
from mlcpipe.devices.support import tvm_runtime

ROOT = Path(__file__).parents[2]


SOME = ("device", "copy", "speed")


@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param(tuple(PARTS), marks=pytest.mark.everything)], ids=["some", "all"]
)
def test_every_part_runs_on_the_software_device(chosen: tuple[str, ...], tmp_path: Path) -> None:
    if not any(spec.startswith("vulkan") for spec in gpus()):
        pytest.skip("needs a Vulkan driver, Debian's mesa-vulkan-drivers")
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "bench.check_gpu", "--device", "vulkan:0", "--output", str(output)]
    command += ["--parts", ",".join(chosen)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    parts = {part["part"]: part for part in json.loads(output.read_text())["parts"]}
    assert done.returncode == 0, done.stdout + done.stderr
    assert {name for name, part in parts.items() if part["status"] not in ("ok", "skipped")} == set()
    assert parts["speed"]["result"]["decode_tok_s"] > 0 and parts["speed"]["result"]["share"] > 0
    if "batches" in chosen:
        assert set(parts["batches"]["result"]["tok_s"]) == {"1", "2", "4", "8", "16", "32"}
    assert all(part in done.stdout for part in chosen)


@pytest.mark.parametrize("dtype", ["uint32", "float16", "float32"])
def test_scales_that_are_made_on_a_device_are_small(dtype: str) -> None:
    """Two float16 in a word, too: of random bits some would be no numbers."""
    param = SimpleNamespace(name="a.q_scale", shape=[2, 4, 32], dtype=dtype)
    manifest: Any = SimpleNamespace(params=[param])
    made = tvm_runtime.array(device_weights(manifest, cpu.choose())["a.q_scale"])
    numbers = made.view(np.float16) if dtype == "uint32" else made
    np.testing.assert_allclose(numbers, 0.01, rtol=1e-3)
