"""Measures one engine: prefill by length, decode by depth, against the memory's read bandwidth."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.cli import machine
from mlcpipe.progress import Progress

if TYPE_CHECKING:
    from mlcpipe import Engine, Stats

_SEED = 20260101


@dataclass(frozen=True)
class Plan:
    """What to measure; lengths and depths in tokens."""

    bundle: Path
    prefill: tuple[int, ...]
    depths: tuple[int, ...]
    decode_tokens: int
    repeats: int
    threads: int | None


@dataclass(frozen=True)
class Speed:
    """Tokens a second over the repeats."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(tokens: int, seconds: list[float]) -> Speed:
        """From the seconds that each repeat of `tokens` tokens took."""
        rates = [tokens / s for s in seconds]
        return Speed(statistics.median(rates), min(rates), max(rates))


@dataclass(frozen=True)
class Result:
    """One line of the report: `speed` is None if it was skipped, and `skipped` says why.

    `tokens` is the prompt's length or the depth at which decoding began; `gb_s` (10^9 bytes of weights and KV
    cache a second, as the engine counts them) is given for decoding.
    """

    kind: str
    tokens: int
    speed: Speed | None = None
    gb_s: float | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that was measured and on what; bytes, seconds and GB/s of 10^9 bytes."""

    plan: Plan
    results: tuple[Result, ...]
    load_s: float
    peak_memory_bytes: int
    weights_bytes: int
    kv_bytes_per_token: int
    last_cache_bytes: int
    read_gb_s: tuple[float, float]
    threads: int
    context_length: int
    quantization: str
    model_type: str
    cpu: str
    versions: dict[str, str | None]

    def share(self, result: Result) -> float | None:
        """The part of the read bandwidth that decoding used; None for prefill and weights in the cache."""
        if result.gb_s is None or self.weights_bytes < self.last_cache_bytes:
            return None
        return result.gb_s / statistics.mean(self.read_gb_s)


def measure(plan: Plan, progress: Progress) -> Report:
    """Load the bundle and run the plan. Raises what the engine raises."""
    from mlcpipe import Engine

    machine.reset_peak_memory()
    progress.stage("load")
    began = time.perf_counter()
    engine = Engine(plan.bundle, threads=plan.threads)
    load_s = time.perf_counter() - began
    progress.stage("read bandwidth before")
    before = _read_bandwidth(engine.threads)
    draw = random.Random(_SEED)
    tokens = [draw.randrange(engine.vocab_size) for _ in range(engine.context_length)]
    results = []
    for length in plan.prefill:
        progress.stage(f"prefill {length}")
        results.append(_prefill(engine, plan, tokens, length))
    for depth in plan.depths:
        progress.stage(f"decode at {depth}")
        results.append(_decode(engine, plan, tokens, depth))
    peak = machine.peak_memory_bytes()
    progress.stage("read bandwidth after")
    after = _read_bandwidth(engine.threads)
    memory = engine.manifest.memory_plan
    return Report(
        plan=plan,
        results=tuple(results),
        load_s=load_s,
        peak_memory_bytes=peak,
        weights_bytes=memory.weights_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        last_cache_bytes=last_cache_bytes(),
        read_gb_s=(before, after),
        threads=engine.threads,
        context_length=engine.context_length,
        quantization=engine.manifest.quantization,
        model_type=engine.manifest.model.model_type,
        cpu=machine.cpu_model(),
        versions=machine.versions(),
    )


def _prefill(engine: Engine, plan: Plan, tokens: list[int], length: int) -> Result:
    if length > engine.context_length:
        return Result("prefill", length, skipped=f"the context has {engine.context_length} tokens")
    prompt = tokens[:length]

    def once() -> None:
        engine.reset()
        engine.prefill(prompt)

    once()
    return Result("prefill", length, Speed.of(length, [_seconds(once) for _ in range(plan.repeats)]))


def _decode(engine: Engine, plan: Plan, tokens: list[int], depth: int) -> Result:
    """Decoding as a chat does it, the greedy draw and the text of each token included.

    The engine finds the prompt in its cache, so that only the warm-up computes it and each repeat begins at `depth`.
    """
    from mlcpipe import SamplingParams

    start = max(depth, 1)  # there is no continuing from nothing
    prompt = tokens[:start]
    last = start + plan.decode_tokens + 1
    if last > engine.context_length:
        return Result("decode", depth, skipped=f"it ends at {last}, the context has {engine.context_length} tokens")

    def once() -> Stats:
        *_, chunk = engine.generate(
            prompt,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=plan.decode_tokens + 1,  # the first token comes out of the prefill
            ignore_eos=True,
            stream=True,
        )
        assert chunk.stats is not None
        return chunk.stats

    engine.reset()
    once()
    runs = [once() for _ in range(plan.repeats)]
    speed = Speed.of(plan.decode_tokens, [run.decode_s for run in runs])
    return Result("decode", depth, speed, statistics.median(run.decode_gb_s for run in runs))


def _read_bandwidth(threads: int) -> float:
    """Measured in a process of its own, so that its buffer is not counted as the engine's memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(read_bandwidth_gb_s, threads).result()


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
