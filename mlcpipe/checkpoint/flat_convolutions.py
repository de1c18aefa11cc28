"""Convolutions of models that hear and see, as the matrices that multiply their inputs side by side."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.sound import convolutions, hears
from mlcpipe.vision import TURNED


def flat_convolutions(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with weights [out, in, taps] as [out, in * taps]; the same one for models without sound."""
    if not hears(checkpoint.config):
        return checkpoint
    ends, tensors = convolutions(checkpoint.config), dict(checkpoint.tensors)
    for name, tensor in tensors.items():
        if name.endswith(ends) and len(tensor.shape) == 3:
            tensors[name] = replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def as_modules_have_it(tensor: TensorInfo) -> TensorInfo:
    """A tensor of a tower under its name there.

    The projection of patches, which files have as a convolution [hidden, 3, (frames,) patch, patch], becomes a matrix,
    tables [k, n, hidden] have k * n rows, and matrices [in, out] are turned.
    """
    shape = tensor.shape
    shape = (shape[0], math.prod(shape[1:])) if len(shape) in (4, 5) else shape
    shape = (math.prod(shape[:2]), shape[2]) if len(shape) == 3 else shape or (1,)
    turned = tensor.name.endswith(TURNED) and len(shape) == 2
    return replace(tensor, shape=shape[::-1] if turned else shape, turned=turned)
