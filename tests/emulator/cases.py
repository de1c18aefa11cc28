"""What engines on emulated GPUs are asked, and what they must answer: whole tiny models, in float32 and packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import mlcpipe
from mlcpipe import Engine
from mlcpipe.models import model_types
from tests.conftest import EXACT
from tests.models import tiny

FAMILIES = model_types()
# Activations in float16 and one chunk of 40 tokens: matrix units, tiles that are not full, rows of x that end within 32
# columns (104 of them, where weights have no groups).
PACKED = ("q4f16_1", "q8f16_1", "q0f16")
TOKENS, PREFILL = 40, 12
# Chunks of 8 tokens: a prompt of 20 attends to cached pages too, and stays inside the smallest window.
_CHUNKS = "[limits]\nmax_prefill_chunk = 8\n"
_CONTEXT = 160
_TOLERANCE = 1e-4  # of the CPU's, in tests/models/test_parity.py
# Of the largest logit: activations in float16 have 11 bits, 2**-11 a rounding, and some hundred of them.
_FLOAT16 = 2e-2


def compiled(checkpoint: Path, target: str, folder: Path, scheme: str) -> Path:
    """The bundle of a checkpoint for a target's description."""
    described = folder.parent / f"{folder.name}.toml"
    described.write_text(target, encoding="utf-8")
    return mlcpipe.compile(
        checkpoint, target=str(described), output=folder, quantization=scheme, context_length=_CONTEXT
    )


def family_job(family: str, target: str, folder: Path) -> dict[str, Any]:
    """A family in float32: what `emulated_engine` runs of it."""
    case = tiny.TinyCase(family, "default")
    checkpoint = tiny.write_tiny(case, folder / f"{family}-checkpoint")
    return {
        "bundle": compiled(checkpoint, target + _CHUNKS, folder / family, "q0f32"),
        "tokens": tiny.prompt_tokens(case, TOKENS),
        "prefill": PREFILL,
        "greedy": [tiny.prompt_tokens(case, tiny.GREEDY_PROMPT), tiny.GREEDY_TOKENS],
    }


def packed_job(checkpoint: Path, target: str, scheme: str) -> dict[str, Any]:
    """Packed weights, activations in float16."""
    bundle = compiled(checkpoint, target, checkpoint.parent / scheme, scheme)
    return {"bundle": bundle, "tokens": list(range(TOKENS)), "prefill": PREFILL}


def equals_transformers(family: str, one: dict[str, Any]) -> None:
    """In float32: chunks of a prompt, each decode step, and greedy tokens."""
    case = tiny.TinyCase(family, "default")
    expected = tiny.reference_logits(case, one["tokens"])
    np.testing.assert_allclose(one["all"], expected, rtol=0, atol=_TOLERANCE)
    steps = tiny.reference_stepwise(case, one["tokens"], PREFILL)
    np.testing.assert_allclose(one["steps"], steps, rtol=0, atol=_TOLERANCE)
    assert one["tokens_after"].tolist() == tiny.reference_greedy(case, one["greedy"][0])


def equals_cpu_engine(checkpoint: Path, scheme: str, one: dict[str, Any], folder: Path) -> None:
    """The same weights on the CPU, activations in float32."""
    expected = Engine(compiled(checkpoint, EXACT, folder / "cpu", scheme)).logits(one["tokens"])
    bound = _FLOAT16 * float(np.abs(expected).max())
    np.testing.assert_allclose(one["all"], expected, rtol=0, atol=bound)
    np.testing.assert_allclose(one["steps"], expected[PREFILL - 1 :], rtol=0, atol=bound)
