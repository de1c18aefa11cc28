"""The line of statistics under an answer."""

from __future__ import annotations

import pytest

from mlcpipe.cli.chat.stats import stats_line
from mlcpipe.host.finding import byte_size
from mlcpipe.runtime.sampling_params import Stats


@pytest.mark.parametrize(
    ("stats", "peak", "cache", "line"),
    [
        (
            Stats(60, 20, 41, 0.1, 2.0, 0, 40 * 10**9),
            40.0,
            0,
            "prefill 40 tokens, 400 tok/s (+20 cached) · decode 41 tokens, 20.0 tok/s · 20.0 GB/s (50 % of 40.0)",
        ),
        (Stats(1, 0, 1, 0.5, 0.0, 0), 40.0, 0, "prefill 1 token, 2.0 tok/s · decode 1 token"),
        (
            Stats(8, 0, 2001, 0.001, 1.0, 0, 10**10),
            40.0,
            10**10,
            "prefill 8 tokens, 8,000 tok/s · decode 2001 tokens, 2,000 tok/s · 10.0 GB/s (in cache)",
        ),
        (
            Stats(8, 0, 11, 0.1, 1.0, 0, 10**10),
            None,
            0,
            "prefill 8 tokens, 80.0 tok/s · decode 11 tokens, 10.0 tok/s · 10.0 GB/s",
        ),
    ],
)
def test_line(stats: Stats, peak: float | None, cache: int, line: str) -> None:
    assert stats_line(stats, peak, 10**9, cache) == line


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (3 << 40, "3072.00 GiB")]
)
def test_byte_size(count: int, text: str) -> None:
    assert byte_size(count) == text
