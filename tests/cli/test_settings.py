"""Settings from options, /set and files: checked, explained, never half applied."""

from __future__ import annotations

import pytest

from mlcpipe.cli.settings import KNOBS, Settings
from mlcpipe.errors import UsageError


def test_defaults_are_those_of_the_sampler() -> None:
    from mlcpipe.runtime.sampling_params import SamplingParams

    assert Settings().sampling == SamplingParams()
    assert set(Settings().values()) == set(KNOBS)


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("temperature=0", "temperature", 0.0),
        (" top_k = 40 ", "top_k", 40),
        ("seed=7", "seed", 7),
        ("seed=none", "seed", None),
        ("max_tokens=12", "max_tokens", 12),
        ("max_tokens=None", "max_tokens", None),
        ("min_p=5e-2", "min_p", 0.05),
    ],
)
def test_set(text: str, key: str, value: object) -> None:
    assert Settings().with_values({"seed": 1, "max_tokens": 1}).with_text(text).values()[key] == value


@pytest.mark.parametrize(
    "text",
    [
        "temperature",
        "temperature=",
        "=1",
        "temperature=warm",
        "temperature=nan",
        "temperature=-1",
        "temperature=none",
        "top_p=0",
        "top_p=1.5",
        "top_k=1.5",
        "seed=-1",
        "seed=99999999999999999999999",
        "max_tokens=0",
        "max_tokens=1e3",
        "tempo=1",
        "logit_bias=1",
    ],
)
def test_bad_values_are_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings().with_text(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["0.5", True, None, [1], {}, float("inf")])
def test_values_of_another_type(value: object) -> None:
    with pytest.raises(UsageError):
        Settings().with_values({"temperature": value})


def test_a_second_try_moves_only_a_fixed_seed() -> None:
    assert Settings().sampling_again(3).seed is None
    assert Settings().with_values({"seed": 5}).sampling_again(3).seed == 8
    assert Settings().with_values({"seed": 2**64 - 1}).sampling_again(1).seed == 0
