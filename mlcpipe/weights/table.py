"""The weight table: the sources and stored form of each parameter of the compiled functions.

Passes rewrite the table together with the IR (two projections become one, a matrix becomes codes and scales);
the converter only executes it. The table is the whole contract between compile and convert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.checkpoint import Checkpoint, TensorInfo
from mlcpipe.checkpoint.quantized_matrix import Parts, joined
from mlcpipe.errors import CheckpointError
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.quantization.inputs import Inputs
from mlcpipe.quantization.layout import Layout, load_layout
from mlcpipe.quantization.native_formats import pack_parts
from mlcpipe.quantization.packing import pack, unpack
from mlcpipe.quantization.scheme import Scheme, plain_scheme

Array = NDArray[Any]

# Buffers that transformers saves, some only once did, and no model reads; those of xIELU are the same in all models.
_IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq", "self_attn.bias.mask", "attn.bias", "attention.bias", ".masked_bias", "act_fn.beta",
    "act_fn.eps", "self_attn.slope_rate", "self_attn.query_decay", "self_attn.key_decay", "self_attn.diagonal_decay",
)  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """One logical weight.

    `sources`: for a matrix or vector one tuple of checkpoint tensors, joined along axis 0; for [experts, N, K] one
    such tuple per expert. `kind`: "scheme" (packed), "plain" (packed without quantization), "vector" or "float32" (a
    vector, or the taps of a convolution, that no scheme rounds). `add` is added after joining. The packing pass sets
    `scheme` and `layout`. `reads` is the fraction that one token reads: 1, the chosen experts' share, one row; or how
    many layers use it.
    `rows` is the half-open row range that it takes of the joined sources (of each expert); None is all. `part_rows`
    are the rows of each source of a joined matrix. `gathered`: functions take the rows of their tokens alone, row 0 for
    tokens beyond the table. `order`, int32[N] as bytes, are the rows of the joined sources in
    the order in which they are stored, if it is not their own. `columns`, int32[K] or [experts, K] as bytes, is the
    order in which columns are stored if it is not their own: an array of the weight, too. `parts` are the weights that
    a pass puts in its place, in order of its rows, where its sources are in several formats.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    sources: tuple[tuple[str, ...], ...] = ()
    add: float = 0.0
    scheme: Scheme | None = None
    layout: Layout | None = None
    reads: Fraction = Fraction(1)
    rows: tuple[int, int] | None = None
    part_rows: tuple[int, ...] = ()
    order: bytes = b""
    columns: bytes = b""
    parts: tuple[Weight, ...] = ()
    gathered: bool = False

    @property
    def experts(self) -> int | None:
        """Leading extent of [experts, N, K]."""
        return self.shape[0] if len(self.shape) == 3 else None

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> (shape, dtype) of the stored arrays, with MLC names (`x.weight` to `x.q_weight`, `x.q_scale`)."""
        if self.scheme is None or self.layout is None:
            return {self.name: (self.shape, self.dtype)}
        n, k = self.shape[-2:]
        shapes = self.layout.shapes(self.scheme, n, k, self.experts)
        if self.columns:
            shapes["q_columns"] = ((*self.shape[:-2], k), "int32")
        stem = self.name.removesuffix("weight")
        return {stem + part: value for part, value in shapes.items()}

    def gathered_arrays(self) -> tuple[str, ...]:
        """The stored arrays of which functions take rows: all but the order of columns."""
        return tuple(n for n in self.arrays() if not n.endswith("q_columns")) if self.gathered and self.layout else ()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored arrays."""
        return sum(
            int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize for shape, dtype in self.arrays().values()
        )

    @property
    def decode_nbytes(self) -> int:
        """Bytes that a decode step reads."""
        return int(self.nbytes * self.reads)


def weight_table(params: Iterable[tuple[str, nn.Parameter]], gathers: bool = False) -> list[Weight]:
    """The table of a model definition, before any pass; with `gathers` hosts gather the rows of tables by token."""
    return [replace(_weight(name, param), gathered=gathers and "by_token" in param.attrs) for name, param in params]


def _weight(name: str, param: nn.Parameter) -> Weight:
    shape, attrs = tuple(int(extent) for extent in param.shape), param.attrs
    parent = name.rsplit(".", 2)[0]
    sources = tuple(tuple(f"{parent}.{source}" for source in group) for group in attrs.get("sources", []))
    kind = attrs.get("pack", "vector")
    add, reads = float(attrs.get("add", 0.0)), Fraction(attrs.get("reads", 1))
    order = attrs["order"].tobytes() if "order" in attrs else b""
    rows = (0, shape[0]) if "first_rows_of" in attrs else None
    sources = ((attrs["first_rows_of"],),) if rows else sources or ((name,),)
    return Weight(name, shape, str(param.dtype), kind, sources, add=add, reads=reads, order=order, rows=rows)


