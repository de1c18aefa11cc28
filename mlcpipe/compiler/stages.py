"""A bundle in stages: runs of a model's layers, each compiled for a device of its own, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlcpipe.bundle import MANIFEST, FileInfo, Manifest, MemoryPlan, write_manifest
from mlcpipe.bundle.integrity import file_info
from mlcpipe.bundle.manifest import MAX_STAGES
from mlcpipe.bundle.model_info import ModelInfo
from mlcpipe.bundle.origin import accept
from mlcpipe.bundle.stages import Experts, runs_of
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.draft_heads import NO_HEAD, with_draft_head
from mlcpipe.compiler.embedding import embedding_info
from mlcpipe.compiler.export import prepare_model
from mlcpipe.compiler.job import Job, lengths, lower
from mlcpipe.errors import ConfigError, TargetError, UsageError
from mlcpipe.models import build_model
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.stages import check_stageable
from mlcpipe.quantization.recipe import QuantizationRecipe, load_recipe
from mlcpipe.support.defaults import AUTO
from mlcpipe.targets import Target, load_target


@dataclass(frozen=True)
class StagePart:
    """A stage to compile: its target and its layers, without experts of the layers `away`.

    `alone`: it has the experts of its layers, and nothing else.
    """

    target: Target
    layers: range
    away: range = range(0)
    alone: bool = False

    @property
    def folder(self) -> str:
        """Its folder in the bundle, in the order of the stages."""
        return f"{'experts' if self.alone else 'layers'}-{self.layers.start}-{self.layers.stop - 1}"


def targets_of(text: str) -> tuple[Target, ...]:
    """The targets in `vulkan,cpu`. Raises TargetError for one whose bundles Python's runtime does not run."""
    names = text.split(",")
    if len(names) > MAX_STAGES:
        raise UsageError("--target", expected=f"at most {MAX_STAGES} targets", found=len(names))
    found = tuple(load_target(name.strip()) for name in names)
    for target in found:
        if target.in_browsers or target.archive or not target.own_pages:
            raise TargetError(
                "no stages", where=target.name, expected="targets that mlcpipe itself runs, such as cpu and vulkan",
                found="one for browsers, phones or boards", next_step="compile the model for this target alone",
            )  # fmt: skip
    return found


