"""`--quantization keep`: each matrix is stored in the form that the checkpoint has it in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.defaults import DEFAULT_QUANTIZATION
from mlcpipe.errors import TargetError
from mlcpipe.quantization.kept import SCHEMES
from mlcpipe.quantization.scheme import Scheme, plain_scheme
from mlcpipe.targets import Target
from mlcpipe.weights.table import Weight


def keep(
    weights: Sequence[Weight], checkpoint: Checkpoint, target: Target, formats: Collection[str]
) -> tuple[Weight, ...]:
    """The weights with the schemes that lose nothing: blocks as they are, float16, else float32.

    `formats` are the block formats that the target's kernels read. Raises TargetError for a matrix in another one.
    """
    return tuple(
        weight if weight.kind == "vector" else replace(weight, scheme=_scheme(weight, checkpoint, target, formats))
        for weight in weights
    )


def _scheme(weight: Weight, checkpoint: Checkpoint, target: Target, formats: Collection[str]) -> Scheme:
    stored = {checkpoint.tensors[source].dtype for group in weight.sources for source in group}
    known = stored <= {"float32", "float16", "bfloat16"}
    if len(stored) > 1 and not known:
        raise TargetError(f"the parts of {weight.name} are stored in several formats", found=", ".join(sorted(stored)))
    if known:
        return plain_scheme("float16" if stored == {"float16"} else "float32")
    (name,) = stored
    if weight.kind == "plain":  # routers: small, and their kernels read numbers
        return plain_scheme("float32")
    if name not in formats:
        raise TargetError(
            f"no kernel of {target.name} reads {name}",
            where=f"tensor {weight.sources[0][0]}", expected=" ".join(["F32 F16 BF16", *sorted(formats)]),
            next_step=f"add --quantization {DEFAULT_QUANTIZATION} or q8f16_1, which round the weights a second time",
        )  # fmt: skip
    return SCHEMES[name]
