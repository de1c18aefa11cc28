"""Decoding of several sequences together: the steps that `mlcpipe serve` computes, without its thread and HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcpipe.cli.bench.results import BenchOptions, Result, Speed
from mlcpipe.support.progress import Progress
from tir_schedules.step_layout import PAGE

if TYPE_CHECKING:
    from mlcpipe.runtime.loading import LoadedBundle
    from mlcpipe.runtime.serving.core import Core

PROMPT = 128  # tokens of each sequence before those that are measured
_WARM_UP = 2  # steps


def measure_batches(
    bundle: LoadedBundle, opts: BenchOptions, tokens: Sequence[int], progress: Progress
) -> list[Result]:
    """Tokens per second of all sequences of each batch of `opts.batches`, greedy, after different prompts."""
    results, most = [], bundle.manifest.model.max_batch
    for batch in opts.batches:
        # While the others' prompts are computed, the first sequences decode some tokens.
        length = PROMPT + batch + _WARM_UP + opts.repeats * opts.decode_tokens + 1
        reason = ""
        if batch > most:
            reason = f"at most {most} sequences are computed together"
        elif length > bundle.context_length:
            reason = f"a sequence ends at {length}, the context has {bundle.context_length} tokens"
        progress.stage(f"decode a batch of {batch}")
        result = Result("batch", batch, skipped=reason) if reason else _measure(bundle, opts, tokens, batch, length)
        results.append(result)
    return results


def _measure(bundle: LoadedBundle, opts: BenchOptions, tokens: Sequence[int], batch: int, length: int) -> Result:
    from mlcpipe.bundle.memory import many_sequences
    from mlcpipe.runtime.serving.adapters import read_packed
    from mlcpipe.runtime.serving.core import GREEDY, Core
    from mlcpipe.runtime.serving.cost_model import CostModel
    from mlcpipe.runtime.serving.limits import Limits
    from mlcpipe.runtime.serving.sequence import ScheduledRequest

    limits = Limits(bundle.context_length, sequences=batch, queue=batch, step_s=float("inf"))
    packed = [read_packed(folder, folder.name, bundle.manifest.model) for folder in opts.adapters]
    units = many_sequences(bundle.manifest, bundle.context_length, batch * (length + PAGE))
    core = Core(bundle, units, limits, CostModel(learn=False), sum(one.blocks for one in packed))
    adapters = [store.load(one) for one in packed] if (store := core.executor.adapters) is not None else []
    for index in range(batch):
        prompt = [tokens[(index + at * (index + 1)) % len(tokens)] for at in range(PROMPT)]
        adapter = adapters[index % len(adapters)] if adapters else None
        core.scheduler.submit(ScheduledRequest(tuple(prompt), length - PROMPT, params=GREEDY, adapter=adapter))
    while len(core.scheduler.admission.running) < batch:
        _step(core)
    for _ in range(_WARM_UP):
        _step(core)
    seconds = []
    for _ in range(opts.repeats):
        began = time.perf_counter()
        for _ in range(opts.decode_tokens):
            _step(core)
        seconds.append(time.perf_counter() - began)
    return Result("batch", batch, Speed.of(batch * opts.decode_tokens, seconds))


def _step(core: Core) -> None:
    """One step of all running sequences."""
    step = core.scheduler.plan(0.0)
    assert step is not None
    core.scheduler.settle(step, core.compute(step), 0.0)
