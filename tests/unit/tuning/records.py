"""A tuning record, and others like it."""

from __future__ import annotations

from typing import Any

from mlcpipe.tuned.records import Record

GOOD: dict[str, Any] = {
    "kernel": "0123456789abcdef",
    "name": "matmul 64x32 int4",
    "rule": "cpu.int8_matmul",
    "bucket": "gemv",
    "variant": "avx2",
    "device": "Some CPU @ 3 GHz",
    "knobs": {"int8_prefetch_words": 32, "int8_rows.few": 4},
    "default_us": 100.0,
    "tuned_us": 80.0,
    "quartile": 1.2,
    "pairs": 24,
    "date": "2026-11-21",
}


def record(**changes: Any) -> Record:
    return Record(**{**GOOD, **changes})
