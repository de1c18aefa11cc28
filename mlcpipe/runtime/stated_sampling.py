"""How a checkpoint's generation_config.json samples tokens: read here for all that generate text.

Fields and neutral values: transformers 5.23, `generation/configuration_utils.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlcpipe.errors import BundleError, CheckpointWarning, UsageError
from mlcpipe.runtime.sampling_params import SamplingParams
from mlcpipe.support.json_files import read_json_object, shown

FILE = "generation_config.json"
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_MAX_BYTES = 16 << 20
_MOST_NAMED = 20  # fields of a line
# Fields that are honoured, or change no token of an answer: ids, caches, outputs, speed, and details of `num_beams`.
_SILENT = frozenset((
    *FIELDS, "do_sample", "eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id",
    "transformers_version", "_from_model_config", "use_cache", "cache_implementation", "cache_config", "max_cache_len",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "low_memory", "compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size",
    "renormalize_logits", "remove_invalid_values", "length_penalty", "early_stopping", "num_beam_groups",
    "diversity_penalty", "use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type",
))  # fmt: skip
# Values of other fields that change nothing, as null does; by default zero, false and empty ones.
_NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("typical_p", "num_beams", "num_return_sequences", "encoder_repetition_penalty"), 1),
    "guidance_scale": 1, "forced_bos_token_id": None, "forced_eos_token_id": None,
}  # fmt: skip


def bundle_sampling(bundle: Path, otherwise: SamplingParams) -> SamplingParams:
    """`stated_sampling` of a bundle's file. Raises BundleError for one that cannot be read."""
    path = bundle / FILE
    config = read_json_object(path, limit=_MAX_BYTES, error=BundleError) if path.is_file() else {}
    return stated_sampling(config, otherwise)


def stated_sampling(config: Mapping[str, Any], otherwise: SamplingParams) -> SamplingParams:
    """The sampling that the file states, with neutral values for missing fields; `otherwise` if it states none.

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
    elif samples is not None and samples is not True:
        _warn(f"do_sample; expected true or false; found {shown(samples)}; it is left out")
    others = [name for name, value in config.items() if name not in _SILENT and _counts(name, value)]
    if others:
        listed = ", ".join(shown(name).strip("'") for name in others[:_MOST_NAMED])
        _warn(f"{listed}{', ...' if len(others) > _MOST_NAMED else ''}; not honoured")
    return made


def _counts(name: str, value: object) -> bool:
    return value is not None and (value != _NEUTRAL[name] if name in _NEUTRAL else bool(value))


def _warn(line: str) -> None:
    warnings.warn(CheckpointWarning(f"{FILE}: {line}"), stacklevel=3)
