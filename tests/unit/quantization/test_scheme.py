from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlcpipe.errors import ConfigError
from mlcpipe.quantization import Scheme, load_scheme, scheme_names
from tests.unit.quantization.reference import GROUPED, PLAIN


def test_schemes_are_found_by_file_name() -> None:
    assert scheme_names() == tuple(sorted([*GROUPED, *PLAIN, "q4f16_k", "q4f16_m"]))
    for name in scheme_names():
        assert load_scheme(name).name == name


def test_schemes_with_the_same_numbers_store_alike() -> None:
    """`scheme_of` of the passes finds a scheme by these."""
    schemes = [replace(load_scheme(name), name="", blocks="", output="") for name in scheme_names()]
    assert len(set(schemes)) == len({(one.bits, one.model_dtype, one.group_size) for one in schemes})


@pytest.mark.parametrize("name", GROUPED)
def test_scheme_has_the_numbers_of_the_format(name: str) -> None:
    bits, group, per_word, dtype = GROUPED[name]
    scheme = load_scheme(name)
    found = (scheme.bits, scheme.group_size, scheme.codes_per_word, np.dtype(scheme.model_dtype))
    assert found == (bits, group, per_word, np.dtype(dtype))
    assert scheme.zero_point == {3: 3, 4: 7, 8: 127}[bits]
    columns = {0: [32, 32, 64, 128], 32: [32, 32, 64, 128], 40: [40, 40, 40, 120]}[group]
    assert [scheme.padded(k) for k in (1, 32, 33, 100)] == columns
    assert [scheme.groups(k) for k in (1, 32, 33, 100)] == [c // group if group else 1 for c in columns]


def test_shapes_and_bytes() -> None:
    scheme = load_scheme("q3f16_1")
    assert scheme.shapes(5, 100) == {"q_weight": ((5, 12), "uint32"), "q_scale": ((5, 3), "float16")}
    assert scheme.nbytes(5, 100) == 5 * 12 * 4 + 5 * 3 * 2
    assert scheme.shapes(5, 100, experts=2)["q_scale"] == ((2, 5, 3), "float16")
    row = load_scheme("q8f16_0")
    assert row.shapes(5, 100) == {"q_weight": ((5, 32), "uint32"), "q_scale": ((5, 1), "float16")}
    assert row.nbytes(5, 100) == 5 * 128 + 5 * 2
    assert load_scheme("q0f16").shapes(5, 100) == {"weight": ((5, 100), "float16")}
    assert load_scheme("q0f16").nbytes(5, 100, experts=2) == 2000


@pytest.mark.parametrize("name", ["q5f16_1", "scheme", "../q4f16_1", "", "q4f16_1\n"])
def test_unknown_schemes(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown quantization; expected .*; docs/models.md lists all"):
        load_scheme(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Q4_K_M", "keep for a GGUF file that has it, or q4f16_k for other checkpoints"),
        ("q4_0", "keep for a GGUF file that has it, or q4f16_k for other checkpoints"),
        ("q8_0", "keep for a GGUF file that has it, or q8f16_1 for other checkpoints"),
        ("iq2_xxs", "keep for a GGUF file that has it, or q3f16_1 for other checkpoints"),
        ("int4", "q4f16_1, q4f16_k or q4f16_m"),
        ("FP16", "q0f16"),
        ("Q4F16_1", "q4f16_1"),
        ("q4f16_2", "q4f16_m, q4f16_k or q4f16_1"),
        ("Keep", "keep"),
    ],
)
def test_what_unknown_schemes_may_stand_for(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown quantization; expected {meant}; found {name}; "):
        load_scheme(name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_dtype": "bfloat16"}, "expected float16 or float32"),
        ({"model_dtype": "float16", "group_size": 32}, "without codes has groups"),
        ({"model_dtype": "float16", "bits": 4, "group_size": 36, "codes_per_word": 9}, "do not fit"),
        ({"model_dtype": "float16", "bits": 16, "group_size": 32, "codes_per_word": 2}, "do not fit"),
        ({"model_dtype": "float16", "bits": 4, "group_size": 33, "codes_per_word": 8}, "multiple of 8"),
        ({"model_dtype": "float16", "bits": 3, "group_size": 0, "codes_per_word": 10}, "multiple of 10"),
    ],
)
def test_a_scheme_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheme(name="bad", **fields)  # type: ignore[arg-type]