def join(weights: Sequence[Weight], name: str) -> Weight:
    """One matrix with the rows of `weights`, in order."""
    first = weights[0]
    rows = tuple(w.shape[0] for w in weights)
    sources = (tuple(source for w in weights for source in w.sources[0]),)
    shape = (sum(rows), *first.shape[1:])
    return replace(first, name=name, shape=shape, sources=sources, part_rows=rows, order=_joined_order(weights))


def _joined_order(weights: Sequence[Weight]) -> bytes:
    """The rows of all sources of some weights in the order in which they are stored; empty if it is their own."""
    if not any(w.order for w in weights):
        return b""
    orders, begin = [], 0
    for w in weights:
        own = np.frombuffer(w.order, np.int32) if w.order else np.arange(w.shape[0], dtype=np.int32)
        orders.append(own + np.int32(begin))
        begin += w.shape[0]
    return np.concatenate(orders).astype(np.int32).tobytes()


def stored(weight: Weight, scheme: Scheme, layout: Layout) -> Weight:
    """The weight in its stored form: packed in `layout` by its own scheme, else by `scheme` or none; or a vector.

    A table whose rows are gathered has a layout of its own.
    """
    layout = load_layout("row_words") if weight.gathered else layout
    if weight.scheme is not None:
        return replace(weight, layout=layout)
    if weight.kind == "float32":
        return weight
    if weight.kind == "vector":
        return replace(weight, dtype=layout.vector_dtype(scheme.model_dtype))
    plain = weight.kind != "scheme"
    return replace(weight, scheme=plain_scheme(scheme.model_dtype) if plain else scheme, layout=layout)


def as_named(
    weights: Sequence[Weight], checkpoint: Tensors, names: CheckpointNames
) -> tuple[tuple[Weight, ...], tuple[str, ...]]:
    """The weights with the checkpoint's names of their sources, and the beginnings of names of unused tensors.

    The prefix is the first of the possible ones with which the checkpoint has the first weight.
    """
    first = names.candidates(weights[0].sources[0][0])
    at = next((i for i, name in enumerate(first) if name in checkpoint.tensors), 0)
    prefix = names.prefixes[at]

    def named(source: str) -> str:
        found = names.candidates(source)
        name = found[at if len(found) > 1 else 0]
        others = (name.replace(part, other) for part, other in names.also.items())
        return name if name in checkpoint.tensors else next((one for one in others if one in checkpoint.tensors), name)

    renamed = tuple(replace(w, sources=tuple(tuple(map(named, group)) for group in w.sources)) for w in weights)
    return renamed, (*names.unused, *(prefix + name for name in names.unused))


def check_sources(weights: Sequence[Weight], checkpoint: Checkpoint, unused: Sequence[str] = ()) -> None:
    """Check that every checkpoint tensor is used exactly once, and every source has the right shape.

    Tensors whose names begin with one of `unused` are allowed.

    Raises CheckpointError naming the first tensor that is missing, misshapen, unused or used twice.
    """
    used: dict[str, str] = {}
    for weight in weights:
        for source in (s for group in weight.sources for s in group):
            if source in used and weight.rows is None:
                raise CheckpointError(f"tensor {source} is used twice", where=f"{used[source]} and {weight.name}")
            if source not in checkpoint.tensors:
                raise CheckpointError(
                    f"tensor {source} is missing",
                    where=checkpoint.path,
                    expected=f"a source of the weight {weight.name} {list(weight.shape)}",
                    next_step="check that all shards are present and match config.json",
                )
            used[source] = weight.name
        for group in weight.sources:
            _check_shape(weight, group, checkpoint)
    left = [name for name in checkpoint.tensors if name not in used and not name.endswith(_IGNORED_SUFFIXES)]
    left = [name for name in left if not name.startswith(tuple(unused))]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(
            f"tensor {left[0]}{more} would not be used",
            where=checkpoint.path,
            expected="every tensor used exactly once",
            next_step="config.json and weights do not match, or mlcpipe lacks a part of the architecture",
        )


def _check_shape(weight: Weight, group: tuple[str, ...], checkpoint: Checkpoint) -> None:
    """Check that a group, joined along axis 0, has the shape of the weight (or of one expert)."""
    shape = weight.shape if weight.experts is None else weight.shape[1:]
    shapes = [checkpoint.tensors[name].shape for name in group]
    if weight.kind == "float32":  # files have convolutions as [channels, 1, taps], or without the 1
        shapes = [tuple(extent for extent in part if extent != 1) or (1,) for part in shapes]
    if weight.kind == "vector":  # norms of heads, as [heads, size]
        shapes = [(int(np.prod(part)),) if len(part) == 2 else part for part in shapes]
    rows = sum(part[0] if part else 0 for part in shapes)
    if weight.rows is not None and rows > shape[0]:
        rows = shape[0]
    if any(len(part) != len(shape) or part[1:] != shape[1:] for part in shapes) or rows != shape[0]:
        raise CheckpointError(
            f"tensor {', '.join(group)} has a different shape than config.json specifies",
            where=checkpoint.path,
            expected=f"{list(shape)} for {weight.name}",
            found=" + ".join(str(list(part)) for part in shapes),
        )


