from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mlcpipe.errors import CheckpointError
from mlcpipe.quantization import load_scheme
from mlcpipe.quantization.packing import error_bound, pack, unpack
from tests.unit.quantization.reference import GROUPED, KINDS, PLAIN, group_of, make_weight, pack_slowly

# |w - w'| <= factor * s (+ the rounding of w to float16): what the scheme files say.
STATED = {"q3f16_1": 0.503, "q4f16_1": 0.5059, "q4f32_1": 0.500002, "q8f16_1": 0.594, "q8f32_1": 0.50002}
STATED |= {"q8f16_0": STATED["q8f16_1"], "q8f32_0": STATED["q8f32_1"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GROUPED)
def test_pack_is_the_slow_reference_bit_for_bit(name: str, kind: str) -> None:
    scheme = load_scheme(name)
    for n in (1, 5, 17):
        for k in (1, 32, 33, 40, 64, 100):
            w = make_weight(kind, (n, k), seed=n * 1000 + k)
            packed = pack(scheme, w)
            q_weight, q_scale = pack_slowly(name, w)
            np.testing.assert_array_equal(packed["q_weight"], q_weight)
            np.testing.assert_array_equal(packed["q_scale"], q_scale)
            assert packed["q_weight"].dtype == np.uint32
            assert packed["q_scale"].dtype == q_scale.dtype


@pytest.mark.parametrize("name", GROUPED)
def test_pack_in_many_chunks(name: str) -> None:
    w = make_weight("normal", (67, 4100))  # 2^17 elements are 31 rows
    packed = pack(load_scheme(name), w)
    for row in (0, 30, 31, 62, 66):
        q_weight, q_scale = pack_slowly(name, w[row : row + 1])
        np.testing.assert_array_equal(packed["q_weight"][row], q_weight[0])
        np.testing.assert_array_equal(packed["q_scale"][row], q_scale[0])


def test_half_way_codes_go_to_even_after_the_zero_point_is_added() -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, :5] = [7, 0.5, 1.5, -0.5, -1.5]  # scale 1
    codes = pack(load_scheme("q4f16_1"), w)["q_weight"][0, 0] >> np.arange(0, 20, 4, dtype=np.uint32) & 15
    assert codes.tolist() == [14, 8, 8, 6, 6]  # even sums 7.5 -> 8, 8.5 -> 8, 6.5 -> 6, 5.5 -> 6


def test_the_sum_with_the_zero_point_is_rounded_to_float16() -> None:
    w = np.zeros((1, 32), np.float32)
    w[0, :2] = [127, 0.5 + 2**-5]  # 127.53125 lies below 128, where float16 has steps of 1/16: 127.5 -> 128 (even)
    w[0, 2] = 1.5 - 2**-6  # 128.484375, in steps of 1/8: 128.5 -> 128 (even)
    w[0, 3] = 2.5 - 2**-6  # 129.484375 -> 129.5 -> 130, where float32 gives 129
    words = [pack(load_scheme(name), w)["q_weight"][:, :1].copy() for name in ("q8f16_1", "q8f32_1")]
    assert words[0].view(np.uint8).tolist() == [[254, 128, 128, 130]]
    assert words[1].view(np.uint8).tolist() == [[254, 128, 128, 129]]


def test_zero_group_has_scale_zero_and_the_code_of_zero() -> None:
    packed = pack(load_scheme("q4f16_1"), np.zeros((1, 32), np.float32))
    assert packed["q_scale"].tolist() == [[0.0]]
    assert packed["q_weight"].tolist() == [[0x77777777] * 4]


@pytest.mark.parametrize("name", GROUPED)
def test_padding_codes_are_zero(name: str) -> None:
    scheme = load_scheme(name)
    packed = pack(scheme, np.ones((1, 1), np.float32))
    words = group_of(name, 1) // scheme.codes_per_word
    assert packed["q_weight"].tolist() == [[2 * scheme.zero_point] + [0] * (words - 1)]


@pytest.mark.parametrize("name", GROUPED)
def test_unpack_is_code_minus_zero_point_times_scale(name: str) -> None:
    bits, _, per_word, dtype = GROUPED[name]
    scheme = load_scheme(name)
    rng = np.random.default_rng(1)
    k = 83
    group, count = group_of(name, k), scheme.groups(k)
    codes = rng.integers(0, 1 << bits, (3, count * group))
    words = (codes.reshape(3, -1, per_word) << (bits * np.arange(per_word))).sum(axis=2).astype(np.uint32)
    scales = rng.standard_normal((3, count)).astype(dtype)
    found = unpack(scheme, {"q_weight": words, "q_scale": scales}, k)
    expected = (codes - scheme.zero_point) * np.repeat(scales.astype(np.float64), group, axis=1)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected[:, :k].astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*GROUPED, *PLAIN])
def test_error_stays_within_the_bound(name: str, kind: str) -> None:
    scheme = load_scheme(name)
    w = make_weight(kind, (64, 2053), seed=3)
    error = np.abs(unpack(scheme, pack(scheme, w), 2053).astype(np.float64) - w)
    bound = error_bound(scheme, w)
    assert bound.dtype == np.float32
    assert np.isfinite(bound).all()
    assert (error <= bound).all()
    if kind == "normal" and name != "q0f32":  # nor is the bound a loose one
        assert (error / bound).max() > 0.99


