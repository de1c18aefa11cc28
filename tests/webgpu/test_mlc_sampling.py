"""The sampling functions that MLC's hosts call, on a GPU: against numpy, for vocabularies of odd sizes and of 150k."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tvm import IRModule

from mlcpipe.compiler.backends.wasm.emscripten import find_emcc
from mlcpipe.compiler.backends.wasm.link import link_wasm
from mlcpipe.compiler.backends.wasm.runtime import runtime_objects
from mlcpipe.compiler.build import build_kernels
from mlcpipe.passes.lowering import KernelModule
from mlcpipe.support.env import env
from mlcpipe.support.progress import SilentProgress
from mlcpipe.targets import compiled_variants, load_target, tvm_target
from tests.webgpu import dawn
from tests.webgpu.dawn import Array, Call
from tir_schedules.gpu.sampling.mlc_contract import MASKED, sampling_functions

pytestmark = pytest.mark.skipif(bool(dawn.missing()), reason=dawn.missing() or "runs")

SMALL, LARGE = 1003, 151_936  # no multiple of a workgroup; Qwen's
SUMS = 3e-5  # sums of 150k float32 differ by their order


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every function for both vocabularies, in one library."""
    target = load_target("webgpu")
    compiled = tvm_target(target, compiled_variants(target)[0])
    functions = {
        f"{name}_{vocab}": func.with_attr("global_symbol", f"{name}_{vocab}")
        for vocab in (SMALL, LARGE)
        for name, func in sampling_functions(vocab).items()
        if name != "sample"  # which browsers are not given
    }
    module = build_kernels(KernelModule(IRModule(functions).with_attr("system_lib_prefix", ""), compiled))
    emcc, path = find_emcc(), tmp_path_factory.mktemp("sampling") / "sampling.wasm"
    link_wasm(emcc, module, runtime_objects(emcc, env().cache_dir, SilentProgress()), path, "-O1")
    yield path


def _probabilities(vocab: int, rng: np.random.Generator) -> Array:
    logits = rng.standard_normal((2, vocab)).astype(np.float32) * 3
    weights = np.exp(logits)
    weights[:, :40] = weights[:, 40:80]  # equal ones
    weights[1, 100:200] = 0
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_sort_and_top_p(library: Path, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    probs = _probabilities(vocab, rng)
    order = np.argsort(-probs, axis=1, kind="stable").astype(np.int32)
    ranked = np.take_along_axis(probs, order, axis=1)
    draws = np.array([0.0, 0.35, 0.8, 0.999999, 0.5, 0.5], np.float32)
    rows = np.array([0, 1, 0, 1, 0, 1], np.int32)
    calls = [Call(f"argsort_probs_{vocab}", (probs, np.zeros_like(probs), np.full(probs.shape, -1, np.int32)), (1, 2))]
    nuclei = [(1.0, 0.9), (0.5, 0.0)]
    for top_p in nuclei:
        token = np.full(len(draws), -1, np.int32)
        calls.append(
            Call(f"sample_with_top_p_{vocab}", (ranked, order, draws, rows, np.array(top_p, np.float32), token), (5,))
        )
    (values, ids), *drawn = dawn.call(library, calls)
    np.testing.assert_array_equal(values, ranked)
    np.testing.assert_array_equal(ids, order)
    for top_p, (tokens,) in zip(nuclei, drawn):
        for draw, row, token in zip(draws, rows, tokens):
            sums = np.cumsum(ranked[row].astype(np.float64))
            rank = int(np.flatnonzero(order[row] == token)[0])
            # The shortest prefix that reaches top_p, as far as sums of float32 can tell.
            smallest, largest = (min(int(np.searchsorted(sums, top_p[row] + e)), vocab - 1) for e in (-SUMS, SUMS))
            assert rank <= largest
            assert sums[rank] - ranked[row, rank] - SUMS <= draw * sums[largest]
            assert draw * sums[smallest] <= sums[rank] + SUMS


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_softmax(library: Path, vocab: int) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((2, 1, vocab)) * 5).astype(np.float32)
    logits[0, 0, 7] = MASKED
    temperature = np.array([0.7, 0.0], np.float32)
    ((found,),) = dawn.call(
        library, [Call(f"softmax_with_temperature_{vocab}", (logits, temperature, np.zeros_like(logits)), (2,))]
    )
    scaled = logits[0, 0].astype(np.float64) / 0.7
    expected = np.exp(scaled - scaled.max())
    np.testing.assert_allclose(found[0, 0], expected / expected.sum(), rtol=2e-5, atol=1e-12)
    assert found[0, 0, 7] == 0
    assert found[1, 0].argmax() == logits[1, 0].argmax() and found[1, 0].max() > 0.999


