"""AWQ: folded factors change no function, and win back what large channels cost where inputs are rounded to int8."""

from __future__ import annotations

from copy import copy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="tiny checkpoints are written by torch")
pytest.importorskip("transformers", reason="tiny checkpoints are written by transformers")

from mlcpipe.checkpoint import open_checkpoint
from mlcpipe.compiler.calibration.awq import factors_of, fold_layer, output_error
from mlcpipe.compiler.calibration.fold import Fold, Folded, folds_of
from mlcpipe.compiler.calibration.layer import model_of
from mlcpipe.compiler.calibration.outliers import expected_inputs
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.models import model_types
from mlcpipe.quantization import load_scheme
from mlcpipe.quantization.inputs import Inputs
from tests.models import tiny

BIASED = {"llama": {"attention_bias": True, "mlp_bias": True}}
CASES = {name: tiny.TinyCase(name, "default", BIASED.get(name, {})) for name in model_types()}
# The layers of the others fold as those of one of these; they are for `make test-everything`.
USUAL = ("llama", "phi3", "gemma", "gpt_oss")
FAMILIES = [pytest.param(name, marks=() if name in USUAL else pytest.mark.everything) for name in CASES]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_folding_changes_no_function(family: str, tmp_path: Path) -> None:
    tiny.write_tiny(CASES[family], tmp_path, seed=1)
    source = open_checkpoint(tmp_path)
    windows = [tiny.prompt_tokens(CASES[family], 40)]
    model, scheme = model_of(source), load_scheme("q4f16_1")
    plain = Stream(model, source, windows, sample=512)
    folded, exact, width = copy(plain), copy(plain), model.facts.hidden_size  # the same code, and states of their own
    folded.hidden, exact.hidden = [*plain.hidden], [*plain.hidden]
    folds = 0
    for index in range(plain.norm):
        changed = Folded(source)
        inputs = plain.run(index, source)
        matrices = dict.fromkeys(inputs, scheme)
        known = fold_layer(model.model.layers[index], plain.names.of_layer(index), matrices, changed, inputs)
        found = folded.run(index, changed)
        for name, mine in found.items():
            np.testing.assert_allclose(mine.mean_square, known[name].mean_square, rtol=2e-2, atol=1e-6, err_msg=name)
        same = {name for name in inputs if np.array_equal(changed.read(name), source.read(name))}
        folds += len(inputs) - len(same)
        np.testing.assert_allclose(folded.hidden, plain.hidden, rtol=0, atol=2e-4)
        # By weights alone, with powers of two: hidden states are those of float32, digit for digit but where 1 is added.
        alone, named, layer = Folded(source), plain.names.of_layer(index), model.model.layers[index]
        fold_layer(layer, named, matrices, alone, expected_inputs(layer, named, source, width), exact=True)
        exact.run(index, alone, observe=False)
        np.testing.assert_allclose(exact.hidden, plain.hidden, rtol=1e-5, atol=1e-5)
    assert (folds > 0) == any(list(folds_of(layer)) for layer in model.model.layers)


def large_channels(seed: int = 0) -> tuple[np.ndarray, Inputs]:
    """A matrix and inputs of which every 64th is 32 times as large, and the columns that read it 32 times smaller."""
    rng = np.random.default_rng(seed)
    w, x = rng.normal(size=(96, 512)).astype(np.float32), rng.normal(size=(256, 512)).astype(np.float32)
    x[:, ::64] *= 32
    w[:, ::64] /= 32
    return w, Inputs((x * x).mean(axis=0), np.abs(x).max(axis=0), rows=x)


def test_factors_win_back_what_large_channels_cost() -> None:
    w, inputs = large_channels()
    scheme, fold = load_scheme("q4f16_1"), Fold(("w",), ("v",))
    assert inputs.rows is not None
    factors, expected = factors_of(fold, [w], scheme, inputs), inputs.rows @ w.T
    ones = np.ones_like(factors)
    assert output_error(factors, w, scheme, inputs, expected) < 0.3 * output_error(ones, w, scheme, inputs, expected)


def test_heads_that_share_keys_share_factors() -> None:
    w, inputs = large_channels()
    factors = factors_of(Fold(("w",), ("v",), heads=(2, 4, 64)), [w], load_scheme("q4f16_1"), inputs)
    by_head = factors.reshape(2, 4, 64)
    assert (by_head == by_head[:, :1]).all() and len(np.unique(factors)) > 8
