"""What int8 activations cost whole models: logits with the schedule's knob `int8_activations` on against off.

The knob changes one thing: the input of a matmul is rounded to 127 steps of s = max|x| / 127 in groups of 32 along K.
Per matmul that is, for every output, an error of at most sum over groups of s / 2 * sum|w| (what the kernels' own tests
check). For whole models the bound here is statistical:

- The rounding error of an element is uniform in [-s/2, s/2], of deviation s / sqrt(12), and independent of the others.
- max|x| of 32 numbers is at most sqrt(32) times their root mean square. So an input is off by NOISE = sqrt(32) /
  (127 sqrt(12)) = 1.3 % of its root mean square at most; of normal numbers (max about 2.2 of it) by 0.5 %.
- Weights are random here, so that a matmul passes relative errors on as they are, and norms do too. Independent errors
  add in squares: after the four matmuls of each of L layers and the logits' own, NOISE * sqrt(4 L + 1), 4.6 % for L = 3.

That is the bound on the root mean square of all changes over that of the logits. With inputs that are normal it would
be 2 %; seen are 1.5 % (gemma2) to 3.6 % (llama), since softmax and gate * up pass on more than they get. No single
logit is off by more than six of these deviations (seen: 4.4). Where a router reads such inputs, a near tie may choose
another expert, which is no rounding error: mixtures are judged by the median row alone (seen: 1.5 %).

The trained model shows what that does to its answers: a prompt's KL divergence from float activations is that of decode,
also with outliers: in front of every projection and of what the MLP gives four channels are 100 times as large, and the
columns that read them as much smaller, which computes the same. Where they are folded in, all
roundings of an 8-bit model together, against transformers' float32, cost a tenth of what outliers make int8 cost alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the checkpoints are written by torch")
transformers = pytest.importorskip("transformers", reason="the checkpoints are transformers models")

import mlcpipe
from bench.outliers import plant_outliers
from tests.conftest import DEMO, UNOPTIMIZED
from tests.models import tiny

if TYPE_CHECKING:
    from tests.conftest import Bundles

NOISE = math.sqrt(32) / (127 * math.sqrt(12))
# Every family and every quantization: the kernels do not know of their combination, and each is two compiles.
CASES = (("llama", "q4f16_1"), ("qwen2", "q8f16_1"), ("gemma2", "q8f16_0"), ("qwen3_moe", "q4f16_1"))
TOKENS, PREFILL = 64, 40
RULE = "cpu.int8_matmul"

Array = NDArray[np.float32]


def logits(
    checkpoint: Path, quantization: str, folder: Path, knob: int, prefill: int = PREFILL
) -> tuple[Array, Array, set[str]]:
    """Logits of a prefill and of decode steps, and the rules that made the matmuls."""
    target = folder / f"int8-{knob}.toml"
    target.write_text(f'base = "cpu-native"\n{UNOPTIMIZED}[schedule]\nint8_activations = {knob}\n')
    bundle = mlcpipe.compile(
        checkpoint, target=str(target), quantization=quantization, output=folder / f"bundle-{knob}", context_length=128
    )
    engine = mlcpipe.Engine(bundle, threads=1)
    tokens = np.random.default_rng(7).integers(3, engine.vocab_size, TOKENS).tolist()
    rules = {kernel.rule for kernel in engine.manifest.kernels if kernel.op == "matmul"}
    return engine.logits(tokens), engine.logits_stepwise(tokens, prefill_tokens=prefill), rules


def root_mean_square(rows: Array) -> NDArray[np.float64]:
    """float64[m] of rows [m, n]."""
    result: NDArray[np.float64] = np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1))
    return result


@pytest.fixture(scope="module")
def integer_dots(tiny_bundles: Bundles) -> None:
    """Skips where the target `cpu` names no integer dot product for this CPU."""
    kernels = mlcpipe.Engine(tiny_bundles["q4f16_1"], threads=1).manifest.kernels
    if RULE not in {kernel.rule for kernel in kernels}:
        pytest.skip("no integer dot product for this CPU")


@pytest.mark.usefixtures("integer_dots")
@pytest.mark.full_cases("gemma2-q8f16_0", "qwen3_moe-q4f16_1")
@pytest.mark.parametrize("family, quantization", CASES)
@pytest.mark.full
def test_logits_stay_within_the_bound_of_the_rounding(family: str, quantization: str, tmp_path: Path) -> None:
    case = tiny.TinyCase(family, "default")
    config = tiny.tiny_config(case)
    checkpoint = tiny.write_tiny(case, tmp_path / "checkpoint", seed=0)
    *rounded, rules = logits(checkpoint, quantization, tmp_path, 1)
    *exact, float_rules = logits(checkpoint, quantization, tmp_path, 0)
    assert RULE in rules and RULE not in float_rules
    bound = NOISE * math.sqrt(4 * config.num_hidden_layers + 1)
    for found, expected in zip(rounded, exact):
        change = np.abs(found - expected)
        by_row = root_mean_square(change) / root_mean_square(expected)
        assert by_row.min() > 1e-4  # activations are rounded at all: another order of sums changes 1e-6
        if hasattr(config, "num_experts"):
            assert np.median(by_row) < bound
        else:
            size = float(np.sqrt((expected.astype(np.float64) ** 2).mean()))
            assert float(np.sqrt((change.astype(np.float64) ** 2).mean())) < bound * size
            assert change.max() < 6 * bound * size


def divergence(exact: Array, found: Array) -> float:
    """Mean KL divergence of the rows of logits, in nats."""
    p, q = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)) for rows in (exact.astype(np.float64), found))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.usefixtures("integer_dots")
@pytest.mark.full
def test_a_prompt_diverges_no_more_than_decode(tmp_path: Path) -> None:
    checkpoint = plant_outliers(DEMO, tmp_path / "checkpoint", factor=100, channels=4)
    prompt, steps, rules = logits(checkpoint, "q4f16_1", tmp_path, 1, prefill=1)
    exact, _, _ = logits(checkpoint, "q4f16_1", tmp_path, 0, prefill=TOKENS - 1)
    assert RULE in rules
    few = divergence(exact[1:], steps[1:])  # the first row of steps is a prompt's, too
    assert 0 < divergence(exact[1:], prompt[1:]) <= 1.3 * few
    folded = mlcpipe.compile(
        checkpoint, target=str(tmp_path / "int8-1.toml"), quantization="q8f16_1", output=tmp_path / "folded",
        context_length=128, fold_outliers="weights",
    )  # fmt: skip
    engine = mlcpipe.Engine(folded, threads=1)
    tokens = np.random.default_rng(7).integers(3, engine.vocab_size, TOKENS).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        reference = model(torch.tensor([tokens])).logits[0].numpy()
    for rows in (engine.logits(tokens), engine.logits_stepwise(tokens, prefill_tokens=1)):
        assert divergence(reference, rows) < 0.1 * few
