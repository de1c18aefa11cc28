"""Removes the layers that change the direction of hidden states least: Block Influence of ShortGPT.

For a layer with input x and output y it is 1 - the mean of cos(x, y) (Men et al. 2024, arXiv:2403.03853).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.pruning.work import Array, PrunedTensor, Work, smallest

GRAM, UNITS = False, "layers"


def allowed(model: CausalLM) -> range:
    """All numbers."""
    return range(1, model.facts.num_layers + 1)


def pruned(work: Work) -> Iterator[PrunedTensor]:
    """See the package."""
    influence = np.array([_influence(work, index) for index in work.layers()])
    kept = np.flatnonzero(~smallest(influence, len(influence) - work.keep)).tolist()
    work.config["num_hidden_layers"] = work.keep
    windows = [of.window for of in work.model.attentions()]
    if "layer_types" in work.config or len(set(windows)) > 1:
        kinds = ("full_attention", "sliding_attention")
        work.config["layer_types"] = [kinds[windows[index] is not None] for index in kept]
    for index, old in enumerate(kept):
        names = work.names(old)
        yield from (PrunedTensor(work.prefix(index) + name.removeprefix(work.prefix(old)), name) for name in names)
    yield from work.others()


def _influence(work: Work, index: int) -> float:
    before = list(work.stream.hidden)
    work.stream.run(index, work.checkpoint, observe=False)
    return 1 - float(np.concatenate([_cosines(*pair) for pair in zip(before, work.stream.hidden)]).mean())


def _cosines(x: Array, y: Array) -> Array:
    """The cosine of each pair of rows of float32[n, hidden]."""
    sizes = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    found: Array = np.einsum("nk,nk->n", x, y) / np.maximum(sizes, np.finfo(np.float32).tiny)
    return found
