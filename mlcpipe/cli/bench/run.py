"""Measures one engine: prefill by length, decode by depth, against the memory's read bandwidth."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlcpipe.cli.bench.batch import measure_batches
from mlcpipe.cli.bench.gauges import BandwidthProbe, MemoryGauge
from mlcpipe.cli.bench.results import BenchOptions, Memory, Report, Result, Speed
from mlcpipe.host import memory
from mlcpipe.host.bandwidth import last_cache_bytes
from mlcpipe.host.cpu import cpu_model
from mlcpipe.host.versions import versions
from mlcpipe.support.progress import Progress

if TYPE_CHECKING:
    from mlcpipe import Engine, Stats

_SEED = 20260101


def measure(opts: BenchOptions, progress: Progress) -> Report:
    """Load the bundle and measure it. Raises what the engine raises."""
    began = time.perf_counter()
    from mlcpipe import Engine

    import_s = time.perf_counter() - began
    memory.reset_peak_memory()
    base = memory.private_memory_bytes()
    progress.stage("load")
    adapter = opts.adapters[0] if opts.adapters else None
    first_token_s, engine = _load(
        lambda: Engine(opts.bundle, threads=opts.threads, device=opts.device, adapter=adapter), opts.repeats
    )
    gauge = MemoryGauge(engine)
    draw = random.Random(_SEED)
    tokens = [draw.randrange(engine.vocab_size) for _ in range(engine.context_length)]
    results = []
    for length in opts.prefill:
        progress.stage(f"prefill {length}")
        results.append(_prefill(engine, opts, tokens, length))
        gauge.read(length)
    with BandwidthProbe(engine.threads) as probe:
        progress.stage("read bandwidth")
        probe.read()
        for depth in opts.depths:
            progress.stage(f"decode at {depth}")
            results.append(_decode(engine, opts, tokens, depth, probe))
            gauge.read(depth + opts.decode_tokens)
    if opts.batches:
        results += measure_batches(engine.model.bundle, opts, tokens, progress)
    resident = memory.peak_memory_bytes()
    planned = engine.manifest.memory_plan
    return Report(
        plan=opts,
        results=tuple(results),
        import_s=import_s,
        load_s=engine.load_s,
        first_token_s=first_token_s,
        memory=Memory(resident, gauge.private, gauge.kv, base, planned.weights_bytes),
        weights_bytes=planned.weights_bytes,
        read_bytes=planned.weights_read,
        kv_bytes_per_token=engine.manifest.kv_bytes_per_token,
        last_cache_bytes=last_cache_bytes(),
        read_gb_s=tuple(probe.readings),
        threads=engine.threads,
        context_length=engine.context_length,
        quantization=engine.manifest.quantization,
        model_type=engine.manifest.model.model_type,
        cpu=cpu_model(),
        device=engine.device,
        on_host=engine.on_host,
        versions=versions(),
    )


def _load(open_bundle: Callable[[], Engine], repeats: int) -> tuple[Speed, Engine]:
    """Open the bundle and ask for a token, several times -> the seconds of each, and the last engine.

    The first time does not count: it brings the file into the page cache.
    """
    from mlcpipe import SamplingParams

    seconds = []
    for _ in range(1 + repeats):
        engine: Engine | None = None  # the previous engine has its weights in memory
        began = time.perf_counter()
        engine = open_bundle()
        engine.generate([0], sampling=SamplingParams(temperature=0.0), max_tokens=1, ignore_eos=True)
        seconds.append(time.perf_counter() - began)
    assert engine is not None
    counted = seconds[1:]
    return Speed(statistics.median(counted), min(counted), max(counted)), engine


def _prefill(engine: Engine, opts: BenchOptions, tokens: list[int], length: int) -> Result:
    if length > engine.context_length:
        return Result("prefill", length, skipped=f"the context has {engine.context_length} tokens")
    prompt = tokens[:length]

    def once() -> None:
        engine.reset()
        engine.prefill(prompt)

    once()
    return Result("prefill", length, Speed.of(length, [_seconds(once) for _ in range(opts.repeats)]))


def _decode(engine: Engine, opts: BenchOptions, tokens: list[int], depth: int, probe: BandwidthProbe) -> Result:
    """Decoding as in a chat, including greedy sampling and the text of each token.

    The engine finds the prompt in its cache, so that only the warm-up computes it and each repeat begins at `depth`.
    """
    from mlcpipe import SamplingParams

    start = max(depth, 1)  # an empty prompt cannot be continued
    prompt = tokens[:start]
    last = start + opts.decode_tokens + 1
    if last > engine.context_length:
        return Result("decode", depth, skipped=f"it ends at {last}, the context has {engine.context_length} tokens")

    def once() -> Stats:
        *_, chunk = engine.generate(
            prompt,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=opts.decode_tokens + 1,  # the first token comes out of the prefill
            ignore_eos=True,
            stream=True,
        )
        assert chunk.stats is not None
        return chunk.stats

    engine.reset()
    once()
    runs, shares = [], []
    before = probe.read()
    for _ in range(opts.repeats):
        runs.append(once())
        after = probe.read()
        shares.append(runs[-1].decode_gb_s / max((before + after) / 2, runs[-1].decode_gb_s))
        before = after
    speed = Speed.of(opts.decode_tokens, [run.decode_s for run in runs])
    gb_s = statistics.median(run.decode_gb_s for run in runs)
    return Result("decode", depth, speed, gb_s, statistics.median(shares))


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
