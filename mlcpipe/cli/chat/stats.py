"""The line under an answer: tokens per second, and the share of the memory bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlcpipe.errors import ResourceError
from mlcpipe.host.bandwidth import cached_read_bandwidth_gb_s, last_cache_bytes
from mlcpipe.support.env import env

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe import Engine
    from mlcpipe.runtime.sampling_params import Stats


class SpeedLine:
    """Makes the line under an answer; the bandwidth it compares with is measured once per boot."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self._engine = engine
        self._weights = engine.manifest.memory_plan.weights_bytes
        self._console = console
        self._peak: float | None = None

    def measure(self, seen_gb_s: float = 0.0) -> None:
        """Measure, or recall, the read bandwidth, except for a model in the cache or on a device with own memory."""
        on_host, cache = self._engine.on_host, env().cache
        if not on_host or cache is None or (self._peak or 0.0) > seen_gb_s or self._weights < last_cache_bytes():
            return
        try:
            with self._console.status("measuring the memory bandwidth (once per boot)"):
                peak = cached_read_bandwidth_gb_s(self._engine.threads, cache, seen_gb_s=seen_gb_s)
                self._peak = max(peak, self._peak or 0.0)
        except ResourceError:
            return  # no room to measure: the speeds are shown without the share

    def __call__(self, stats: Stats) -> str:
        self.measure(stats.decode_gb_s)
        return stats_line(stats, self._peak, self._weights, last_cache_bytes())


def stats_line(stats: Stats, peak_gb_s: float | None, weights_bytes: int, cache_bytes: int) -> str:
    """Speeds of one answer in one line.

    `peak_gb_s` is the measured read bandwidth of the memory, None where it is not known. A model whose
    weights fit in the last cache (`cache_bytes`, 0 if unknown) is not read from memory: then the share would
    mean nothing.
    """
    prefill = _speed("prefill", stats.prompt_tokens - stats.cached_tokens, stats.prefill_tok_s)
    if stats.cached_tokens:
        prefill += f" (+{stats.cached_tokens} cached)"
    parts = [prefill, _speed("decode", stats.completion_tokens, stats.decode_tok_s)]
    if stats.decode_gb_s > 0:
        share = bandwidth_share(stats.decode_gb_s, peak_gb_s, weights_bytes, cache_bytes)
        parts.append(f"{stats.decode_gb_s:.1f} GB/s{share}")
    if stats.cache_miss is not None and stats.cache_miss.reason != "first_prompt":
        at = "" if stats.cache_miss.token is None else f" at token {stats.cache_miss.token}"
        parts.append(f"no more cached: {stats.cache_miss.reason.replace('_', ' ')}{at}")
    if stats.dropped_tokens:
        parts.append(f"{stats.dropped_tokens} dropped")
    return " · ".join(parts)


def _speed(name: str, tokens: int, tok_s: float) -> str:
    """'decode 43 tokens, 1,498 tok/s'; without the speed if nothing was timed."""
    speed = f", {tok_s:,.0f} tok/s" if tok_s >= 100 else f", {tok_s:.1f} tok/s" if tok_s > 0 else ""
    return f"{name} {tokens} token{'' if tokens == 1 else 's'}{speed}"


def bandwidth_share(gb_s: float, peak_gb_s: float | None, weights_bytes: int, cache_bytes: int) -> str:
    """The share behind a rate, as in " (46 % of 43.5)"; or why there is none."""
    if weights_bytes < cache_bytes:
        return " (in cache)"
    if not peak_gb_s:
        return ""
    return f" ({100 * gb_s / peak_gb_s:.0f} % of {peak_gb_s:.1f})"
