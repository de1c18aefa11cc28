"""The weight table: for each parameter of the compiled functions, where it comes from and how it is stored.

Passes rewrite the table together with the IR (two projections become one, a matrix becomes codes and scales);
the converter then only has to execute it. So the table is the whole contract between compile and convert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.errors import CheckpointError
from mlcpipe.quantization.layout import Layout
from mlcpipe.quantization.scheme import Scheme, plain_scheme

Array = NDArray[Any]

# Tensors that checkpoints carry and no model reads: buffers that old transformers versions saved.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias.mask")


@dataclass(frozen=True)
class Weight:
    """One logical weight.

    `sources`: for a matrix or vector one tuple of checkpoint tensors, joined along axis 0; for [experts, N, K] one
    such tuple an expert. `kind`: "scheme" (packed), "plain" (packed without quantization), "vector" or
    "constant". `add` is added after joining. `scheme` and `layout` are set by the pass that packs.
    `reads` is the part of it that one token needs: 1, or that of the experts that are chosen, or one row. `rows` are
    those of the joined sources (of each expert) that it has: first, and one past the last; None is all.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    sources: tuple[tuple[str, ...], ...] = ()
    add: float = 0.0
    constant: int = 0
    scheme: Scheme | None = None
    layout: Layout | None = None
    reads: Fraction = Fraction(1)
    rows: tuple[int, int] | None = None

    @property
    def experts(self) -> int | None:
        """Leading extent of [experts, N, K]."""
        return self.shape[0] if len(self.shape) == 3 else None

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of what is stored; names are MLC's (`x.weight` becomes `x.q_weight`, `x.q_scale`)."""
        if self.scheme is None or self.layout is None:
            return {self.name: (self.shape, self.dtype)}
        n, k = self.shape[-2:]
        stem = self.name.removesuffix("weight")
        return {stem + part: value for part, value in self.layout.shapes(self.scheme, n, k, self.experts).items()}

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        return sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in self.arrays().values()
        )

    @property
    def decode_nbytes(self) -> int:
        """Bytes that a decode step reads of it."""
        return int(self.nbytes * self.reads)


def weight_table(params: Iterable[tuple[str, nn.Parameter]]) -> list[Weight]:
    """The table as the model definition states it, before any pass."""
    return [_weight(name, param) for name, param in params]


def _weight(name: str, param: nn.Parameter) -> Weight:
    shape, attrs = tuple(int(extent) for extent in param.shape), param.attrs
    if "constant" in attrs:
        return Weight(name, shape, str(param.dtype), "constant", constant=int(attrs["constant"]))
    parent = name.rsplit(".", 2)[0]
    sources = tuple(tuple(f"{parent}.{source}" for source in group) for group in attrs.get("sources", []))
    kind = attrs.get("pack", "vector")
    add, reads = float(attrs.get("add", 0.0)), Fraction(attrs.get("reads", 1))
    return Weight(name, shape, str(param.dtype), kind, sources or ((name,),), add=add, reads=reads)


def join(weights: Sequence[Weight], name: str) -> Weight:
    """One matrix whose rows are those of `weights`, in order."""
    first = weights[0]
    rows = sum(w.shape[0] for w in weights)
    sources = (tuple(source for w in weights for source in w.sources[0]),)
    return replace(first, name=name, shape=(rows, *first.shape[1:]), sources=sources)


def stored(weight: Weight, scheme: Scheme, layout: Layout) -> Weight:
    """The weight as a bundle stores it: packed in `layout`, by `scheme` or plainly in its dtype, or a vector."""
    if weight.kind == "constant":
        return weight
    if weight.kind == "vector":
        return replace(weight, dtype=layout.vector_dtype(scheme.model_dtype))
    plain = weight.kind != "scheme"
    return replace(weight, scheme=plain_scheme(scheme.model_dtype) if plain else scheme, layout=layout)


