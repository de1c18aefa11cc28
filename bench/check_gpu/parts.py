"""The parts of `make check-gpu`: each takes a device and returns numbers, or says why it failed or was skipped."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.check_gpu.synthetic import SMALL, device_weights, large_config, small_config, write_checkpoint
from mlcpipe import devices
from mlcpipe.devices.base import Device
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import MlcpipeError
from mlcpipe.support.progress import SilentProgress

Result = dict[str, Any]
PROMPT, GREEDY = 48, 32
BATCHES = (1, 2, 4, 8, 16, 32)
# Largest difference of logits from the CPU's in float32, as a share of the largest logit, by dtype of activations.
BOUNDS = {"float32": 5e-3, "float16": 2e-2}  # keys and values are float16 in both
LAYER = "VK_LAYER_KHRONOS_validation"


@dataclass(frozen=True)
class Setup:
    """A device, its best target, and a folder for bundles."""

    device: Device
    target: str
    work: Path

    @staticmethod
    def of(spec: str, work: Path) -> Setup:
        """The device that `--device` names."""
        device = devices.choose(spec)
        return Setup(device, device.best_target(), work)

    @property
    def large(self) -> str:
        """The model whose speed is measured."""
        return "llama-3m" if is_software(self.device) else "llama-8b"


@dataclass(frozen=True)
class Part:
    """One part's function, its time limit, and its kinds of device."""

    run: Callable[[Setup], Result]
    limit_s: float
    kinds: Collection[str]


def is_software(device: Device) -> bool:
    """Whether a CPU does the work of a device."""
    return getattr(device, "kind", "") == "software"


def gpus() -> list[str]:
    """`cuda:0`, `vulkan:0`: every GPU on every API; software devices if there is nothing else."""
    found: list[Device] = []
    for name in devices.kinds():
        try:
            found += devices.kind(name).devices()
        except MlcpipeError:
            continue
    gpus = [device for device in found if not device.on_host and device.index >= 0]
    return [device.spec for device in [gpu for gpu in gpus if not is_software(gpu)] or gpus]


def machine() -> dict[str, Any]:
    """Facts about this machine and its packages."""
    done = subprocess.run([sys.executable, "-m", "mlcpipe", "--version"], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines()) | {"system": " ".join(os.uname()[::2])}


def list_device(setup: Setup) -> Result:
    """Name, memory and target."""
    return {
        "name": setup.device.name,
        "target": setup.target,
        "free_gb": setup.device.free_memory().nbytes / 1e9,
    }


def copy_bandwidth(setup: Setup) -> Result:
    """GB/s (10^9 bytes read and written) of copies within the device: the limit that decoding is compared with."""
    return {"copy_gb_s": _copy_gb_s(setup.device)}


def _copy_gb_s(device: Device) -> float:
    count = 1 << (22 if is_software(device) else 28)
    source, destination = (tvm_runtime.empty((count,), "float16", device.handle) for _ in range(2))

    def once() -> None:
        for _ in range(4):
            tvm_runtime.copy(source, destination)
        tvm_runtime.wait_for(device.handle)

    once()
    return 4 * 2 * 2 * count / _median_s(once, 5) / 1e9


def parity(family: str) -> Callable[[Setup], Result]:
    """Compare logits and greedy tokens of a small int4 model with the CPU's; tests compare those with transformers."""

    def run(setup: Setup) -> Result:
        return _parity(setup, family, setup.target)

    return run


def _parity(setup: Setup, family: str, target: str) -> Result:
    import mlcpipe

    work = setup.work / f"{family}-{target}"
    checkpoint = write_checkpoint(small_config(family), work / "checkpoint", values=True)
    reference_target = work / "reference.toml"
    reference_target.write_text(
        'description = "float32 activations"\nbase = "cpu-native"\n[schedule]\nint8_activations = 0\n'
    )
    bundles = {
        "reference": mlcpipe.compile(
            checkpoint, target=str(reference_target), quantization="q4f16_1", output=work / "r"
        ),
        "device": mlcpipe.compile(checkpoint, target=target, quantization="q4f16_1", output=work / "d"),
    }
    engine = mlcpipe.Engine(bundles["device"], device=setup.device.spec)
    prompt = np.random.default_rng(7).integers(3, 500, PROMPT).tolist()
    greedy = mlcpipe.SamplingParams(temperature=0.0)
    tokens = engine.generate(prompt, sampling=greedy, max_tokens=GREEDY, ignore_eos=True).token_ids
    whole = [*prompt, *tokens]
    expected = mlcpipe.Engine(bundles["reference"]).logits(whole)
    scale = float(np.abs(expected).max())
    difference = float(np.abs(engine.logits(whole) - expected).max()) / scale
    bound = BOUNDS[engine.manifest.model.dtype]
    # A token may differ from the reference's where two logits are nearer than the bound.
    rows = expected[PROMPT - 1 : -1]
    regret = float((rows.max(1) - rows[np.arange(len(tokens)), tokens]).max()) / scale
    result: Result = {"target": target, "difference": difference, "regret": regret, "bound": bound}
    if not difference <= bound or not regret <= 2 * bound:
        result["failed"] = f"{family} differs from the CPU: {difference:.2g} of the largest logit, bound {bound:.2g}"
    return result


