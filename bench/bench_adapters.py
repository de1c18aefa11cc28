"""Measures what LoRA adapters cost: steps of answers with none, with one for all, and with another one for each, in turn.

    python -m bench.bench_adapters [--model llama-1b] [--quantization q4f16_1] [--rank 16] [--batches 1,8]

The adapters are random, for all projections. Ratios are of medians adjacent in time; the limit follows from the bytes that
a step reads.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.table import Table
from safetensors.numpy import save_file

from bench.make_checkpoint import SHAPES, make_checkpoint
from bench.prepare import default_work
from bench.program import command_line, run_program
from mlcpipe.bundle.manifest import Manifest
from mlcpipe.bundle.memory import many_sequences
from mlcpipe.bundle.model_info import AdaptedInfo
from mlcpipe.cli.terminal import stdout_console
from mlcpipe.loading import prepare_bundle
from mlcpipe.runtime.loading import LoadedBundle, load_bundle
from mlcpipe.runtime.serving.adapters import Adapter, block_bytes, blocks_of, read_packed
from mlcpipe.runtime.serving.core import GREEDY, Core
from mlcpipe.runtime.serving.limits import Limits
from mlcpipe.runtime.serving.sequence import ScheduledRequest

_PROMPT, _CONTEXT, _STEPS, _ROUNDS = 32, 256, 12, 8


def write_adapter(folder: Path, adapted: Sequence[AdaptedInfo], rank: int, seed: int) -> Path:
    """A random adapter of these projections, in PEFT's files."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for one in adapted:
        for source, rows in zip(one.sources, one.columns):
            for letter, shape in (("A", (rank, one.inputs)), ("B", (rows, rank))):
                name = f"base_model.model.{source.removesuffix('.weight')}.lora_{letter}.weight"
                tensors[name] = draw.standard_normal(shape, np.float32) * np.float32(0.01)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def decode_s(core: Core, prompts: Sequence[tuple[int, ...]], adapters: Sequence[Adapter | None]) -> float:
    """Median seconds of decode steps of all these requests."""
    for prompt, adapter in zip(prompts, adapters):
        core.scheduler.submit(ScheduledRequest(prompt, _STEPS + 4, params=GREEDY, adapter=adapter))
    running, seconds = core.scheduler.admission.running, []
    while core.scheduler.has_work:
        together, began = len(running) == len(prompts), time.perf_counter()
        step = core.scheduler.plan(began)
        assert step is not None
        core.scheduler.settle(step, core.compute(step), time.perf_counter())
        if together:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(core: Core, adapters: Sequence[Adapter], batch: int) -> dict[str, tuple[float, float]]:
    """For one adapter, and one per request: tokens per second relative to none, and the lowest ratio of a round."""
    draw = random.Random(batch)
    vocab = core.bundle.manifest.model.vocab_size
    prompts = [tuple(draw.randrange(1, vocab) for _ in range(_PROMPT)) for _ in range(batch)]
    kinds: dict[str, Sequence[Adapter | None]] = {"one": [adapters[0]] * batch}
    if batch > 1:
        kinds["different"] = adapters[:batch]
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(_ROUNDS + 1):
        for kind, chosen in kinds.items():
            before = decode_s(core, prompts, [None] * batch)
            ratios[kind].append(before / decode_s(core, prompts, chosen))
    return {kind: (statistics.median(values[1:]), min(values[1:])) for kind, values in ratios.items()}


def limit_of(manifest: Manifest, adapters: int, rank: int) -> float:
    """Tokens per second beside none, if a step took as long as its bytes."""
    weights = manifest.memory_plan.weights_read
    return weights / (weights + adapters * blocks_of(rank) * block_bytes(manifest.model))


def load(name: str, work: Path, quantization: str) -> LoadedBundle:
    """A bundle for adapters of a random model with published shapes."""
    checkpoint = work / name
    if not checkpoint.is_dir():
        make_checkpoint(name, checkpoint)
    made = prepare_bundle(str(checkpoint), target="cpu", quantization=quantization, adapters=True)
    return load_bundle(made, _CONTEXT)


def main() -> int:
    """Measure, and print a table."""
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama-1b")
    parser.add_argument("--work", type=Path, default=default_work(), help="folder that keeps checkpoints")
    parser.add_argument("--quantization", default="q4f16_1")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", default="1,8")
    options = parser.parse_args()
    bundle = load(options.model, options.work, options.quantization)
    model, batches = bundle.manifest.model, [int(one) for one in options.batches.split(",")]
    table = Table("answers", "adapters", "tokens/s beside none", "lowest", "limit of the bytes")
    for batch in batches:
        limits = Limits(_CONTEXT, sequences=batch, queue=batch)
        core = Core(
            bundle,
            many_sequences(bundle.manifest, bundle.context_length, batch * _CONTEXT),
            limits,
            adapter_blocks=batch * blocks_of(options.rank),
        )
        store = core.executor.adapters
        assert store is not None
        with TemporaryDirectory() as folder:
            names = [write_adapter(Path(folder) / str(i), model.adapted, options.rank, i) for i in range(batch)]
            adapters = [store.load(read_packed(name, name.name, model)) for name in names]
        for kind, (ratio, lowest) in measure(core, adapters, batch).items():
            limit = limit_of(bundle.manifest, 1 if kind == "one" else batch, options.rank)
            table.add_row(str(batch), kind, f"{ratio:.3f}", f"{lowest:.3f}", f"{limit:.3f}")
    stdout_console().print(table)
    return 0


if __name__ == "__main__":
    run_program(main)
