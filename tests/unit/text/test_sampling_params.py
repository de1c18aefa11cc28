from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import SamplingParams, Stats


def test_defaults_are_valid_and_frozen() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.greedy) == (0.7, 0.95, False)
    assert SamplingParams(temperature=0).greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", -0.1, "[0, 100]"),
        ("temperature", float("nan"), "nan"),
        ("temperature", float("inf"), "inf"),
        ("temperature", "hot", "'hot'"),
        ("temperature", True, "True"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", 1.01, "1.01"),
        ("top_k", -1, ">= 0"),
        ("top_k", 1.5, "1.5"),
        ("min_p", 2, "[0, 1]"),
        ("repetition_penalty", 0.0, "[0.01, 100]"),
        ("presence_penalty", 2.5, "[-2, 2]"),
        ("frequency_penalty", -3, "[-2, 2]"),
        ("seed", -1, "-1"),
        ("seed", 2**64, str(2**64)),
        ("logprobs", 21, "[0, 20]"),
        ("logit_bias", [1], "list"),
        ("logit_bias", {"7": 1.0}, "'7'"),
        ("logit_bias", {-7: 1.0}, "-7"),
        ("logit_bias", {7: 101}, "logit_bias[7]"),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=re.escape(shown)) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
def test_integers_are_numbers(field: str) -> None:
    assert getattr(SamplingParams(**{field: 1}), field) == 1


def test_later_changes_of_the_callers_bias_do_not_reach_it() -> None:
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 1e9
    assert params.logit_bias == {3: 1.0}
    assert dataclasses.replace(params, top_k=5).logit_bias == {3: 1.0}
    assert hash(params) == hash(SamplingParams(logit_bias={9: 1.0}))


def test_rates() -> None:
    stats = Stats(
        prompt_tokens=110,
        cached_tokens=10,
        completion_tokens=21,
        prefill_s=0.5,
        decode_s=2.0,
        load_s=1.0,
        decode_bytes=4_000_000_000,
    )
    assert (stats.prefill_tok_s, stats.decode_tok_s, stats.decode_gb_s) == (200.0, 10.0, 2.0)


def test_rates_of_an_empty_generation_are_zero() -> None:
    stats = Stats(0, 0, 0, 0.0, 0.0, 0.0)
    assert (stats.prefill_tok_s, stats.decode_tok_s, stats.decode_gb_s) == (0.0, 0.0, 0.0)
