"""Checkpoint to a smaller checkpoint: measure importance on a text, remove what matters least, write the rest."""

from __future__ import annotations

import importlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.bundle.states import kv_bytes_per_token
from mlcpipe.checkpoint import Checkpoint, open_checkpoint, resolve
from mlcpipe.checkpoint.checkpoint import CONFIG, EMBEDDING_FILES, SINGLE_FILE
from mlcpipe.checkpoint.safetensors_writer import SafetensorsWriter, narrowed
from mlcpipe.compiler.calibration.layer import model_of
from mlcpipe.compiler.calibration.stream import Stream
from mlcpipe.compiler.calibration.text import read_calibration, windows_of
from mlcpipe.compiler.job import Job, lower
from mlcpipe.compiler.preflight import Purpose
from mlcpipe.errors import ConfigError, UsageError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.pruning.recipe import Recipe
from mlcpipe.pruning.work import PrunedTensor, Work
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.defaults import (
    DEFAULT_QUANTIZATION,
    DEFAULT_TARGET,
    DISTILL_RECIPE,
    LOCAL_TARGET,
    OWN_CALIBRATION,
    PRUNED_RATIO,
    PRUNING_METHODS,
)
from mlcpipe.support.files import local_path
from mlcpipe.support.progress import Progress, SilentProgress
from mlcpipe.targets import load_target

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Whose config.json says all that a method changes: the same number of heads and columns in each layer."""


@dataclass(frozen=True)
class Cost:
    """Costs on this CPU in the default quantization: bytes of weights, those read per token, of the KV cache in f16."""

    parameters: int
    weights_bytes: int
    read_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`: `kept` of `count` units remain; `units` is "" for a pattern."""

    output: Path
    original: Path
    method: str
    units: str
    kept: int
    count: int
    before: Cost
    after: Cost


def prune(
    checkpoint: str | Path,
    *,
    method: str,
    output: str | Path,
    keep: int | None = None,
    ratio: float | None = None,
    calibration: str | Path = OWN_CALIBRATION,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pruned:
    """Write a smaller checkpoint into the folder `output`, which appears whole or not at all.

    Args:
        checkpoint: a folder or `hf://org/name[@revision]`, of one of FAMILIES and not quantized.
        method: wanda and sparsegpt make 2 of 4 neighbours 0; heads, width and layers make matrices smaller.
        keep: how many KV heads, MLP columns or layers remain.
        ratio: the share to remove, instead of `keep`; a quarter if both are None. More is removed if only smaller
            numbers are possible.
        calibration: the path of a text to measure importance on; own is the built-in text.
        overwrite: replace a folder that holds a pruned checkpoint.

    Raises an error of `mlcpipe.errors` that says what, where and what to do.
    """
    progress = progress or SilentProgress()
    how, text = _method(method, keep, ratio), read_calibration(calibration)
    purpose = Purpose(DEFAULT_TARGET, DEFAULT_QUANTIZATION, disk=Path(output), title=str(checkpoint))
    source = open_checkpoint(resolve(checkpoint, progress, check=purpose.check))
    check_prunable(source)
    if Path(output).resolve() == source.path.resolve():
        raise UsageError("the output is the checkpoint itself", where=output, next_step="give another path")
    model, config = model_of(source), source.config_fitted_to(text.sha256)
    count, keep = _kept(how, model, keep, ratio)
    job = _lowered(source)
    if job.tokenizer is None:
        raise UsageError("a calibration text needs a tokenizer", where=source.path, expected="tokenizer.json")
    windows = windows_of(text.text, job.tokenizer, model.facts.context_length)
    nbytes = sum(tensor.nbytes for tensor in source.tensors.values())
    replaces = DISTILL_RECIPE if overwrite else ""
    with atomic_directory(Path(output), replaces=replaces, needed_bytes=nbytes) as folder:
        progress.stage("compile a layer")
        stream = Stream(model, source, windows, gram=how.GRAM)
        work = Work(model, source, stream, keep, config, progress)
        _write(how, work, folder)
        local = local_path(str(checkpoint))
        teacher = str(checkpoint) if local is None else str(local.resolve())
        Recipe(teacher, method, "" if how.UNITS else "2:4").write(folder)
        progress.stage("check the result")
        after = _lowered(open_checkpoint(folder))
    return Pruned(Path(output), source.path, method, how.UNITS, keep, count, _cost(job), _cost(after))


def check_prunable(source: Checkpoint) -> None:
    """Raise UsageError or ConfigError, by name, for a checkpoint that cannot be pruned."""
    family = source.config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            "this family cannot be pruned", where=f"{source.path} model_type", expected=", ".join(FAMILIES),
            found=repr(family),
        )  # fmt: skip
    if source.quantized_as is not None or not source.path.is_dir():
        raise UsageError(
            "a quantized checkpoint cannot be pruned", where=source.path, expected="safetensors in float32 or 16 bits",
            found=source.quantized_as or "a GGUF file", next_step="prune the original and quantize the result",
        )  # fmt: skip
    if (source.path / EMBEDDING_FILES[0]).exists():
        raise UsageError("a model that embeds texts cannot be pruned", where=source.path, found=EMBEDDING_FILES[0])