def check_sources(weights: Sequence[Weight], checkpoint: Checkpoint, *, tied: bool) -> None:
    """Every tensor of the checkpoint is used exactly once, and every source exists with the right shape.

    Raises CheckpointError that names the first tensor that is missing, of another shape, unused or used twice.
    """
    used: dict[str, str] = {}
    for weight in weights:
        for source in (s for group in weight.sources for s in group):
            if source in used:
                raise CheckpointError(f"tensor {source} is used twice", where=f"{used[source]} and {weight.name}")
            if source not in checkpoint.tensors:
                raise CheckpointError(
                    f"tensor {source} is missing",
                    where=checkpoint.path,
                    expected=f"it for the weight {weight.name} {list(weight.shape)}",
                    next_step="check that all shards are there and that config.json belongs to them",
                )
            used[source] = weight.name
        for group in weight.sources:
            _check_shape(weight, group, checkpoint)
    unused = [name for name in checkpoint.tensors if name not in used and not name.endswith(_IGNORED_SUFFIXES)]
    if tied:
        unused = [name for name in unused if name != "lm_head.weight"]
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise CheckpointError(
            f"tensor {unused[0]}{more} would not be used",
            where=checkpoint.path,
            expected="every tensor used exactly once",
            next_step="config.json and weights do not match, or the architecture has a part that mlcpipe lacks",
        )


def _check_shape(weight: Weight, group: tuple[str, ...], checkpoint: Checkpoint) -> None:
    """The tensors of a group, joined along axis 0, have the shape of the weight (of one expert of it)."""
    shape = weight.shape if weight.experts is None else weight.shape[1:]
    found = [checkpoint.tensors[name].shape for name in group]
    rows = sum(part[0] if part else 0 for part in found)
    if any(len(part) != len(shape) or part[1:] != shape[1:] for part in found) or rows != shape[0]:
        raise CheckpointError(
            f"tensor {', '.join(group)} has another shape than config.json says",
            where=checkpoint.path,
            expected=f"{list(shape)} for {weight.name}",
            found=" + ".join(str(list(part)) for part in found),
        )


def load(weight: Weight, checkpoint: Checkpoint) -> Iterator[tuple[str, Array, int]]:
    """Yield (name, array, bytes of the checkpoint read) of what is stored for one weight.

    Raises CheckpointError for a value that the stored dtype cannot hold. `check_sources` came before.
    """
    if weight.kind == "constant":
        yield weight.name, np.full(weight.shape, weight.constant, weight.dtype), 0
        return
    nbytes = sum(checkpoint.tensors[s].nbytes for group in weight.sources for s in group)
    if weight.experts is None:
        packed = _stored(weight, _joined(weight.sources[0], checkpoint, weight))
    else:
        packed = {}
        for i, group in enumerate(weight.sources):
            for name, array in _stored(weight, _joined(group, checkpoint, weight)).items():
                packed.setdefault(name, np.empty((len(weight.sources), *array.shape), array.dtype))[i] = array
    for name, array in packed.items():
        yield name, array, nbytes
        nbytes = 0


def _joined(group: tuple[str, ...], checkpoint: Checkpoint, weight: Weight) -> Array:
    full = checkpoint.read(group[0])
    if len(group) > 1:
        parts = [full, *(checkpoint.read(name) for name in group[1:])]
        full = np.concatenate(parts)
    if weight.rows is not None:
        full = full[slice(*weight.rows)]
    return full + np.float32(weight.add) if weight.add else full


def _stored(weight: Weight, full: Array) -> dict[str, Array]:
    """Array as read -> arrays as stored: packed and laid out, or cast."""
    if weight.scheme is None or weight.layout is None:
        with np.errstate(over="ignore"):
            cast = full.astype(weight.dtype)
        if not np.isfinite(cast).all():
            raise CheckpointError(
                f"weight {weight.name} does not fit {weight.dtype}", found=f"{float(np.abs(full).max()):g}"
            )
        return {weight.name: cast}
    packed: Mapping[str, Array] = weight.scheme.pack(full, name=weight.name)
    n, k = weight.shape[-2:]
    stem = weight.name.removesuffix("weight")
    return {stem + part: array for part, array in weight.layout.repack(weight.scheme, packed, n, k).items()}
