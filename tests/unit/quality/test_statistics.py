"""KL divergence, perplexity and the rest against their definitions, term by term in Python's own numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlcpipe.bundle.quality import Comparison, QualityInfo
from mlcpipe.errors import QualityError, ResourceError, UsageError
from mlcpipe.host.memory import FreeMemory
from mlcpipe.quality import statistics
from mlcpipe.quality.reference import choose_scheme
from mlcpipe.quality.requirements import check, parse_requirements
from mlcpipe.quality.statistics import Scores, compare, score


def softmax(row: list[float]) -> list[float]:
    exps = [math.exp(x - max(row)) for x in row]
    return [e / math.fsum(exps) for e in exps]


def random_pair(rows: int, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    reference = (4 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits = (reference + 0.3 * rng.standard_normal((rows, vocab)) + 50).astype(np.float32)  # a shift changes nothing
    return logits, reference, rng.integers(0, vocab, rows)


def test_scores_are_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, reference, following = random_pair(23, 37)
    monkeypatch.setattr(statistics, "_BLOCK", 5 * 37)  # blocks of five rows and a shorter one
    scores = score(logits, reference, following)
    for i, token in enumerate(following.tolist()):
        p, q = softmax(reference[i].tolist()), softmax(logits[i].tolist())
        divergence = math.fsum(a * math.log(a / b) for a, b in zip(p, q))
        expected = (
            -math.log(q[token]),
            -math.log(p[token]),
            divergence,
            q[token] - p[token],
            p.index(max(p)) == q.index(max(q)),
        )
        found = [getattr(scores, name)[i] for name in ("nll", "reference_nll", "kld", "dp", "same_top")]
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert 0 < scores.same_top.sum() < 23


def test_logits_that_are_far_apart_are_finite() -> None:
    logits = np.array([[0.0, -3e4, 100.0], [1e4, 0.0, 0.0]], np.float32)
    scores = score(logits, logits[:, ::-1].copy(), np.array([1, 2]))
    assert np.isfinite([scores.nll, scores.kld, scores.dp]).all() and scores.nll[0] == 30100


def test_means_have_the_errors_of_llama_perplexity() -> None:
    scores = score(*random_pair(50, 20))
    found = compare(scores)
    n = 50
    mean = math.fsum(scores.kld) / n
    deviation = math.sqrt((math.fsum(scores.kld**2) / n - mean**2) / (n - 1))
    assert (found.kld, found.kld_error) == pytest.approx((mean, deviation), rel=1e-9)
    ln_q, ln_p = math.fsum(scores.nll) / n, math.fsum(scores.reference_nll) / n
    variances = [np.cov(np.stack([scores.nll, scores.reference_nll]), bias=True) / (n - 1)]
    (qq, qp), (_, pp) = variances[0]
    ratio = math.exp(ln_q - ln_p)
    assert found.ppl == pytest.approx(math.exp(ln_q)) and found.reference_ppl == pytest.approx(math.exp(ln_p))
    assert (found.ppl_ratio, found.ppl_ratio_error) == pytest.approx((ratio, ratio * math.sqrt(qq + pp - 2 * qp)))
    top = math.fsum(scores.same_top) / n
    assert (found.top1, found.top1_error) == pytest.approx((top, math.sqrt(top * (1 - top) / (n - 1))))
    assert found.rms_dp == pytest.approx(math.sqrt(math.fsum(scores.dp**2) / n))
    ordered = sorted(scores.kld)
    at = 0.99 * (n - 1)
    assert found.kld_99 == pytest.approx(ordered[48] + (at - 48) * (ordered[49] - ordered[48]))
    assert found.kld_max == ordered[-1] and found.kld_median == pytest.approx((ordered[24] + ordered[25]) / 2)


def test_one_position_and_equal_models_have_no_errors() -> None:
    logits = np.array([[1.0, 2.0, 3.0]], np.float32)
    found = compare(score(logits, logits, np.array([0])))
    assert (found.kld, found.kld_error, found.top1, found.rms_dp, found.ppl_ratio) == (0, 0, 1, 0, 1)


def comparison(kld: float, top1: float) -> Comparison:
    part = Scores(*(np.array([x]) for x in (1.0, 1.0, kld, 0.0, top1)))
    return compare(part)


def quality(prefill: Comparison, decode: Comparison) -> QualityInfo:
    return QualityInfo(
        reference="r", reference_hash="h", reference_quantization="q0f32", text="t", text_sha256="0" * 64, window=512,
        variant="avx2", bits_per_weight=4.5, prefill=prefill, decode=decode,
    )  # fmt: skip


def test_limits_hold_for_prefill_and_decode() -> None:
    good, bad = comparison(0.02, 1.0), comparison(0.04, 1.0)
    limits = parse_requirements(" kld<=0.03 , top1>=9.2e-1")
    check(quality(good, good), limits)
    check(quality(bad, bad), parse_requirements("kld<=0.04,kld>=0.04"))
    for pair, kind in (((bad, good), "prefill"), ((good, bad), "decode")):
        with pytest.raises(
            QualityError, match=f"the {kind} of the bundle .*; expected kld<=0.03; found 0.04 on 1 tok"
        ) as caught:
            check(quality(*pair), limits)
        assert caught.value.exit_code == 3
    with pytest.raises(QualityError, match="expected top1>=0.92; found 0 "):
        check(quality(comparison(0.0, 0.0), good), limits)


@pytest.mark.parametrize(
    "text",
    [
        "kld",
        "kld<0.1",
        "kld<=",
        "kld<=nan",
        "kld<=inf",
        "kld<=1e999",
        "kld<=0.1,",
        ",",
        "kld==1",
        "kld<=--1",
        "<=1",
        "ÅÅ<=1",
    ],
)
def test_malformed_limits_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--require; expected such as kld<=0.03"):
        parse_requirements(text)


@pytest.mark.parametrize("name", ["klds", "tokens", "kld_error"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=f"--require; expected ppl, .*top1.*; found '{name}'"):
        parse_requirements(f"kld<=1,{name}<=0.1")


def test_the_reference_is_chosen_by_memory() -> None:
    assert choose_scheme(100, 50, FreeMemory(450)) == "q0f32"
    assert choose_scheme(100, 51, FreeMemory(450)) == "q0f16"
    with pytest.raises(
        ResourceError, match="not enough memory for the reference; expected 250 bytes free; found 249 bytes"
    ):
        choose_scheme(100, 50, FreeMemory(249))
