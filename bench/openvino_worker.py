"""Measures openvino-genai; runs in an environment that has openvino-genai and numpy, and no mlcpipe.

    python openvino_worker.py MODEL KIND TOKENS,TOKENS... --threads 2 --repeats 3 --decode-tokens 32

Prints a line of JSON about the runtime and one for each number of tokens: tokens per second (prefill, decode), seconds
(load) or bytes (memory). Every prefill gets a new random prompt, as the pipeline keeps the KV cache of prefixes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

_SEED = 20260101
_BATCH_PROMPT, _CACHE_GB = 128, 3


class Pipeline:
    """The pipeline on the CPU with token ids in and out; `together` is the one for many requests."""

    def __init__(self, model: Path, threads: int, *, together: bool = False) -> None:
        if together:
            scheduler = genai.SchedulerConfig()
            scheduler.cache_size, scheduler.enable_prefix_caching = _CACHE_GB, False
            self.pipe = genai.ContinuousBatchingPipeline(
                str(model), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
            )
        else:
            self.pipe = genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=threads)
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = int(config["vocab_size"])
        self._draw = random.Random(_SEED)

    def prompt(self, tokens: int) -> Any:
        """Random ids i64[1, tokens]."""
        return np.array([[self._draw.randrange(self._vocabulary) for _ in range(tokens)]], np.int64)

    def greedy(self, count: int) -> Any:
        """Exactly `count` tokens, the most probable each time."""
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        return config

    def generate(self, prompt: Any, count: int) -> Any:
        """Exactly `count` tokens -> the pipeline's result."""
        config = self.greedy(count)
        return self.pipe.generate(genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt))), config)


def _prefill(pipe: Pipeline, tokens: int, options: argparse.Namespace) -> Iterator[float]:
    for _ in range(1 + options.repeats):
        prompt = pipe.prompt(tokens)
        began = time.perf_counter()
        pipe.generate(prompt, 1)
        yield tokens / (time.perf_counter() - began)


def _decode(pipe: Pipeline, tokens: int, options: argparse.Namespace) -> Iterator[float]:
    prompt = pipe.prompt(max(tokens, 1))
    for _ in range(1 + options.repeats):
        result = pipe.generate(prompt, 1 + options.decode_tokens)
        yield 1000 / result.perf_metrics.get_tpot().mean  # milliseconds a token after the first


def _batch(pipe: Pipeline, sequences: int, options: argparse.Namespace) -> Iterator[float]:
    """Tokens per second of all sequences, from when each has its first one."""
    for _ in range(1 + options.repeats):
        count = 1 + 2 * options.decode_tokens
        handles = [
            pipe.pipe.add_request(index, ov.Tensor(pipe.prompt(_BATCH_PROMPT)), pipe.greedy(count))
            for index in range(sequences)
        ]
        waiting = set(range(sequences))
        while waiting:
            pipe.pipe.step()
            waiting -= {index for index in waiting if handles[index].can_read()}
        began = time.perf_counter()
        for _ in range(options.decode_tokens):
            pipe.pipe.step()
        yield sequences * options.decode_tokens / (time.perf_counter() - began)
        while pipe.pipe.has_non_finished_requests():
            pipe.pipe.step()


def _load(options: argparse.Namespace) -> Iterator[float]:
    for _ in range(1 + options.repeats):
        began = time.perf_counter()
        pipe = Pipeline(options.model, options.threads)
        pipe.generate(pipe.prompt(1), 1)
        yield time.perf_counter() - began


def _memory(pipe: Pipeline, tokens: int, options: argparse.Namespace) -> Iterator[float]:
    pipe.generate(pipe.prompt(tokens), options.decode_tokens)
    yield 0.0  # in the place of a warm-up
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    yield 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


_MEASURES = {"prefill": _prefill, "decode": _decode, "batch": _batch, "memory": _memory}


def main() -> int:
    """Measure one kind; the first sample of each is a warm-up and does not count."""
    parser = argparse.ArgumentParser(description="openvino-genai: speed, load, memory")
    parser.add_argument("model", type=Path)
    parser.add_argument("kind", choices=("prefill", "decode", "batch", "load", "memory"))
    parser.add_argument("tokens", type=lambda text: [int(part) for part in text.split(",")])
    for name in ("--threads", "--repeats", "--decode-tokens"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    print(json.dumps({"version": genai.__version__}))
    pipe = (
        None if options.kind == "load" else Pipeline(options.model, options.threads, together=options.kind == "batch")
    )
    for tokens in options.tokens:
        if pipe is None:
            samples = list(_load(options))
        else:
            samples = list(_MEASURES[options.kind](pipe, tokens, options))
        print(json.dumps({"kind": options.kind, "tokens": tokens, "samples": samples[1:]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
