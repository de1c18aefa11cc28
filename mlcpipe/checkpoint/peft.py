"""Reads LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors` in a folder.

Nothing in them is trusted; fields that would change the answers are honoured or refused by name. Fields are those of
`LoraConfig`: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/config.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_float32, read_header
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import read_json_object, shown, shown_path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 1024
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SCALE = 1e4
_MAX_NAMES = 10_000  # per pattern: each module is looked up among them
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_MODULE = re.compile(r"[A-Za-z0-9_.]+")
_LIBRARY = re.compile(r"transformers\.models\.(\w+)\..*")
# Parts of a model, by a word of their tensors' names, that adapters of projections do not touch.
_OTHER_PARTS = {"embed_tokens": "embeddings", "lm_head": "lm_head", "experts": "experts"}
# Fields that say how the adapter was trained, or repeat what the tensors' names say.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
}  # fmt: skip
_HONOURED = {"alpha_pattern", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"}
# What `init_lora_weights` may be: others change the weights of the base, too.
_KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LowRank:
    """The change of a projection: y += scale * B (A x), a f32[rank, k], b f32[n, rank]."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter: `base` as its config names it, and the change of each module of the base model."""

    path: Path
    base: str
    modules: Mapping[str, LowRank]


@dataclass(frozen=True)
class _Config:
    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    root: bool
    base: str
    library: str


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], family: str) -> PeftAdapter:
    """The adapter in a folder, for a model of `family` (a `model_type`) whose projections have these shapes (n, k) by
    module.

    Raises CheckpointError for files that are missing, damaged, of another model, or ask for what is not supported.
    """
    config = _read_config(folder / CONFIG)
    _check_family(config, family, folder / CONFIG)
    weights = folder / WEIGHTS
    if not weights.is_file() and (folder / "adapter_model.bin").exists():
        raise CheckpointError(
            "the adapter is a pickle, which runs code", where=shown_path(folder), expected=WEIGHTS,
            next_step="save it with safetensors",
        )  # fmt: skip
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for info in read_header(weights):
        match = _TENSOR.fullmatch(info.name)
        if match is None or match[1] not in shapes:
            part = next((part for word, part in _OTHER_PARTS.items() if word in info.name.split(".")), None)
            raise CheckpointError(
                f"tensor {shown(info.name)}" if part is None else f"adapters of {part} are not supported",
                where=shown_path(weights), found=None if part is None else shown(info.name),
                expected="lora_A and lora_B of projections in the model's layers" + _of_base(config),
            )  # fmt: skip
        pairs.setdefault(match[1], {})[match[2]] = info
    if not pairs:
        raise CheckpointError("the adapter has no tensors", where=shown_path(weights))
    for module, pair in pairs.items():
        _check_pair(module, pair, shapes[module], config, weights)
    return PeftAdapter(folder, config.base, {module: _read(module, pair, config) for module, pair in pairs.items()})


def _check_family(config: _Config, family: str, where: Path) -> None:
    """Raises CheckpointError if the adapter's base is known to be of another family, whose shapes may be equal.

    PEFT names the base's class where an adapter has no `task_type`; else its base may lie on this machine.
    """
    match = _LIBRARY.fullmatch(config.library)
    found = match[1] if match else _family_of(config.base)
    if found is not None and _as_one(found) != _as_one(family):
        raise CheckpointError(
            "the adapter is for another family of models", where=shown_path(where), expected=shown(family),
            found=f"{shown(found)}, of {shown(config.base)}", next_step="use it with the model that it was trained on",
        )  # fmt: skip


def _as_one(family: str) -> str:
    """Gemma 3's module has its text model, too; files of Mistral's models may name Llama, whose layers they have."""
    return {"mistral": "llama"}.get(family, family.removesuffix("_text"))


def _family_of(base: str) -> str | None:
    """The `model_type` of a model on this machine, in a folder or the hub's cache; None if it is not known."""
    if not base or base.startswith(("//", "\\\\")):  # a UNC path: opening it would contact another machine
        return None
    with suppress(CheckpointError, OSError, ValueError):
        path: Any = Path(base, "config.json")
        if not path.is_file():
            from huggingface_hub import try_to_load_from_cache

            path = try_to_load_from_cache(base, "config.json")
        if isinstance(path, str | Path):
            found = read_json_object(Path(path), limit=_MAX_CONFIG_BYTES, error=CheckpointError).get("model_type")
            return found if isinstance(found, str) else None
    return None