def test_logits_that_are_no_numbers_give_no_token(library: Path) -> None:
    """What WebLLM calls one after the other: -1 in the end, of which it makes an error."""
    logits = np.random.default_rng(3).standard_normal((5, 1, SMALL)).astype(np.float32)
    logits[0, 0, 5], logits[1, 0, 1002], logits[2, 0, 0], logits[3] = np.nan, -np.nan, np.inf, np.nan
    half = np.full(5, 0.5, np.float32)
    call = Call(f"softmax_with_temperature_{SMALL}", (logits, half, np.zeros_like(logits)), (2,))
    ((probs,),) = dawn.call(library, [call])
    assert np.isnan(probs[:4]).all() and np.isfinite(probs[4]).all()
    call = Call(
        f"argsort_probs_{SMALL}", (probs[:, 0], np.zeros_like(probs[:, 0]), np.zeros((5, SMALL), np.int32)), (1, 2)
    )
    ((ranked, ids),) = dawn.call(library, [call])
    args = (ranked, ids, half, np.arange(5, dtype=np.int32), half, np.full(5, -7, np.int32))
    ((tokens,),) = dawn.call(library, [Call(f"sample_with_top_p_{SMALL}", args, (5,))])
    assert tokens[:4].tolist() == [-1] * 4 and 0 <= tokens[4] < SMALL


def test_penalties_bias_and_mask(library: Path) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((3, SMALL)).astype(np.float32)
    seq, of = np.array([2, 0], np.int32), np.array([0, 0, 1, 1], np.int32)
    token, count = np.array([5, 1002, 5, 9], np.int32), np.array([1, 3, 2, 1], np.int32)
    penalty = np.array([[0.5, 0.25, 1.2], [0.0, 0.0, 1.5]], np.float32)
    bias = np.array([1.5, -100.0], np.float32)
    bias_row, bias_token = np.array([0, 2], np.int32), np.array([0, 1002], np.int32)
    mask = rng.integers(-(2**31), 2**31, size=(3, -(-SMALL // 32)), dtype=np.int64).astype(np.int32)
    (penalized,), (biased,), (masked,) = dawn.call(
        library,
        [
            Call(f"apply_penalty_inplace_{SMALL}", (logits, seq, of, token, count, penalty), (0,)),
            Call(f"apply_logit_bias_inplace_{SMALL}", (logits, bias_row, bias_token, bias), (0,)),
            Call(f"apply_bitmask_inplace_{SMALL}", (logits, seq, mask), (0,)),
        ],
    )
    expected = logits.copy()
    for which, t, n in zip(of, token, count):
        presence, frequency, repetition = penalty[which]
        x = expected[seq[which], t] - (presence + n * frequency)
        expected[seq[which], t] = x * repetition if x < 0 else x / repetition
    np.testing.assert_allclose(penalized, expected, rtol=1e-6, atol=1e-6)
    expected = logits.copy()
    expected[bias_row, bias_token] += bias
    np.testing.assert_allclose(biased, expected, rtol=1e-6)
    bits = (mask[:, np.arange(SMALL) // 32] >> (np.arange(SMALL) % 32)) & 1
    expected = logits.copy()
    for row in seq:
        expected[row, bits[row] == 0] = np.float32(MASKED)
    np.testing.assert_array_equal(masked, expected)
