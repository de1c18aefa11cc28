"""Finds where a model first computed NaN or infinity, after the compiled sampler found some in its logits.

The states record the run: a layer writes its keys and values before its attention and MLP, and numbers that are not
finite stay so in all layers above. So the lowest layer whose state has such numbers is the place to look; if no state
has any, they appeared after the last layer's.
It pays once a model has failed: damaged weights, or float16 that overflows, in a layer that the error then names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.bundle.states import State, group_of
from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from tir_schedules.step_layout import PAGE

if TYPE_CHECKING:
    from mlcpipe.runtime.serving.executor import Executor
    from mlcpipe.runtime.serving.sequence import Sequence as Tokens

# Of each state, the parts whose numbers may be NaN: keys and values, or their scales where they are quantized.
Found = Iterator[tuple[State, Iterator[tuple[str, NDArray[Any]]]]]


def compute_error(bundle: LoadedBundle, states: Callable[[], Found]) -> ComputeError:
    """The error for a sequence whose logits are not finite, and which has these states.

    Reads all weights and the whole cache: seconds, where there are gigabytes.
    """
    what, model = "the model computed numbers that are not finite", bundle.manifest.model
    if (name := _damaged_weight(bundle)) is not None:
        found = f"NaN or infinity in the weight {name}"
        return ComputeError(what, found=found, next_step="get the checkpoint again and compile it")
    first = next(_bad(states()), None)
    if first is None:
        where = f"layer {model.num_layers - 1}, the last, after its keys and values, or in the logits"
        return ComputeError(what, where=where, next_step=_advice(bundle, overflowed=False))
    layer, nan, kind = first
    found, where = "NaN" if nan else "infinity", f"the {kind} of layer {layer}"
    return ComputeError(what, where=where, found=found, next_step=_advice(bundle, overflowed=not nan))


def _advice(bundle: LoadedBundle, *, overflowed: bool) -> str:
    """The next step. `overflowed`: the first layer has infinity, which NaN of the layer before would have hidden."""
    model = bundle.manifest.model
    if model.dtype == "float16":
        return "compile the model for a --target with float32 activations"
    if model.kv_dtype == "float16" and overflowed:
        return "compile the model with --kv-cache-dtype f32"
    damaged = "the checkpoint is damaged or needs a wider range than float32"
    return damaged if bundle.on_host else f"compare with --device cpu: if it fails there too, {damaged}"


def _bad(found: Found) -> Iterator[tuple[int, bool, str]]:
    """(layer, whether it has NaN but no infinity, "keys" or the like) of each state that has any, infinity first."""
    for state, parts in found:
        bad = {name: numbers for name, numbers in parts if not np.isfinite(numbers).all()}
        if bad:
            yield min((state.layers[0], not np.isinf(numbers).any(), name) for name, numbers in bad.items())


def of_states(states: Sequence[State], executor: Executor, sequence: Tokens) -> Found:
    """The states of a sequence, including those that the running step has written."""
    length = len(sequence.tokens)
    for index, state in enumerate(states):
        if state.kind == "slot":
            slot = sequence.slot if sequence.next_slot < 0 else sequence.next_slot
            first, ids = 0, [slot] if slot >= 0 else []
        else:
            group = group_of(states, state)
            first = sequence.kept_from[group]
            ids = list(sequence.tables[group][first : -(-length // PAGE)])
        yield state, _floats(state, executor.read_units(index, ids), length - first * PAGE)


def _floats(state: State, units: NDArray[np.int8], tokens: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """(part, its numbers) of units int8[n, unit_bytes]; of pages, those of the first `tokens` tokens."""
    begin, copies = 0, units.reshape(len(units), state.copies, -1)
    for part in state.parts:
        if part.dtype != "int8":
            data = copies[:, :, begin : begin + part.nbytes].copy().view(part.dtype)
            numbers = data.reshape(len(units), state.copies, *part.shape)
            if part.token_axis is not None:
                by_token = np.moveaxis(numbers, 2 + part.token_axis, 1)
                numbers = by_token.reshape(len(units) * PAGE, -1)[:tokens]
            yield part.name, numbers
        begin += part.nbytes


def _damaged_weight(bundle: LoadedBundle) -> str | None:
    """The first weight, or scale of a quantized one, that has NaN or infinity."""
    each = ((part, info, tensor) for part in bundle.parts for info, tensor in zip(part.manifest.params, part.params))
    for part, info, tensor in each:
        if info.dtype.startswith("float"):
            table = part.tables.get(info.name)
            numbers = tvm_runtime.array(part.device.read(tensor)) if table is None else table
            # With a NaN, the largest and the smallest number are NaN.
            if numbers.size and not np.isfinite([numbers.max(), numbers.min()]).all():
                return info.name
    return None