def _of_base(config: _Config) -> str:
    return f"; the adapter is for {shown(config.base)}" if config.base else ""


def _check_pair(
    module: str, pair: Mapping[str, TensorInfo], shape: tuple[int, int], config: _Config, where: Path
) -> None:
    """Raises CheckpointError unless A and B have the rank that the config says and the projection's shape."""
    missing = {"A", "B"} - pair.keys()
    if missing:
        raise CheckpointError(f"lora_{missing.pop()} of {module} is missing", where=shown_path(where))
    n, k = shape
    rank = _pattern(config.ranks, module, config.rank)
    for name, wanted in (("A", (rank, k)), ("B", (n, rank))):
        if pair[name].shape != wanted:
            raise CheckpointError(
                f"lora_{name} of {module} has another shape", where=shown_path(where),
                expected=f"{list(wanted)}{_of_base(config)}", found=list(pair[name].shape),
                next_step="is it an adapter of this model?",
            )  # fmt: skip


def _read(module: str, pair: Mapping[str, TensorInfo], config: _Config) -> LowRank:
    rank = _pattern(config.ranks, module, config.rank)
    alpha = _pattern(config.alphas, module, config.alpha)
    scale = alpha / (math.sqrt(rank) if config.root else rank)
    return LowRank(read_float32(pair["A"]), read_float32(pair["B"]), scale)


def _pattern(values: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name that is the module's, or its end after a dot, as PEFT matches names."""
    return next((value for name, value in values.items() if f".{module}".endswith(f".{name}")), default)


def _read_config(path: Path) -> _Config:
    config = read_json_object(path, limit=_MAX_CONFIG_BYTES, error=CheckpointError, what="adapter's config")

    def refusal(field: str, expected: str) -> CheckpointError:
        found = shown(config[field]) if field in config else "nothing"
        return CheckpointError(f"the adapter's {shown(field)}", where=shown_path(path), expected=expected, found=found)

    if config.get("peft_type") != "LORA":
        raise refusal("peft_type", "LORA")
    if config.get("init_lora_weights") not in _KEEPS_BASE:
        raise refusal("init_lora_weights", "one that leaves the base model's weights as they are")
    if config.get("bias", "none") != "none":
        raise refusal("bias", "none")
    others = config.keys() - _NO_EFFECT - _HONOURED - {"init_lora_weights", "bias"}
    for field in sorted(others):
        if config[field] not in (None, False) and config[field] != [] and config[field] != {}:
            raise refusal(field, "not set: it would change the answers and is not supported")
    if not isinstance(config.get("use_rslora", False), bool):
        raise refusal("use_rslora", "true or false")
    _check_numbers(config, refusal)
    base, mapping = config.get("base_model_name_or_path"), config.get("auto_mapping")
    library = mapping.get("parent_library") if isinstance(mapping, dict) else None
    return _Config(
        config["r"], config["lora_alpha"], config.get("rank_pattern") or {}, config.get("alpha_pattern") or {},
        config.get("use_rslora", False), base if isinstance(base, str) else "",
        library if isinstance(library, str) else "",
    )  # fmt: skip


def _check_numbers(config: Mapping[str, Any], refusal: Any) -> None:
    """Raises what `refusal(field, expected)` gives for ranks and factors that make no sense."""

    def is_rank(value: Any) -> bool:
        return type(value) is int and 1 <= value <= MAX_RANK

    def is_alpha(value: Any) -> bool:
        return type(value) in (int, float) and -_MAX_SCALE <= value <= _MAX_SCALE

    if not is_rank(config.get("r")):
        raise refusal("r", f"a rank from 1 to {MAX_RANK}")
    if not is_alpha(config.get("lora_alpha")):
        raise refusal("lora_alpha", f"a number up to {_MAX_SCALE:g}")
    for field, good in (("rank_pattern", is_rank), ("alpha_pattern", is_alpha)):
        values = config.get(field) or {}
        if not isinstance(values, dict) or not all(_MODULE.fullmatch(k) and good(v) for k, v in values.items()):
            raise refusal(field, "numbers by names of modules; patterns are not supported")
        if len(values) > _MAX_NAMES:
            raise refusal(field, f"at most {_MAX_NAMES} names")