class Tensors(Protocol):
    """A checkpoint, or one with some tensors changed."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> NDArray[np.float32]: ...

    def read_parts(self, name: str) -> Parts: ...


def load(
    weight: Weight, checkpoint: Tensors, method: str, inputs: Mapping[str, Inputs] | None = None
) -> Iterator[tuple[str, Array, int]]:
    """Yield (name, array, checkpoint bytes read) for each stored array of one weight, quantized by `method`.

    `inputs` are those of matrices, by the name of the tensor.
    Raises CheckpointError for a value that the stored dtype cannot hold. Run `check_sources` first.
    """
    nbytes = sum(checkpoint.tensors[s].nbytes for group in weight.sources for s in group)
    known = inputs or {}
    if weight.experts is None:
        packed = _read(weight, weight.sources[0], checkpoint, method, known)
    else:
        packed, each = {}, len(weight.columns) // len(weight.sources)
        for i, group in enumerate(weight.sources):
            expert = replace(weight, columns=weight.columns[i * each : (i + 1) * each])
            for name, array in _read(expert, group, checkpoint, method, known).items():
                packed.setdefault(name, np.empty((len(weight.sources), *array.shape), array.dtype))[i] = array
    for name, array in packed.items():
        yield name, array, nbytes
        nbytes = 0


def schemes_of(weights: Iterable[Weight]) -> dict[str, Scheme]:
    """The storage scheme of the checkpoint's tensors of matrices."""
    several = ((source, one.scheme) for one in weights for group in one.sources for source in group)
    return {source: scheme for source, scheme in several if scheme is not None}


def read_matrices(weight: Weight, checkpoint: Checkpoint) -> Iterator[Array]:
    """Yield the numbers float32 of a matrix or vector, or the matrix of one expert after the other."""
    for group in weight.sources:
        yield _joined(group, checkpoint, weight)


def _read(
    weight: Weight, group: tuple[str, ...], checkpoint: Tensors, method: str, inputs: Mapping[str, Inputs]
) -> dict[str, Array]:
    """The stored arrays of a matrix, vector or expert."""
    stored = {checkpoint.tensors[name].dtype for name in group}
    if weight.scheme is None or stored != {weight.scheme.name}:
        return _stored(weight, _joined(group, checkpoint, weight), method, inputs.get(group[0]))
    parts = joined([checkpoint.read_parts(name) for name in group])
    if weight.order:
        parts = parts.map(lambda part: part[np.frombuffer(weight.order, np.int32)])
    if weight.rows is not None:
        parts = parts.map(lambda part: part[slice(*weight.rows or ())])
    return _laid_out(weight, weight.scheme, pack_parts(weight.scheme, parts.codes, parts.scales, parts.subs))


def restored(weight: Weight, arrays: Mapping[str, Array]) -> Array:
    """A matrix, float32 of its shape, from its stored arrays as `load` yields them."""
    assert weight.scheme is not None and weight.layout is not None
    stem, (n, k) = weight.name.removesuffix("weight"), weight.shape[-2:]
    packed = {name.removeprefix(stem): array for name, array in arrays.items()}
    return unpack(weight.scheme, weight.layout.unrepack(weight.scheme, packed, n, k), k)


def _joined(group: tuple[str, ...], checkpoint: Tensors, weight: Weight) -> Array:
    full = checkpoint.read(group[0])
    if len(group) > 1:
        parts = [full, *(checkpoint.read(name) for name in group[1:])]
        full = np.concatenate(parts)
    if weight.kind == "vector":
        full = full.reshape(-1)
    if weight.order:
        full = full[np.frombuffer(weight.order, np.int32)]
    if weight.rows is not None:
        full = full[slice(*weight.rows)]
    return full + np.float32(weight.add) if weight.add else full


def _stored(weight: Weight, full: Array, method: str, inputs: Inputs | None) -> dict[str, Array]:
    """Array as read -> arrays as stored: packed and laid out, or cast."""
    if weight.scheme is None or weight.layout is None:
        with np.errstate(over="ignore"):
            cast = full.astype(weight.dtype).reshape(weight.shape)
        if not np.isfinite(cast).all():
            raise CheckpointError(
                f"weight {weight.name} does not fit {weight.dtype}", found=f"{float(np.abs(full).max()):g}"
            )
        return {weight.name: cast}
    packed = pack(weight.scheme, full, name=weight.name, method=method, inputs=inputs)
    return _laid_out(weight, weight.scheme, packed)


def _laid_out(weight: Weight, scheme: Scheme, packed: Mapping[str, Array]) -> dict[str, Array]:
    """Packed arrays -> stored name -> array in the weight's layout."""
    assert weight.layout is not None
    n, k = weight.shape[-2:]
    stem = weight.name.removesuffix("weight")
    arrays = weight.layout.repack(scheme, packed, n, k)
    if weight.columns:
        arrays["q_columns"] = np.frombuffer(weight.columns, np.int32)
    return {stem + part: array for part, array in arrays.items()}
