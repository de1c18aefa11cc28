"""GPTQ beside the algorithm as it was published, with the inverse of H, and what it wins over a search."""

from __future__ import annotations

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError
from mlcpipe.quantization import gptq, load_scheme
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.native_formats import SCHEMES
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme
from mlcpipe.support.defaults import GPTQ, SEARCH
from tests.unit.quantization.reference import Array, make_weight

FORMATS = {name: load_scheme(name) for name in ("q3f16_1", "q4f16_1", "q4f32_1")} | {
    name: SCHEMES[name] for name in ("Q4_K", "Q2_K", "Q6_K", "Q4_0")
}


def correlated(rows: int, k: int, seed: int = 0) -> Array:
    """Inputs float32[rows, K] whose columns go together, as those of a model do."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, k // 8)) @ rng.normal(size=(k // 8, k)) + 0.3 * rng.normal(size=(rows, k))
    return (mixed * rng.uniform(0.1, 2, size=k)).astype(np.float32)


def inputs_of(x: Array) -> Inputs:
    return Inputs((x * x).mean(axis=0), np.abs(x).max(axis=0), x.T @ x / np.float32(len(x)))


def published(w: Array, x: Array, scale: Array, minimum: Array, size: int, top: int) -> Array:
    """Codes of w[N, K] in float64, with scale and minimum [N, groups] as they are: the loop of Frantar et al."""
    k = w.shape[1]
    h = x.T.astype(np.float64) @ x / len(x)
    h += gptq._DAMPING * np.trace(h) / k * np.eye(k)
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    w, codes = w.astype(np.float64), np.empty(w.shape, np.uint8)
    for j in range(k):
        s, m = scale[:, j // size], minimum[:, j // size]
        codes[:, j] = np.clip(np.rint((w[:, j] - m) / s), 0, top)
        w[:, j:] -= np.outer((w[:, j] - (codes[:, j] * s + m)) / upper[j, j], upper[j, j:])
    return codes


def output_error(scheme: Scheme, w: Array, x: Array, method: str) -> float:
    found = unpack(scheme, pack(scheme, w, method=method, inputs=inputs_of(x)), w.shape[1])
    return float(((x @ (found - w).T) ** 2).sum())


def test_the_codes_are_those_of_the_published_loop() -> None:
    scheme, w, x = FORMATS["q4f16_1"], make_weight("normal", (24, 256)), correlated(400, 256)
    packed = pack(scheme, w, method=GPTQ, inputs=inputs_of(x))
    scale = packed["q_scale"].astype(np.float64)
    expected = published(w, x, scale, -scheme.zero_point * scale, scheme.group_size, 15)
    codes = (packed["q_weight"][:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(w.shape)
    assert (codes == expected).mean() > 0.995  # a tie that rounding decides changes the columns after it


@pytest.mark.parametrize("name", FORMATS)
def test_the_error_of_the_output_is_below_that_of_a_search(name: str) -> None:
    w, x = make_weight("normal", (48, 512)), correlated(600, 512)
    assert output_error(FORMATS[name], w, x, GPTQ) < 0.6 * output_error(FORMATS[name], w, x, SEARCH)


def test_rows_that_do_not_fill_their_groups_and_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, w, x = FORMATS["q4f16_1"], make_weight("normal", (37, 104)), correlated(300, 104)
    whole = pack(scheme, w, method=GPTQ, inputs=inputs_of(x))
    assert output_error(scheme, w, x, GPTQ) < 0.7 * output_error(scheme, w, x, SEARCH)
    assert (whole["q_weight"][:, 13:] == 0).all()
    monkeypatch.setattr(gptq, "_CHUNK", 1000)
    for key, array in pack(scheme, w, method=GPTQ, inputs=inputs_of(x)).items():
        np.testing.assert_allclose(array.astype(np.float64), whole[key].astype(np.float64), err_msg=key)


def test_inputs_that_are_one_column_or_none_are_no_trouble() -> None:
    scheme, w = FORMATS["q4f16_1"], make_weight("normal", (8, 64))
    for x in (np.zeros((10, 64), np.float32), np.eye(1, 64, dtype=np.float32).repeat(9, axis=0)):
        found = unpack(scheme, pack(scheme, w, method=GPTQ, inputs=inputs_of(x)), 64)
        assert np.abs(found - w)[:, 0].max() < 0.2 * np.abs(w).max()


def test_what_is_not_finite_is_refused() -> None:
    w, x = make_weight("normal", (3, 64)), correlated(100, 64)
    w[2, 33] = np.nan
    with pytest.raises(CheckpointError, match=r"layers\.0\.up"):
        pack(FORMATS["q4f16_1"], w, name="layers.0.up", method=GPTQ, inputs=inputs_of(x))
