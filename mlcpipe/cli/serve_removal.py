"""Removal of models by clients of `mlcpipe serve`: of its cache, and of the folder of `--models`, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlcpipe.cli.cached import called, models_in_cache, remove_model
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.support.atomic import remove_directory
from mlcpipe.support.files import local_path

if TYPE_CHECKING:
    from mlcpipe.bundle.cached import CachedModel


class Owned(NamedTuple):
    """What the server may remove of a model: its place in the folder of `--models`, and what the cache has of it."""

    path: Path | None
    cached: list[CachedModel]


def owned(spec: str | None, folder: Path | None) -> Owned:
    """What may be removed of a model that was named `spec`, or found in `folder`. Raises UsageError for nothing."""
    path = None if spec is None else local_path(spec)
    inside = None
    if path is not None and folder is not None and not path.is_symlink():
        root, place = folder.resolve(), path.resolve()
        inside = place if place != root and place.is_relative_to(root) else None
    cached = [] if spec is None else called(models_in_cache(), spec)
    if inside is None and not cached:
        raise UsageError(
            "the model's files are not the server's own", where=spec,
            expected="a model of the cache, or of the folder of --models", next_step="remove them yourself",
        )  # fmt: skip
    return Owned(inside, cached)


def remove(found: Owned) -> None:
    """Remove it. Raises MlcpipeError for files that are in use, or that the system keeps."""
    try:
        for model in found.cached:
            remove_model(model)
        if found.path is not None and found.path.is_dir():
            remove_directory(found.path)
        elif found.path is not None:
            found.path.unlink()
    except OSError as error:
        raise ResourceError("the model's files cannot be removed", found=error) from None
