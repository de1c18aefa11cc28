"""How generation_config.json wants tokens to be drawn: honoured field by field, or said."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from mlcpipe.errors import BundleError, CheckpointWarning
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.runtime.stated_sampling import bundle_sampling, stated_sampling
from tests.unit.text.published_shapes import SHAPES

OTHERWISE = SamplingParams()
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
DRAWN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.95}),
        ({"eos_token_id": 2, "do_sample": True, "temperature": None}, {"temperature": 0.7, "top_p": 0.95}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20}, {**PLAIN, "top_k": 20}),
        ({"top_k": -1, "temperature": 0.0}, {"temperature": 0.0, "top_p": 1.0}),
        ({"top_k": 0}, PLAIN),
        ({"top_k": 40.0}, {**PLAIN, "top_k": 40}),
        ({"do_sample": False}, {"temperature": 0.0, "top_p": 1.0}),
        ({"do_sample": False, "temperature": 0.6, "repetition_penalty": 1.1},
         {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.1}),
        ({"min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5, "typical_p": 1.0, "num_beams": 1},
         {**PLAIN, "min_p": 0.1, "presence_penalty": 1.5, "frequency_penalty": 0.5}),
    ],
)  # fmt: skip
def test_what_is_honoured(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert stated_sampling(config, OTHERWISE) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in ("0.6", -1, 101, True, [], float("nan"), float("inf"), 10**400)),
        *(("top_p", value) for value in (0, 1.5, -0.1, {})),
        *(("top_k", value) for value in (-2, 1.5, "5", False, [-1])),
        *(("min_p", value) for value in (2, "x")), ("repetition_penalty", 0), ("presence_penalty", 9),
        *(("do_sample", value) for value in ("false", 1, [])),
        *(("typical_p", 0.9), ("num_beams", 4), ("no_repeat_ngram_size", 3), ("bad_words_ids", [[1]])),
        *(("max_new_tokens", 512), ("stop_strings", ["x"]), ("suppress_tokens", [1]), ("penalty_alpha", 0.6)),
        *(("max_length", 4096), ("token_healing", True), ("mirostat", 2), ("forced_eos_token_id", 0), ("sampling", {"top_k": 1})),
    ],
)  # fmt: skip
def test_what_is_said(field: str, value: Any) -> None:
    """One bad value leaves the good ones as they are."""
    with pytest.warns(CheckpointWarning, match=rf"^generation_config.json: {field}\b.*") as said:
        made = stated_sampling({"temperature": 0.5, "top_p": 0.5, "min_p": 0.25, field: value}, OTHERWISE)
    assert len(said) == 1 and "\n" not in str(said[0].message) and len(str(said[0].message)) < 700
    good = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.25}
    assert made == SamplingParams(**{**good, **({field: DRAWN[field]} if field in good else {})})


def test_what_changes_nothing_is_not_said() -> None:
    config = {
        "eos_token_id": [1],
        "use_cache": False,
        "bad_words_ids": [],
        "guidance_scale": 1.0,
        "mirostat": 0,
        "x": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert stated_sampling(config, OTHERWISE) == OTHERWISE


def test_a_line_about_many_names_is_short() -> None:
    with pytest.warns(CheckpointWarning) as said:
        stated_sampling({f"\n{index}{'x' * 1000}": 1 for index in range(1000)}, OTHERWISE)
    assert len(said) == 1 and "\n" not in str(said[0].message) and len(str(said[0].message)) < 3000


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.generation])
def test_shapes_of_published_models(name: str) -> None:
    config = dict(SHAPES[name].generation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # of max_new_tokens
        made = stated_sampling(config, SamplingParams(**PLAIN))
    theirs = GenerationConfig.from_dict(config)
    for field, neutral in DRAWN.items():
        stated = getattr(theirs, field)
        assert getattr(made, field) == (neutral if stated is None else stated) or config.get("do_sample") is False
    greedy = theirs.get_generation_mode() == GenerationMode.GREEDY_SEARCH and "do_sample" in config
    assert made.greedy == greedy


def test_a_bundle_without_the_file(tmp_path: Path) -> None:
    assert bundle_sampling(tmp_path, OTHERWISE) == OTHERWISE
    (tmp_path / "generation_config.json").write_bytes(json.dumps({"top_k": 5}, indent=1).replace("\n", "\r\n").encode())
    assert bundle_sampling(tmp_path, OTHERWISE).top_k == 5
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(BundleError, match="generation_config.json"):
        bundle_sampling(tmp_path, OTHERWISE)
