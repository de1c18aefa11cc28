"""How the family of a checkpoint names its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlcpipe.nn.names import CheckpointNames


def names_of(config: Mapping[str, Any]) -> CheckpointNames:
    """The names of the family of a config.json; Llama's where it is none of the decoders."""
    from mlcpipe.models import checkpoint_names, diffusion_types, model_types

    kind = config.get("model_type")
    return checkpoint_names(kind) if kind in [*model_types(), *diffusion_types()] else CheckpointNames()