def matrices(setup: Setup) -> Result:
    """The parity of llama on the target for cooperative matrices, where the device has one."""
    target = getattr(setup.device, "matrix_target", str)()
    if not target:
        return {"skipped": "the device has no cooperative matrices of a size that a target uses"}
    return _parity(setup, "llama", target)


def validation(setup: Setup) -> Result:
    """A chat step under Khronos' validation layer: each of its messages is an error."""
    work = setup.work / "validation"
    checkpoint = write_checkpoint(small_config("llama"), work / "checkpoint", values=True)
    import mlcpipe

    bundle = mlcpipe.compile(checkpoint, target=setup.target, output=work / "bundle")
    code = (
        f"import mlcpipe; engine = mlcpipe.Engine({str(bundle)!r}, device={setup.device.spec!r}); "
        "engine.generate(list(range(3, 40)), max_tokens=20, ignore_eos=True)"
    )
    env = {**os.environ, "VK_INSTANCE_LAYERS": LAYER}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1][:300]
    if done.returncode and LAYER in last:
        return {"skipped": "the validation layer is not installed"}
    return {"messages": 0} if not done.returncode else {"failed": last}


def speed(setup: Setup) -> Result:
    """Prefill and decode of a large int4 model, in tokens per second and GB/s next to the copy bandwidth."""
    from mlcpipe.runtime.model import LoadedModel
    from mlcpipe.runtime.sampler import Row
    from mlcpipe.runtime.sampling_params import SamplingParams

    bundle = _large_bundle(setup)
    model = LoadedModel(bundle)
    plan, vocab = bundle.manifest.memory_plan, bundle.manifest.model.vocab_size
    row = Row(SamplingParams(temperature=0.0))
    length, steps = (128, 8) if is_software(setup.device) else (512, 64)
    prompt = np.random.default_rng(7).integers(3, vocab, length).tolist()

    def prefill() -> None:
        model.reset()
        model.prefill(prompt, row)

    prefill()
    prefill_s = _median_s(prefill, 3)
    token = 5
    for _ in range(8):
        token = model.step(token, row)
    began = time.perf_counter()
    for _ in range(steps):
        token = model.step(token, row)
    decode_tok_s = steps / (time.perf_counter() - began)
    read = plan.weights_read + bundle.manifest.kv_bytes_per_token * model.length
    copy_gb_s = _copy_gb_s(setup.device)
    gb_s = read * decode_tok_s / 1e9
    return {
        "model": setup.large,
        "prefill_tokens": length,
        "prefill_tok_s": length / prefill_s,
        "decode_tok_s": decode_tok_s,
        "decode_gb_s": gb_s,
        "copy_gb_s": copy_gb_s,
        "share": gb_s / copy_gb_s,
    }


def no_graphs(setup: Setup) -> Result:
    """Decode with one launch per kernel instead of one CUDA graph per step."""
    os.environ["MLCPIPE_CUDA_GRAPHS"] = "0"
    return speed(setup)


def batches(setup: Setup) -> Result:
    """Decode steps of 1 to 32 sequences at once, tokens per second in all."""
    from mlcpipe.cli.bench.batch import measure_batches
    from mlcpipe.cli.bench.results import BenchOptions

    bundle = _large_bundle(setup)
    tokens = np.random.default_rng(7).integers(3, bundle.manifest.model.vocab_size, 256).tolist()
    plan = BenchOptions(Path(), (), (), 4, 4, None, batches=BATCHES)
    results = measure_batches(bundle, plan, tokens, SilentProgress())
    return {"model": setup.large, "tok_s": {str(one.tokens): one.speed and one.speed.median for one in results}}


def tune(setup: Setup) -> Result:
    """A short `mlcpipe tune`: that candidates build, run and are measured on this device."""
    checkpoint = write_checkpoint(small_config("llama"), setup.work / "tune" / "checkpoint", values=True)
    command = [sys.executable, "-m", "mlcpipe", "tune", str(checkpoint), "--target", setup.target, "--budget", "30s",
               "--trials", "4", "--records", str(setup.work / "tune" / "records.json"), "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    found = json.loads(done.stdout)
    measured = sum(kernel["default_us"] is not None for kernel in found["kernels"])
    return {key: value for key, value in found.items() if isinstance(value, int | float | str)} | {"measured": measured}


def _large_bundle(setup: Setup) -> Any:
    """The large model on the device: compiled once for all parts, weights made where they are used."""
    from mlcpipe.compiler.compile import compile_code
    from mlcpipe.runtime.loading import load_bundle

    folder = setup.work / f"{setup.large}-{setup.target}"
    if not folder.exists():
        checkpoint = write_checkpoint(large_config(setup.large), setup.work / f"{folder.name}-shape", values=False)
        compile_code(checkpoint, target=setup.target, output=folder)
    return load_bundle(folder, device=setup.device.spec, make_weights=device_weights)


def _median_s(work: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


_ALL = ("cuda", "metal", "vulkan")
PARTS: Mapping[str, Part] = {
    "device": Part(list_device, 60, _ALL),
    "copy": Part(copy_bandwidth, 30, _ALL),
    **{f"parity-{family}": Part(parity(family), 60, _ALL) for family in SMALL},
    "validation": Part(validation, 60, ("vulkan",)),
    "speed": Part(speed, 150, _ALL),
    "no-graphs": Part(no_graphs, 60, ("cuda",)),
    "batches": Part(batches, 90, _ALL),
    "matrices": Part(matrices, 60, ("vulkan",)),
    "tune": Part(tune, 60, _ALL),
}
