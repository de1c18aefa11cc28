"""Options and results of `mlcpipe bench`."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; lengths and depths in tokens, `batches` in sequences, `adapters` as folders."""

    bundle: Path
    prefill: tuple[int, ...]
    depths: tuple[int, ...]
    decode_tokens: int
    repeats: int
    threads: int | None
    device: str | None = None
    batches: tuple[int, ...] = ()
    adapters: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Median, lowest and highest over the repeats; tokens per second unless noted."""

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

    `tokens` is the prompt's length, the depth at which decoding began or, of a batch, its sequences. For decoding
    `gb_s` is 10^9 bytes of weights and KV cache per second, as the engine counts them, and `share` its share of the
    read bandwidth before and after each repeat, which changes within seconds on a shared machine: at most all of it.
    """

    kind: str
    tokens: int
    speed: Speed | None = None
    gb_s: float | None = None
    share: float | None = None
    skipped: str = ""


@dataclass(frozen=True)
class Memory:
    """The most memory at the end of a measurement, bytes.

    `resident` counts everything, mapped files (code, weights) included. `private` is without mapped files, None if the
    system does not tell; `kv` is the part of the KV cache written by then, and `base` the private memory after the
    imports of Python, mlcpipe and TVM's runtime library, before loading.
    """

    resident: int
    private: int | None
    kv: int
    base: int | None
    weights: int

    @property
    def beyond(self) -> int | None:
        """The process's memory beyond weights and KV cache."""
        return None if self.private is None else self.private - self.kv


@dataclass(frozen=True)
class Report:
    """All results, and the machine; bytes, seconds and GB/s of 10^9 bytes.

    `first_token_s` is from opening the bundle (in the page cache) to the first token of a prompt of one; `import_s` is
    the time of importing TVM before that. `read_bytes` are the weight bytes that a decode step reads.
    """

    plan: BenchOptions
    results: tuple[Result, ...]
    import_s: float
    load_s: float
    first_token_s: Speed
    memory: Memory
    weights_bytes: int
    read_bytes: int
    kv_bytes_per_token: int
    last_cache_bytes: int
    read_gb_s: tuple[float, ...]
    threads: int
    context_length: int
    quantization: str
    model_type: str
    cpu: str
    device: str
    on_host: bool
    versions: dict[str, str | None]

    def share(self, result: Result) -> float | None:
        """The part of the read bandwidth that decoding used; None for prefill, weights in the cache, and devices."""
        if not self.on_host or result.gb_s is None or self.read_bytes < self.last_cache_bytes:
            return None
        return result.share
