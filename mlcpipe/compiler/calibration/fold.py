"""Factors folded from the columns of matrices into what makes their input: the function of the model stays.

y = (x / s) (W s)^T for any factors s of columns: a norm's weights, or the rows of the matrix before, are divided by s
(SmoothQuant, Xiao et al. 2022). Outliers of x, which spoil the rounding of their neighbours in a group, become smaller.
Tensors change as they are read, before they are joined, split or reordered, so that no pass and no kernel knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.relax.frontend import nn

from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.mlp import FusedGatedMLP, GatedMLP
from mlcpipe.nn.short_conv import ShortConv

Array = NDArray[Any]


@dataclass(frozen=True)
class Fold:
    """Factors for the columns of `consumers`; the rows of `producers` from `begin` on are divided by them.

    Producers are vectors or matrices; `add` is added to them when they are read. Of `heads` (kv_heads, query heads of
    each, head_dim) those that read the same rows share factors. `norm` is the norm that is the producer, or whose
    output it multiplies, "" for none; `gate` the matrix whose first rows make what the rows are multiplied by.
    """

    consumers: tuple[str, ...]
    producers: tuple[str, ...]
    begin: int = 0
    add: float = 0.0
    heads: tuple[int, int, int] | None = None
    norm: str = ""
    gate: str = ""

    @property
    def of_norm(self) -> bool:
        """Whether the norm itself is the producer."""
        return bool(self.norm) and self.producers[0].startswith(f"{self.norm}.")


def folds_of(layer: nn.Module) -> Iterator[Fold]:
    """The foldable pairs of a layer, by parameter names. Experts are unchanged."""
    form, name, mlp = layer.form, layer.mixer_name, layer.mlp
    mixer, simple = getattr(layer, name), isinstance(mlp, GatedMLP | FusedGatedMLP)
    inner = [f"mlp.{one}" for one in mlp.inner] if simple else []
    if isinstance(mixer, Attention):
        spec = mixer.spec
        readers = ["qkv_proj"] if spec.fused else ["q_proj", "k_proj", "v_proj"][: 2 if spec.keys_as_values else 3]
        if _foldable(layer, form.before_mixer) and not form.parallel:
            gate = ["gate_proj"] if spec.gate in ("element", "head") else []
            yield _of_norm(layer, form.before_mixer, [f"{name}.{one}" for one in (*readers, *gate)])
        heads = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.value_size)
        begin = spec.q_size + spec.kv_size if spec.fused else 0
        changed_before_o = spec.clip or spec.sub_norm or spec.value_norm or spec.keys_as_values or spec.latent
        if spec.fused != "groups" and not changed_before_o:
            makers = _parameters(mixer, name, readers[-1])
            yield Fold((f"{name}.o_proj.weight",), makers, begin, heads=heads, norm=form.before_mixer)
    if isinstance(mixer, ShortConv) and _foldable(layer, form.before_mixer):
        yield _of_norm(layer, form.before_mixer, [f"{name}.in_proj"])
    if simple:
        if _foldable(layer, form.before_mlp):
            yield _of_norm(layer, form.before_mlp, inner)
        begin = int(mlp.down_proj.weight.shape[1]) if isinstance(mlp, FusedGatedMLP) else 0
        if getattr(mlp, "sub_norm", None) is None:
            makers = _parameters(mlp, "mlp", mlp.inner[-1])
            norm = form.before_mixer if form.parallel and not form.before_mlp else form.before_mlp
            yield Fold(("mlp.down_proj.weight",), makers, begin, norm=norm, gate=f"{inner[0]}.weight")


def _foldable(layer: nn.Module, norm: str) -> bool:
    """Whether there is such a norm, with weights, whose output only matrices read."""
    return bool(norm) and layer.form.of_norms is None and getattr(layer, norm).weight is not None


def _of_norm(layer: nn.Module, norm: str, readers: Sequence[str]) -> Fold:
    of = getattr(layer, norm)
    vectors = tuple(f"{norm}.{one}" for one in ("weight", "bias") if getattr(of, one, None) is not None)
    consumers = tuple(f"{reader}.weight" for reader in readers)
    return Fold(consumers, vectors, add=float(of.weight.attrs.get("add", 0.0)), norm=norm)


def _parameters(block: nn.Module, name: str, linear: str) -> tuple[str, ...]:
    """The weight of a linear layer, and its bias if it has one."""
    bias = getattr(block, linear).bias is not None
    return tuple(f"{name}.{linear}.{part}" for part in ("weight", "bias")[: 1 + bias])


@dataclass(frozen=True, eq=False)
class _Change:
    """Columns times `factors`, or rows from `begin` on divided by them, with `add` added meanwhile."""

    factors: Array
    columns: bool = False
    begin: int = 0
    add: float = 0.0

    def apply(self, tensor: Array) -> None:
        """Change a tensor in place."""
        if self.columns:
            tensor *= self.factors
            return
        part, add = tensor[self.begin : self.begin + len(self.factors)], np.float32(self.add)
        part += add
        part /= self.factors if part.ndim == 1 else self.factors[:, None]
        part -= add


class Folded:
    """The tensors of a checkpoint of plain numbers, with factors folded in."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.tensors = checkpoint, checkpoint.tensors
        self._changes: dict[str, list[_Change]] = {}

    @property
    def changed(self) -> frozenset[str]:
        """The names of changed tensors."""
        return frozenset(self._changes)

    def fold(self, fold: Fold, named: Callable[[str], str], factors: Array) -> None:
        """Fold factors float32[K]; `named` gives the checkpoint's name of a parameter."""
        for name in map(named, fold.consumers):
            self._changes.setdefault(name, []).append(_Change(factors, columns=True))
        rows = factors if fold.heads is None else factors.reshape(fold.heads)[:, 0].ravel()
        for producer in fold.producers:
            add = fold.add if producer.endswith("weight") else 0.0
            self._changes.setdefault(named(producer), []).append(_Change(rows, begin=fold.begin, add=add))

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor, changed or not, float32."""
        tensor = self._checkpoint.read(name)
        for change in self._changes.get(name, ()):
            change.apply(tensor)
        return tensor

    def read_parts(self, name: str) -> Parts:
        """Those of a tensor without changes: which have none."""
        return self._checkpoint.read_parts(name)
