"""A bundle in stages: runs of a model's layers, each a bundle in a folder of its own, for a device of its own.

The outer manifest has the whole model, its state table and the hash of every file; the stages have libraries, weights
and their part of the table. Nothing here is trusted before it agrees.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from mlcpipe.bundle.integrity import file_info
from mlcpipe.bundle.manifest import MANIFEST, MAX_STAGES, FileInfo, Manifest, read_manifest
from mlcpipe.bundle.model_info import ModelInfo, StageInfo
from mlcpipe.bundle.states import windows_of
from mlcpipe.errors import BundleError, UsageError

# Of the model; stages on other devices may compute in other dtypes, the last one has those of the outer manifest.
_OF_A_STAGE = ("stage", "gathered", "dtype", "kv_dtype")
_SAME = tuple(name for name in ModelInfo.model_fields if name not in _OF_A_STAGE)


class Experts(int):
    """In place of a number of layers: the last device has the experts of the last so many layers, "8e"."""

    def __str__(self) -> str:
        return f"{int(self)}e"


class Part(NamedTuple):
    """The folder of a bundle, or of a stage of it, and its manifest."""

    folder: Path
    manifest: Manifest


def read_parts(directory: Path, manifest: Manifest, *, check_abi: bool = True) -> tuple[Part, ...]:
    """The stages of a bundle whose files are verified, or the bundle itself where it has none.

    Raises BundleError where the stages do not make up the model, or lack what the outer manifest states.
    """
    if not manifest.stages:
        return (Part(directory, manifest),)
    for folder in manifest.stages:
        if f"{folder}/{MANIFEST}" not in manifest.files:
            raise _broken(directory, f"the hash of {folder}/{MANIFEST}", "none")
    parts = tuple(
        Part(directory / name, read_manifest(directory / name, check_abi=check_abi)) for name in manifest.stages
    )
    end, count = 0, manifest.model.num_layers
    alone = [has_experts_alone(part) for part in parts]
    last = parts[-2] if alone[-1] and len(parts) > 1 else parts[-1]
    if any(alone[:-1]) or alone == [True] or any(map(_calls, parts)) != alone[-1]:
        raise _broken(directory, "experts that its stages call, in the last part", "others")
    for part in parts:
        where, stage = part.folder, stage_of(part.manifest)
        if part.manifest.stages or stage is None:
            raise _broken(where, "a stage", "a whole bundle")
        if stage.alone:
            if not stage.begin < stage.end == count or part.manifest.states:
                raise _broken(
                    where, f"experts of layers up to {count}, without states", f"{stage.begin} to {stage.end}"
                )
        elif stage.begin != end or not stage.begin < stage.end <= count:
            raise _broken(where, f"layers from {end} on, at most {count}", f"{stage.begin} to {stage.end}")
        end = stage.end
        _check_part(directory, manifest, part, like=_SAME if part is not last else (*_SAME, "dtype", "kv_dtype"))
    if end != count:
        raise _broken(directory, f"stages of all {count} layers", f"{end}")
    if tuple(state for part in parts for state in part.manifest.states) != manifest.states:
        raise _broken(directory, "the states of its stages, in order", "others")
    return parts


def read_stage(directory: Path, manifest: Manifest, index: int) -> Part:
    """One stage of a bundle whose other stages may be on other machines; its files are not verified yet.

    Raises UsageError for a bundle without that stage, BundleError for a stage that is not the manifest's.
    """
    if not 0 <= index < len(manifest.stages):
        raise UsageError(
            "the bundle lacks the stage", where=directory, expected=f"{len(manifest.stages)} stages", found=index + 1
        )
    name = manifest.stages[index]
    listed, path = manifest.files.get(f"{name}/{MANIFEST}"), directory / name / MANIFEST
    if listed is None or not path.is_file() or file_info(path) != listed:
        raise _broken(directory, f"{name}/{MANIFEST} with the hash of the bundle's manifest", "none or another")
    part = Part(directory / name, read_manifest(directory / name))
    stage = stage_of(part.manifest)
    if part.manifest.stages or stage is None or stage.alone or stage.calls:
        raise _broken(part.folder, "a stage with all that its layers have", "a whole bundle, or experts elsewhere")
    if not 0 <= stage.begin < stage.end <= manifest.model.num_layers:
        raise _broken(part.folder, f"layers up to {manifest.model.num_layers}", f"{stage.begin} to {stage.end}")
    _check_part(directory, manifest, part, like=_SAME)
    return part


def _check_part(directory: Path, manifest: Manifest, part: Part, like: Sequence[str]) -> None:
    """Raise BundleError where a stage and the bundle differ in the files of the stage, or in these facts."""
    where, stage = part.folder, stage_of(part.manifest)
    wrong = [name for name in like if getattr(part.manifest.model, name) != getattr(manifest.model, name)]
    if wrong or stage is None or stage.windows != windows_of(manifest.states):
        raise _broken(where, f"the model's {wrong[0] if wrong else 'windows'}", "another")
    for name, info in part.manifest.files.items():
        if manifest.files.get(f"{where.name}/{name}") != info:
            raise _broken(directory, f"the hash of {where.name}/{name}", "none or another")


def files_of(manifest: Manifest, index: int | None = None) -> dict[str, FileInfo]:
    """The files of stage `index` of a bundle, by path in the bundle; None: those that are of no stage."""
    prefixes = [f"{name}/" for name in manifest.stages]
    if index is not None:
        return {path: info for path, info in manifest.files.items() if path.startswith(prefixes[index])}
    return {path: info for path, info in manifest.files.items() if not path.startswith(tuple(prefixes))}


def weights_digest(manifest: Manifest) -> str:
    """A digest of what bundles of one model, alike cut and quantized, have in common wherever they were compiled.

    So the hashes of libraries, and of the manifests that have these, are not in it; those of weights and texts are.
    """
    files = {
        path: info.sha256
        for path, info in manifest.files.items()
        if PurePosixPath(path).name != MANIFEST and PurePosixPath(path).parent.name != "lib"
    }
    kept = {"format_version", "mlcpipe_version", "abi", "model", "quantization", "weight_layout", "states", "stages"}
    described = {**manifest.model_dump(mode="json", include=kept), "files": files, "target": manifest.target.name}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def has_experts_alone(part: Part) -> bool:
    """Whether a part has experts, and nothing else."""
    stage = stage_of(part.manifest)
    return stage is not None and stage.alone


def _calls(part: Part) -> bool:
    stage = stage_of(part.manifest)
    return stage is not None and stage.calls


def stage_of(manifest: Manifest) -> StageInfo | None:
    """What a manifest says of its stage; None of a whole model."""
    return manifest.model.stage


def check_whole(path: Path, manifest: Manifest) -> None:
    """Raise UsageError for a stage that is opened alone."""
    if manifest.model.stage is not None:
        stage = manifest.model.stage
        raise UsageError(
            "the folder is one stage of a bundle", where=path, expected="the folder of the whole bundle",
            found=f"layers {stage.begin} to {stage.end - 1} alone", next_step=f"open {path.parent}",
        )  # fmt: skip


def check_one_device(path: Path, manifest: Manifest, what: str) -> None:
    """Raise UsageError for a bundle in stages, which `what` cannot take."""
    check_whole(path, manifest)
    if manifest.stages:
        raise UsageError(
            f"{what} takes no bundle in stages", where=path, expected="a bundle for one device",
            found=f"{len(manifest.stages)} stages", next_step="compile the model for one target",
        )  # fmt: skip


def counts_of(text: str) -> tuple[int, ...]:
    """The numbers of layers in `--stages 12,4`, or `Experts` at the end, as in `16,8e`. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    experts = len(words) > 1 and words[-1].endswith("e")
    digits = [*words[:-1], words[-1][:-1]] if experts else words
    if len(words) > MAX_STAGES or not all(word.isascii() and word.isdigit() for word in digits):
        expected = "numbers of layers such as 12,4, or 16,8e"
        raise UsageError("--stages", expected=expected, found=repr(text)[:80])
    counts = [int(word[:9]) for word in digits]
    if not all(counts):
        raise UsageError("--stages", expected="at least one layer in each stage", found=repr(text)[:80])
    return (*counts[:-1], Experts(counts[-1]) if experts else counts[-1])


def runs_of(counts: Sequence[int], layers: int) -> tuple[range, ...]:
    """The layers of each stage. Raises UsageError for numbers that do not add up to the model's `layers`."""
    several = [count for count in counts if not isinstance(count, Experts)]
    if sum(several) != layers or any(isinstance(count, Experts) for count in counts[:-1]):
        found = f"{','.join(map(str, counts[:8]))}: {sum(several)} layers"
        raise UsageError("--stages", expected=f"numbers that add up to the model's {layers} layers", found=found)
    ends = [sum(several[: index + 1]) for index in range(len(several))]
    runs = tuple(range(end - count, end) for end, count in zip(ends, several))
    if len(several) == len(counts):
        return runs
    if counts[-1] > layers:
        raise UsageError("--stages", expected=f"experts of at most {layers} layers", found=str(counts[-1]))
    return (*runs, range(layers - counts[-1], layers))


def _broken(where: Path, expected: str, found: str) -> BundleError:
    return BundleError(
        "the stages of the bundle do not fit together", where=where, expected=expected, found=found,
        next_step="compile the model again",
    )  # fmt: skip
