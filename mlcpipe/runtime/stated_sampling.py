"""How a checkpoint's generation_config.json wants tokens to be drawn: one reading for all that write answers.

Fields and neutral values: transformers 5.23, `generation/configuration_utils.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlcpipe.errors import BundleError, CheckpointWarning, UsageError
from mlcpipe.json_files import read_json_object, shown
from mlcpipe.runtime.sampling_params import SamplingParams

FILE = "generation_config.json"
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_MAX_BYTES = 16 << 20
# What changes an answer too and is not honoured, with the value that changes nothing besides null.
_OTHERS: Mapping[str, Any] = {
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "penalty_alpha": 0, "num_beams": 1,
    "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [],
    "suppress_tokens": [], "begin_suppress_tokens": [], "sequence_bias": {}, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "guidance_scale": 1, "stop_strings": [],
    "min_length": 0, "min_new_tokens": 0, "max_new_tokens": None,
}  # fmt: skip


def bundle_sampling(bundle: Path, otherwise: SamplingParams) -> SamplingParams:
    """`stated_sampling` of a bundle's file. Raises BundleError for one that cannot be read."""
    path = bundle / FILE
    config = read_json_object(path, limit=_MAX_BYTES, error=BundleError) if path.is_file() else {}
    return stated_sampling(config, otherwise)


def stated_sampling(config: Mapping[str, Any], otherwise: SamplingParams) -> SamplingParams:
    """What the file says, with neutral values of what it does not; `otherwise` where it says nothing.

    `do_sample: false` is temperature 0, `top_k` -1 is 0. What cannot be honoured is left out, with a CheckpointWarning
    that names it.
    """
    given: dict[str, Any] = {name: config[name] for name in FIELDS if config.get(name) is not None}
    samples = config.get("do_sample")
    made = SamplingParams(temperature=1.0, top_p=1.0) if given or samples is False else otherwise
    for name, value in given.items():
        if name == "top_k" and not isinstance(value, bool) and value in (-1, -1.0):
            continue
        if name == "top_k" and isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            made = replace(made, **{name: value})
        except UsageError as error:
            _warn(f"{error}; it is left out")
    if samples is False:
        made = replace(made, temperature=0.0)
    elif samples not in (None, True):
        _warn(f"do_sample; expected true or false; found {shown(samples)}; it is left out")
    others = [name for name, neutral in _OTHERS.items() if config.get(name, neutral) not in (None, neutral)]
    if others:
        _warn(f"{', '.join(others)}; not honoured")
    return made


def _warn(line: str) -> None:
    warnings.warn(CheckpointWarning(f"{FILE}: {line}"), stacklevel=3)