@pytest.mark.parametrize("kind", ["normal", "negative", "zeros", "outlier", "limit16", "ties"])
@pytest.mark.parametrize("name", GROUPED)
def test_error_stays_within_what_the_scheme_file_states(name: str, kind: str) -> None:
    scheme = load_scheme(name)
    w = make_weight(kind, (16, 2053), seed=4)
    packed = pack(scheme, w)
    error = np.abs(unpack(scheme, packed, 2053).astype(np.float64) - w)
    s = np.repeat(packed["q_scale"].astype(np.float64), group_of(name, 2053), axis=1)[:, :2053]
    cast = np.maximum(np.abs(w) * 2.0**-11, 2.0**-25) if scheme.model_dtype == "float16" else 0.0
    assert (error <= STATED[name] * s + cast).all()


@pytest.mark.parametrize("name", GROUPED)
def test_packing_what_was_unpacked_changes_nothing(name: str) -> None:
    """With codes 0 and 2z in use and a scale that is a power of two, unpacked weights are fixed points."""
    scheme = load_scheme(name)
    rng = np.random.default_rng(5)
    w = rng.integers(-scheme.zero_point, scheme.zero_point + 1, (9, 120)) / 1024
    w[:, :: group_of(name, 120)] = scheme.zero_point / 1024
    packed = pack(scheme, w.astype(np.float32))
    again = unpack(scheme, packed, w.shape[1])
    np.testing.assert_array_equal(again, w)
    repacked = pack(scheme, again)
    for key, array in packed.items():
        np.testing.assert_array_equal(repacked[key], array)


@pytest.mark.parametrize("name", [*GROUPED, *PLAIN])
def test_experts_are_packed_one_by_one(name: str) -> None:
    scheme = load_scheme(name)
    w = make_weight("normal", (3, 5, 100))
    packed = pack(scheme, w)
    for key, (shape, dtype) in scheme.shapes(5, 100, experts=3).items():
        assert (packed[key].shape, packed[key].dtype.name) == (shape, dtype)
        for expert in range(3):
            np.testing.assert_array_equal(packed[key][expert], pack(scheme, w[expert])[key])
    np.testing.assert_array_equal(unpack(scheme, packed, 100)[1], unpack(scheme, pack(scheme, w[1]), 100))
    assert error_bound(scheme, w).shape == w.shape


def test_plain_weights_are_rounded_to_nearest_even() -> None:
    w = np.array([[1 + 2**-11, 1 + 3 * 2**-11, -(2.0**-25), 65504]], np.float32)
    packed = pack(load_scheme("q0f16"), w)["weight"]
    assert packed.dtype == np.float16
    assert packed.tolist() == [[1.0, 1 + 2**-9, -0.0, 65504.0]]


def test_plain_float32_takes_no_copy() -> None:
    w = make_weight("normal", (4, 8))
    assert np.shares_memory(pack(load_scheme("q0f32"), w)["weight"], w)


@pytest.mark.parametrize("name", ["q3f16_1", "q4f16_1", "q8f16_1", "q0f16"])
def test_numbers_beyond_float16_are_refused(name: str) -> None:
    w = make_weight("normal", (300, 700))
    w[299, 699] = -65505
    with pytest.raises(CheckpointError, match=r"layers\.0\.up does not fit float16.*65504.*65505.*f32"):
        pack(load_scheme(name), w, name="layers.0.up")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*GROUPED, *PLAIN])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    w = make_weight("normal", (300, 700))
    w[299, 650] = value
    with pytest.raises(CheckpointError, match=r"layers\.0\.up is not finite"):
        pack(load_scheme(name), w, name="layers.0.up")


@pytest.mark.parametrize("shape", [(4,), (0, 32), (4, 0), (1, 1, 1, 1)])
def test_weights_that_are_no_matrix_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor norm cannot be quantized to q4f16_1"):
        pack(load_scheme("q4f16_1"), np.ones(shape, np.float32), name="norm")


def test_unpack_refuses_arrays_of_another_shape() -> None:
    scheme = load_scheme("q4f16_1")
    packed = pack(scheme, np.ones((2, 64), np.float32))
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1"):
        unpack(scheme, packed, 65)
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1"):
        unpack(scheme, {"weight": np.ones((2, 64), np.float32)}, 64)
    with pytest.raises(CheckpointError, match="packed weight in q4f16_1"):
        unpack(scheme, {"q_weight": packed["q_weight"]}, 64)


@pytest.mark.parametrize("name", [*GROUPED, "q0f16"])
def test_pack_needs_memory_for_its_result_and_a_chunk_only(name: str) -> None:
    scheme = load_scheme(name)
    w = make_weight("normal", (4096, 1024))
    tracemalloc.start()
    packed = pack(scheme, w)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < sum(a.nbytes for a in packed.values()) + 4 * 2**20
