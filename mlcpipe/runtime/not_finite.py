"""Where a model first computed NaN or infinity, once the compiled sampler has said that its logits have some.

The keys and values in the cache are the record of the run: a layer writes its own before its attention and MLP, and
what is not finite stays so in all layers above. So the lowest layer with such keys or values is where to look; where
no layer has any, it came after the last one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.devices.support import tvm_runtime
from mlcpipe.errors import ComputeError
from mlcpipe.runtime.loading import LoadedBundle
from tir_schedules.step_layout import ITEM_BITS, QUANTIZED

Layers = Iterator[dict[str, NDArray[Any]]]  # "keys" and "values" of a layer: where they are quantized, their scales


def compute_error(bundle: LoadedBundle, cached: Callable[[], Layers]) -> ComputeError:
    """The error for a sequence whose logits are not finite and whose keys and values `cached` gives.

    Reads all weights and the whole cache: seconds, where there are gigabytes.
    """
    what, model = "the model computed numbers that are not finite", bundle.manifest.model
    if (name := _damaged_weight(bundle)) is not None:
        found = f"NaN or infinity in the weight {name}"
        return ComputeError(what, found=found, next_step="get the checkpoint again and compile it")
    first = next(_bad_layers(cached()), None)
    if first is None:
        where = f"layer {model.num_layers - 1}, the last, after its keys and values, or in the logits"
        return ComputeError(what, where=where, next_step=_advice(bundle, overflowed=False))
    layer, nan, kind = first
    found, where = "NaN" if nan else "infinity", f"the {kind} of layer {layer}"
    return ComputeError(what, where=where, found=found, next_step=_advice(bundle, overflowed=not nan))


def _advice(bundle: LoadedBundle, *, overflowed: bool) -> str:
    """What may help; `overflowed`: the first layer has infinity, which NaN of the layer before would have hidden."""
    model = bundle.manifest.model
    if model.dtype == "float16":
        return "compile the model for a --target with float32 activations"
    if model.kv_dtype == "float16" and overflowed:
        return "compile the model with --kv-cache-dtype f32"
    damaged = "the checkpoint is damaged or needs a wider range than float32"
    return damaged if bundle.device.on_host else f"compare with --device cpu: if it fails there too, {damaged}"


def _bad_layers(layers: Layers) -> Iterator[tuple[int, bool, str]]:
    """(layer, whether it has NaN but no infinity, "keys" or "values") of each layer that has any, infinity first."""
    for layer, parts in enumerate(layers):
        bad = {kind: numbers for kind, numbers in parts.items() if not np.isfinite(numbers).all()}
        if bad:
            yield min((layer, not np.isinf(numbers).any(), kind) for kind, numbers in bad.items())


def of_pages(bundle: LoadedBundle, pages: Sequence[Any], tables: Sequence[Sequence[int]], length: int) -> Layers:
    """What the pages int8[P, page_bytes] of each layer have of the first `length` tokens of a sequence.

    `tables` have for each layer the page of each 16 tokens, or -1. A page holds for each KV head K [head_dim, 16] and
    V [16, head_dim]; where they are quantized their codes, and the scales [groups, 16] of K and of V.
    """
    model = bundle.manifest.model
    heads, size, dim = model.num_key_value_heads, model.page_size, model.head_dim
    count = -(-length // size)
    for layer, table in zip(pages, tables):
        ids = np.array(table[:count])
        data = (tvm_runtime.array(bundle.device.read(layer))[ids] * (ids >= 0)[:, None]).reshape(count, heads, -1)
        if model.kv_dtype in QUANTIZED:
            scales = data[..., 2 * size * dim * ITEM_BITS[model.kv_dtype] // 8 :].copy().view(np.float16)
            keys, values = np.split(scales.reshape(count, heads, -1, size), 2, axis=2)
        else:
            keys, values = np.split(data.view(model.kv_dtype), 2, axis=-1)
            keys = keys.reshape(count, heads, -1, size)
            values = values.reshape(count, heads, size, -1).swapaxes(2, 3)
        tokens = ((kind, part.transpose(0, 3, 1, 2)) for kind, part in (("keys", keys), ("values", values)))
        yield {kind: part.reshape(count * size, -1)[:length] for kind, part in tokens}


def _damaged_weight(bundle: LoadedBundle) -> str | None:
    """The first weight, or scale of a quantized one, that has NaN or infinity."""
    for info, tensor in zip(bundle.manifest.params, bundle.params):
        if info.dtype.startswith("float"):
            numbers = tvm_runtime.array(bundle.device.read(tensor))
            # NaN is the largest and the smallest where there is one.
            if numbers.size and not np.isfinite([numbers.max(), numbers.min()]).all():
                return info.name
    return None
