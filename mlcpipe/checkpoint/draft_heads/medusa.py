"""Medusa heads: the tensors that guess the tokens after the next one.

Names are those of the authors' `medusa_lm_head.safetensors`, `I.J.linear.weight`, `I.J.linear.bias` and `I.J.weight` of
head I, or the same behind `medusa_head.`: https://github.com/FasterDecoding/Medusa, medusa/model/medusa_model.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlcpipe.checkpoint.checkpoint import Checkpoint, DraftHead
from mlcpipe.checkpoint.draft_heads.files import HeadFiles, check_tensors
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown_path

PREFIX = "medusa_head."  # of the tensors' names in the model
MAX_HEADS, MAX_BLOCKS = 8, 8
_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(?:weight|bias)")


@dataclass(frozen=True)
class MedusaHeads(DraftHead):
    """The number of heads; each has `blocks` residual blocks and a logits matrix."""

    heads: int
    blocks: int


def read_medusa_heads(files: HeadFiles, checkpoint: Checkpoint) -> MedusaHeads | None:
    """The heads of a folder; None where it has none. Raises CheckpointError for heads of another model."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in files.tensors.items()}
    places = [match for name in tensors if (match := _BLOCK.fullmatch(name))]
    if not places:
        return None
    heads, blocks = (1 + max(int(place[i]) for place in places) for i in (1, 2))
    if heads > MAX_HEADS or blocks > MAX_BLOCKS:
        raise CheckpointError(
            "too many Medusa heads", where=shown_path(files.path),
            expected=f"up to {MAX_HEADS} of up to {MAX_BLOCKS} blocks", found=f"{heads} of {blocks}",
        )  # fmt: skip
    hidden, vocab = (checkpoint.config.get(name) for name in ("hidden_size", "vocab_size"))
    expected: dict[str, tuple[object, ...]] = {}
    for head in range(heads):
        for block in range(blocks):
            expected[f"{head}.{block}.linear.weight"] = hidden, hidden
            expected[f"{head}.{block}.linear.bias"] = (hidden,)
        expected[f"{head}.{blocks}.weight"] = vocab, hidden
    check_tensors(tensors, expected, files.path)
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    return MedusaHeads(files.path, files.files, named, heads, blocks)
