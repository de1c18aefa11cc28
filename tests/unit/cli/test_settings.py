"""Settings from options, /set and files: checked, explained, never half applied."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import typer

from mlcpipe.cli import app, main
from mlcpipe.cli.chat.settings import KNOBS, Settings
from mlcpipe.cli.options import option_name
from mlcpipe.errors import UsageError
from mlcpipe.runtime.sampling_params import SamplingParams


def test_defaults_are_those_of_the_sampler() -> None:
    assert Settings().sampling == SamplingParams()
    assert set(Settings().values()) == set(KNOBS)


def test_chat_has_an_option_for_each_setting() -> None:
    group: Any = typer.main.get_command(app)
    options = {option.name: option for option in group.commands["chat"].params}
    for key, knob in KNOBS.items():
        option = options[key]
        assert option.opts == [option_name(key)] and bool(option.secondary_opts) == (knob.kind is bool)
        assert knob.help[1:] in option.help and option.default is None
    params = {field.name for field in fields(SamplingParams)} - {"logit_bias", "logprobs"}
    assert set(KNOBS) == params | {"max_tokens", "think"}


@pytest.mark.parametrize("key", [key for key in KNOBS if key != "think"])
def test_options_and_set_agree(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as caught:
        Settings().with_text(f"{key}=-3")
    assert main(["chat", "--prompt", "x", option_name(key), "-3"]) == 2
    assert capsys.readouterr().err == f"error: {caught.value}\n"


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
        ("temperature 0 top_k=5 seed 2", "seed", 2),
        ("parameter top_k 3", "top_k", 3),
        ("think", "think", True),
        ("think temperature=1", "think", True),
        ("think off", "think", False),
        ("nothink", "think", False),
        ("think=High", "think", "high"),
        ("think=none", "think", None),
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
        "think=maybe",
        "temperature 0 top_k",
        "logit_bias=1",
    ],
)
def test_bad_values_are_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings().with_text(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"), [("temperatur 1", "temperature"), ("num_predict 5", "max_tokens"), ("thinking=off", "think")]
)
def test_other_names_give_the_closest(text: str, key: str) -> None:
    with pytest.raises(UsageError, match=f"expected {key}"):
        Settings().with_text(text)


@pytest.mark.parametrize("value", ["0.5", True, None, [1], {}, float("inf")])
def test_values_of_another_type(value: object) -> None:
    with pytest.raises(UsageError):
        Settings().with_values({"temperature": value})


def test_a_second_try_moves_only_a_fixed_seed() -> None:
    assert Settings().sampling_again(3).seed is None
    assert Settings().with_values({"seed": 5}).sampling_again(3).seed == 8
    assert Settings().with_values({"seed": 2**64 - 1}).sampling_again(1).seed == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--raw", "--no-think"], "--raw has no thinking to switch"),
        (["--think", "--reasoning-effort", "low"], "leave --think or --no-think out"),
        (["--reasoning-effort", "much"], "expected one of low, medium, high; found 'much'"),
        (["--threads", "0"], "--threads; expected an integer >= 1"),
        (["--web", "--no-think"], "--no-think has no effect with --web"),
        (["--web", "--threads", "2"], "--threads has no effect with --web"),
    ],
)
def test_options_that_contradict(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--prompt", "x", *options] if "--web" not in options else ["chat", *options]) == 2
    assert words in capsys.readouterr().err
