"""The layer that a checkpoint has after those of its model, to draft tokens (multi-token prediction)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlcpipe.checkpoint.checkpoint import Checkpoint, DraftHead

_NAMES = ("mtp.fc.weight", ".eh_proj.weight")


@dataclass(frozen=True)
class OwnHead(DraftHead):
    """Its tensors are the checkpoint's; families that read them make the head."""


def with_own_head(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, whose draft head is its own if it has one."""
    if not any(name.endswith(_NAMES) for name in checkpoint.tensors):
        return checkpoint
    return replace(checkpoint, draft_head=OwnHead(checkpoint.path, (), {}))