def _method(name: str, keep: int | None, ratio: float | None) -> Any:
    """The module of a method. Raises UsageError for a name or number that it does not have."""
    if name not in PRUNING_METHODS:
        raise UsageError("--method", expected=", ".join(PRUNING_METHODS), found=repr(name))
    how = importlib.import_module(f"mlcpipe.pruning.methods.{name}")
    if keep is not None and ratio is not None:
        raise UsageError("--keep and --ratio both say what stays", next_step="leave one out")
    if not how.UNITS and (keep, ratio) != (None, None):
        raise UsageError(f"--keep and --ratio have no effect on {name}", expected="2 of 4, which the pattern says")
    if ratio is not None and not 0 < ratio < 1:
        raise UsageError("--ratio", expected="a number between 0 and 1", found=ratio)
    return how


def _kept(how: Any, model: CausalLM, keep: int | None, ratio: float | None) -> tuple[int, int]:
    """The number of units, and of those that remain; 0 of 0 for a pattern. Raises UsageError."""
    if not how.UNITS:
        return 0, 0
    *fewer, count = how.allowed(model)
    if not fewer:
        raise UsageError(f"no fewer {how.UNITS} are possible", found=count)
    if keep is None:
        most = count * (1 - (PRUNED_RATIO if ratio is None else ratio))
        keep = max((one for one in fewer if one <= most + 1e-6), default=fewer[0])
    if keep not in fewer:
        numbers = ", ".join(map(str, fewer)) if len(fewer) < 12 else f"{fewer[0]}, {fewer[1]}, ... {fewer[-1]}"
        raise UsageError(f"--keep of {count} {how.UNITS}", expected=numbers, found=keep)
    return count, keep


def _write(how: Any, work: Work, folder: Path) -> None:
    """The files of the pruned checkpoint."""
    source = work.checkpoint
    with (folder / SINGLE_FILE).open("w+b") as file:
        writer = SafetensorsWriter(file, source.tensors.values())
        for kept in how.pruned(work):
            _add(writer, kept, source)
        writer.finish()
    (folder / CONFIG).write_text(json.dumps(work.config, indent=2) + "\n", encoding="utf-8")
    for name in source.text_files():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source.path / name, folder / name)


def _add(writer: SafetensorsWriter, tensor: PrunedTensor, source: Checkpoint) -> None:
    info = source.info(tensor.source)
    if tensor.values is None:
        writer.add(tensor.name, info.dtype, info.shape, source.read_raw(tensor.source))
    else:
        writer.add(tensor.name, info.dtype, tensor.values.shape, narrowed(tensor.values, info.dtype, tensor.name).data)


def _lowered(checkpoint: Checkpoint) -> Job:
    return lower(checkpoint, load_target(LOCAL_TARGET), DEFAULT_QUANTIZATION, kv_cache_dtype="f16")


def _cost(job: Job) -> Cost:
    weights = job.state.weights
    return Cost(
        sum(math.prod(tensor.shape) for tensor in job.checkpoint.tensors.values()),
        sum(weight.nbytes for weight in weights),
        sum(weight.decode_nbytes for weight in weights),
        kv_bytes_per_token(job.states),
    )
