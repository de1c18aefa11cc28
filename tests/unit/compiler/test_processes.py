"""Compiles in processes of their own: killed half way, measured, and what the command says on stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import mlcpipe
from mlcpipe.cli import main
from tests.conftest import QUICK, TinyLlama, tensor_bytes, write_llama, write_tensors

if TYPE_CHECKING:
    from tests.conftest import Bundles

ROOT = Path(__file__).resolve().parents[3]

STOPS_HALF_WAY = """
import sys, time
import mlcpipe
from mlcpipe.bundle import ParamsWriter

finish = ParamsWriter.finish

def slow(self, **options):
    files = finish(self, **options)
    print("half way", flush=True)
    time.sleep(600)
    return files

ParamsWriter.finish = slow
mlcpipe.convert(sys.argv[1], quantization="q0f32", output=sys.argv[2])
"""

MEASURES = """
import json, re, sys, threading, time
import mlcpipe

mlcpipe.compile  # the compiler's own imports count, they are part of the limit

def private():
    text = open("/proc/self/smaps_rollup").read()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_(?:Clean|Dirty):\\s+(\\d+) kB", text, re.M))

peak, done = 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, private())

watcher = threading.Thread(target=watch)
watcher.start()
before = private()
mlcpipe.compile(sys.argv[1], target=sys.argv[4], quantization=sys.argv[3], output=sys.argv[2])
done.set()
watcher.join()
print(json.dumps({"before": before, "peak": peak}))
"""


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGKILL")
def test_killed_half_way(tiny_bundles: Bundles, tmp_path: Path) -> None:
    """There is no bundle afterwards, and the next run removes what the dead one left."""
    output = tmp_path / "bundle"
    process = child(STOPS_HALF_WAY, tiny_bundles.checkpoint, output)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        assert not output.exists()
        assert any((entry / "tensor-cache.json").exists() for entry in tmp_path.iterdir())
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    lock, partial = sorted(entry.name for entry in tmp_path.iterdir())
    assert lock == ".bundle.mlcpipe-lock" and partial.startswith(".bundle.mlcpipe-partial-")
    mlcpipe.convert(tiny_bundles.checkpoint, quantization="q0f32", output=output)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]
    index = json.loads((output / "tensor-cache.json").read_text())
    assert all((output / shard["dataPath"]).stat().st_size == shard["nbytes"] for shard in index["records"])


def large_checkpoint(folder: Path, layers: int) -> tuple[Path, int]:
    """bfloat16 in layers of 16 MB and one tensor of 67 MB -> (folder, float32 bytes of that one)."""
    model = TinyLlama(
        vocab_size=32_768, hidden_size=1024, intermediate_size=2048, layers=layers, heads=16, kv_heads=4, head_dim=64,
        dtype="bfloat16",
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config_json()))
    block = np.random.default_rng(0).standard_normal(1 << 20, np.float32) * np.float32(0.02)

    def data(shape: tuple[int, ...]) -> bytes:
        return tensor_bytes(np.resize(block, shape), "bfloat16")

    write_tensors(
        folder / "model.safetensors",
        {name: (shape, model.dtype, partial(data, shape)) for name, shape in model.shapes().items()},
    )
    return folder, 4 * model.vocab_size * model.hidden_size


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads private memory from Linux's /proc")
@pytest.mark.parametrize(
    ("quantization", "layers"), [("q4f16_1", 6), pytest.param("q0f32", 2, marks=pytest.mark.everything)]
)
@pytest.mark.full
def test_private_memory_of_a_compile(tmp_path: Path, quantization: str, layers: int) -> None:
    """However large the model, a compile adds less than three float32 copies of its largest tensor to its imports."""
    checkpoint, largest = large_checkpoint(tmp_path / "checkpoint", layers)
    process = child(MEASURES, checkpoint, tmp_path / "bundle", quantization, QUICK)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    added = json.loads(out)["peak"] - json.loads(out)["before"]
    # It needs two copies; all layers in float32 would be one and a half more.
    assert largest < added < 3 * largest


@pytest.mark.parametrize("case", ["architecture", "missing tensor", "quantization", "target", "output", "checkpoint"])
def test_the_command_says_it_in_one_line(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLCPIPE_DEBUG", raising=False)
    checkpoint = write_llama(tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    output, options = tmp_path / "out" / "bundle", []
    if case == "architecture":
        (checkpoint / "config.json").write_text('{"model_type": "rwkv6"}')
    elif case == "missing tensor":
        model = TinyLlama(layers=1)
        write_llama(checkpoint, model)
        (checkpoint / "config.json").write_text(json.dumps(TinyLlama().config_json()))
    elif case == "output":
        output.write_text("a file")
    elif case == "checkpoint":
        checkpoint = tmp_path / "absent"
    else:
        options = [f"--{case}", "nonsense"]
    before = sorted(output.parent.iterdir())
    assert main(["compile", str(checkpoint), "-o", str(output), *options]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and captured.err.rstrip().endswith(lines[0])
    assert "Traceback" not in captured.err
    assert sorted(output.parent.iterdir()) == before
