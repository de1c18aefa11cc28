"""Convolutions of models that hear, as the matrices that multiply their inputs side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.sound import convolutions, hears


def flat_convolutions(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with weights [out, in, taps] as [out, in * taps]; the same one for models without sound."""
    if not hears(checkpoint.config):
        return checkpoint
    ends, tensors = convolutions(checkpoint.config), dict(checkpoint.tensors)
    for name, tensor in tensors.items():
        if name.endswith(ends) and len(tensor.shape) == 3:
            tensors[name] = replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))
    return replace(checkpoint, tensors=MappingProxyType(tensors))
