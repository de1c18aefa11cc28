"""Quantization to block formats without a minimum: beside a slow search in numpy, the rule of rtn, and odd inputs."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError
from mlcpipe.quantization import signed_blocks
from mlcpipe.quantization.native_formats import SCHEMES, unpack_codes
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import RTN, SEARCH
from tests.unit.quantization.reference import KINDS, Array, make_weight

FORMATS = ("Q3_K", "Q6_K", "Q4_0", "Q5_0", "Q8_0")
SEARCHED = FORMATS[:-1]


def error(scheme: Scheme, w: Array, method: str) -> float:
    """Squared error of all of w[N, K]."""
    return float(((unpack(scheme, pack(scheme, w, method=method), w.shape[1]).astype(np.float64) - w) ** 2).sum())


def best_error(x: Array, zero: int) -> float:
    """The least squared error of a group x[K] among scales near the one that gives the peak level -zero."""
    peak, errors = x[np.abs(x).argmax()], []
    for step in range(-9, 10):
        levels = np.clip(np.rint(-x * (1 + 0.025 * step) * zero / peak), -zero, zero - 1)
        scale = (x * levels).sum() / (levels * levels).sum()
        errors.append(((x - scale * levels) ** 2).sum())
    return float(min(errors))


@pytest.mark.parametrize("name", SEARCHED)
def test_the_error_is_that_of_a_slow_search(name: str) -> None:
    scheme, w = SCHEMES[name], make_weight("normal", (8, 512))
    groups = w.astype(np.float64).reshape(-1, scheme.group_size)
    expected = sum(best_error(x, scheme.zero_point) for x in groups)
    # Scales are float16, or in 127 steps of the largest of a block, which is half a step of the last of 32 levels.
    assert 0.97 * expected < error(scheme, w, SEARCH) < 1.04 * expected
    assert error(scheme, w, SEARCH) < 0.97 * error(scheme, w, RTN)


@pytest.mark.parametrize("name", FORMATS)
def test_rtn_is_within_half_a_step(name: str) -> None:
    """With scales of their own, groups lose half a step at most, and a step on the side that has a level less."""
    scheme, w = SCHEMES[name], make_weight("normal", (6, 512))
    found = unpack(scheme, pack(scheme, w, method=RTN), 512)
    peaks = np.abs(w.reshape(6, -1, scheme.group_size)).max(axis=2)
    steps = peaks / (127 if scheme.bits == 8 else scheme.zero_point)
    # A byte of scale is off by 1/254 of the block's largest.
    off = peaks.max() / 254 if scheme.super_size else 2**-11 * peaks.max()
    allowed = np.repeat(steps * (0.51 if scheme.bits == 8 else 1.01) + off, scheme.group_size, axis=1)
    assert (np.abs(found - w) <= allowed).all()


def test_8_bits_leave_the_lowest_code_out() -> None:
    scheme = SCHEMES["Q8_0"]
    codes = unpack_codes(pack(scheme, make_weight("normal", (64, 512)))["q_weight"], 8, in_order=True)
    assert codes.min() == 1 and codes.max() == 255


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_inputs_are_finite_and_near(name: str, kind: str) -> None:
    scheme, w = SCHEMES[name], make_weight(kind, (5, 512))
    for method in (RTN, SEARCH):
        found = unpack(scheme, pack(scheme, w, method=method), 512)
        assert np.isfinite(found).all()
        # Scales below float16's smallest number, in 127 steps, are 0.
        assert np.abs(found - w).max() <= 0.6 * np.abs(w).max() + 127 * 32 * 2.0**-25
    if not w.any():
        assert not found.any()


def test_many_chunks_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w = SCHEMES["Q6_K"], make_weight("normal", (37, 256))
    whole = pack(scheme, w, method=SEARCH)
    monkeypatch.setattr(signed_blocks, "CHUNK", 700)
    for key, array in pack(scheme, w, method=SEARCH).items():
        np.testing.assert_array_equal(array, whole[key])


@pytest.mark.parametrize("bad", (np.nan, np.inf, 65520.0))
def test_what_is_not_finite_or_too_large_is_refused(bad: float) -> None:
    w = make_weight("normal", (3, 256))
    w[1, 7] = bad
    with pytest.raises(CheckpointError, match=r"layers\.0\.up"):
        pack(SCHEMES["Q6_K"], w, name="layers.0.up", method=SEARCH)
