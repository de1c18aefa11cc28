"""The line under an answer: tokens a second, and how much of what the memory can deliver that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlcpipe.runtime.sampling_params import Stats


def stats_line(stats: Stats, peak_gb_s: float | None, weights_bytes: int, cache_bytes: int) -> str:
    """Speeds of one answer in one line.

    `peak_gb_s` is the measured read bandwidth of the memory, None where it is not known. A model whose
    weights fit in the last cache (`cache_bytes`, 0 if unknown) is not read from memory: then the share would
    mean nothing.
    """
    computed = stats.prompt_tokens - stats.cached_tokens
    parts = [f"prefill {computed} tokens"]
    if stats.prefill_s > 0:
        parts[0] += f" at {stats.prefill_tok_s:,.1f} tok/s"
    if stats.cached_tokens:
        parts[0] += f" (+{stats.cached_tokens} cached)"
    decode = f"decode {stats.completion_tokens} tokens"
    if stats.decode_s > 0 and stats.completion_tokens > 1:
        decode += f" at {stats.decode_tok_s:,.1f} tok/s"
    parts.append(decode)
    if stats.decode_gb_s > 0:
        share = bandwidth_share(stats.decode_gb_s, peak_gb_s, weights_bytes, cache_bytes)
        parts.append(f"{stats.decode_gb_s:.1f} GB/s{share}")
    return " · ".join(parts)


def bandwidth_share(gb_s: float, peak_gb_s: float | None, weights_bytes: int, cache_bytes: int) -> str:
    """ " (46 % of 43.5)", or why there is no share."""
    if weights_bytes < cache_bytes:
        return " (weights fit in the cache)"
    if not peak_gb_s:
        return ""
    return f" ({100 * gb_s / peak_gb_s:.0f} % of {peak_gb_s:.1f})"
