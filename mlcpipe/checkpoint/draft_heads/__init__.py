"""Draft heads: tensors that guess the next tokens from a model's hidden states, beside those of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import Checkpoint, DraftHead
from mlcpipe.checkpoint.draft_heads.assistant import AssistantHead, read_assistant
from mlcpipe.checkpoint.draft_heads.eagle import EagleHead, read_eagle_head
from mlcpipe.checkpoint.draft_heads.files import HeadFiles, open_head
from mlcpipe.checkpoint.draft_heads.medusa import MedusaHeads, read_medusa_heads
from mlcpipe.checkpoint.own_head import OwnHead
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

__all__ = ["NO_HEAD", "AssistantHead", "DraftHead", "EagleHead", "MedusaHeads", "OwnHead", "with_draft_head"]

NO_HEAD = "none"  # instead of a folder: not even the checkpoint's own
# Each gives None for tensors of another kind.
_READERS: tuple[Callable[[HeadFiles, Checkpoint], DraftHead | None], ...] = (
    read_medusa_heads, read_eagle_head, read_assistant,
)  # fmt: skip


def with_draft_head(checkpoint: Checkpoint, folder: Path | str) -> Checkpoint:
    """The checkpoint plus the tensors of the draft head in `folder`, under names of its kind; none with NO_HEAD.

    Raises CheckpointError for a folder without such a head, another dtype, and heads of a model with another hidden
    size or vocabulary; ConfigError for a configuration that is not supported. Numbers are checked when they are read.
    """
    if folder == NO_HEAD:
        return replace(checkpoint, draft_head=None)
    files = open_head(Path(folder))
    for read in _READERS:
        head = read(files, checkpoint)
        if head is not None:
            merged = {**checkpoint.tensors, **head.tensors}
            ordered = MappingProxyType(dict(sorted(merged.items())))
            return replace(checkpoint, tensors=ordered, draft_head=head)
    raise CheckpointError(
        "no draft head", where=shown_path(Path(folder)),
        expected="0.0.linear.weight, 0.0.linear.bias and 0.1.weight of Medusa heads, fc.weight of EAGLE-3, or"
        " pre_projection.weight of a Gemma 4 assistant",
        found=", ".join(map(shown, list(files.tensors)[:3])),
    )  # fmt: skip