def check_model(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a model that embeds texts."""
    if embedding_info(checkpoint) is not None:
        raise ConfigError(
            "no stages of a model that embeds texts", where=checkpoint.path, expected="a model that writes text",
            found=str(checkpoint.config.get("model_type"))[:80], next_step="compile it for one device",
        )  # fmt: skip


def parts_of(checkpoint: Checkpoint, targets: str, counts: Sequence[int]) -> tuple[StagePart, ...]:
    """The stages with `counts` layers each, for one target each or one for all.

    Raises UsageError for numbers that do not fit the model or the targets, TargetError as `targets_of` does.
    """
    found = targets_of(targets)
    check_model(checkpoint)
    if len(found) not in (1, len(counts)):
        given = f"{len(found)} for {len(counts)} stages"
        raise UsageError("--target", expected="one target for each stage, or one for all", found=given)
    runs = runs_of(counts, build_model(checkpoint.config).facts.num_layers)
    found = found if len(found) > 1 else found * len(runs)
    alone = isinstance(counts[-1], Experts)
    away = runs[-1] if alone else range(0)
    parts = [StagePart(target, run, away) for target, run in zip(found, runs)]
    return (*parts[:-1], replace(parts[-1], away=range(0), alone=alone))


def check_options(quantization: str | QuantizationRecipe, *, adapters: bool, draft_head: bool, fitted: bool) -> None:
    """Raise ConfigError for what a bundle in stages cannot have yet."""
    wanted = {
        "adapters": adapters,
        "a draft head": draft_head,
        "a calibration text, which runs through the whole model": fitted,
        "--quantization auto, which adds libraries": quantization == AUTO,
    }
    for name, asked in wanted.items():
        if asked:
            raise ConfigError(
                f"no stages with {name}", expected="a bundle for one device, or stages without it",
                next_step="leave it out, or compile for one target",
            )  # fmt: skip


def stage_models(
    checkpoint: Checkpoint, targets: Sequence[Target], plan: QuantizationRecipe, kv_cache_dtype: str
) -> list[LanguageModel]:
    """The whole model as prepared for each target. Raises ConfigError for one that cannot be cut."""
    models: list[LanguageModel] = []
    for target in targets:
        model = prepare_model(checkpoint.config, target, plan.scheme, kv_cache_dtype)
        models.append(check_stageable(model))
    return models


def lower_stages(
    checkpoint: Checkpoint,
    parts: Sequence[StagePart],
    quantization: str | QuantizationRecipe,
    context: int | None,
    kv_cache_dtype: str,
) -> list[Job]:
    """Lower each stage, with one context and one chunk of prompts. The layer that drafts is left out."""
    checkpoint = with_draft_head(checkpoint, NO_HEAD)
    plan = load_recipe(quantization) if isinstance(quantization, str) else quantization
    targets = [part.target for part in parts]
    models = stage_models(checkpoint, targets, plan, kv_cache_dtype)
    sizes = [lengths(model, target, checkpoint, context) for model, target in zip(models, targets)]
    context, chunk = (min(several) for several in zip(*sizes))
    jobs: list[Job] = []
    for part in parts:
        like = jobs[0] if jobs else None
        jobs.append(
            lower(
                checkpoint,
                part.target,
                plan,
                context,
                kv_cache_dtype,
                like,
                layers=part.layers,
                chunk=chunk,
                away=part.away,
                alone=part.alone,
            )  # fmt: skip
        )
    return jobs


def write_stages(
    parts: Sequence[StagePart],
    jobs: Sequence[Job],
    folder: Path,
    write: Callable[[Job, Path], Manifest],
    copy_texts: Callable[[Job, Path], dict[str, FileInfo]],
) -> None:
    """Write the folder of each stage by `write`, then what describes all of the model."""
    described: list[Manifest] = []
    files: dict[str, FileInfo] = {}
    for part, job in zip(parts, jobs):
        own = folder / part.folder
        own.mkdir()
        found = write(job, own)
        write_manifest(own, found)
        files |= {f"{part.folder}/{name}": info for name, info in found.files.items()}
        files[f"{part.folder}/{MANIFEST}"] = file_info(own / MANIFEST)
        described.append(found)
    files |= copy_texts(jobs[-1], folder)
    write_manifest(folder, _whole(described, [part.folder for part in parts], files))
    accept(folder)


def _whole(stages: Sequence[Manifest], folders: Sequence[str], files: dict[str, FileInfo]) -> Manifest:
    """The manifest of the model: what its stages have together; target and variants are those of the last."""
    last = [stage for stage in stages if stage.model.stage is not None and not stage.model.stage.alone][-1]
    plans = [stage.memory_plan for stage in stages]
    workspace = {
        f"{folder}: {name}": nbytes
        for folder, plan in zip(folders, plans)
        for name, nbytes in plan.workspace_bytes.items()
    }
    together = MemoryPlan(
        weights_bytes=sum(plan.weights_bytes for plan in plans),
        decode_weights_bytes=sum(plan.weights_read for plan in plans),
        workspace_bytes=workspace,
        attention_bytes=max(plan.attention_bytes for plan in plans),
        host_bytes=sum(plan.host_bytes for plan in plans),
    )
    model = ModelInfo.model_validate({**last.model.model_dump(), "stage": None, "gathered": ()})
    return last.model_copy(
        update={
            "model": model,
            "params": (),
            "memory_plan": together,
            "states": tuple(state for stage in stages for state in stage.states),
            "kernels": (),
            "stages": tuple(folders),
            "files": files,
        }
    )
