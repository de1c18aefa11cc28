"""Gemma 4's assistants: a few layers that read the model's keys, in files as transformers' `gemma4_assistant` has them.

Published ones are google/gemma-4-E2B-it-assistant and its siblings; tensors are `pre_projection`, `post_projection`,
`model.*` of layers without keys, and of small models `masked_embedding.*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import CONFIG, Checkpoint, DraftHead
from mlcpipe.checkpoint.draft_heads.files import HeadFiles
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.json_files import shown, shown_path

PREFIX = "assistant."  # of the tensors' names in the model
TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
MAX_CENTROIDS = 1 << 14
_MARK = "pre_projection.weight"
_CENTROIDS, _ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantHead(DraftHead):
    """`config` is that of its layers. `clusters` i32[V]: the cluster of each token, of the `chosen` best of which
    tokens are guessed; None: all are.
    """

    config: Mapping[str, Any]
    clusters: NDArray[np.int32] | None
    centroids: int
    chosen: int


def read_assistant(files: HeadFiles, checkpoint: Checkpoint) -> AssistantHead | None:
    """The assistant in a folder; None if there is none. Raises CheckpointError and ConfigError for another model's."""
    if _MARK not in files.tensors:
        return None
    where, outer = f"{shown_path(files.path)} {CONFIG}", files.config
    if outer.get("model_type") not in TYPES:
        expected = " or ".join(TYPES)
        raise ConfigError("field model_type", where=where, expected=expected, found=shown(outer.get("model_type")))
    config = outer.get("text_config")
    if not isinstance(config, dict):
        raise ConfigError("field text_config", where=where, expected="an object", found=shown(config))
    for name, own, value in (
        ("backbone_hidden_size", "hidden_size", outer.get("backbone_hidden_size", 1536)),
        ("vocab_size", "vocab_size", config.get("vocab_size")),
    ):
        if (known := checkpoint.config.get(own)) != value:
            raise ConfigError(
                f"field {name}", where=where, expected=f"{known}, the model's {own}", found=shown(value),
                next_step="take the assistant that was made for this model",
            )  # fmt: skip
    tensors = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    order, clusters, count, chosen = tensors.pop(_ORDER, None), None, 0, 0
    if outer.get("use_ordered_embeddings") is True:
        count = _count(outer, "num_centroids", 2048, MAX_CENTROIDS, where)
        chosen = _count(outer, "centroid_intermediate_top_k", 32, count, where)
        clusters = _clusters(order, int(config["vocab_size"]), count, where)
        tensors = {"centroids.weight" if name == _CENTROIDS else name: one for name, one in tensors.items()}
    elif order is not None:
        raise ConfigError("field use_ordered_embeddings", where=where, expected=f"true, with {_ORDER}", found="not so")
    named = {PREFIX + name: tensor for name, tensor in tensors.items()}
    own_files = (files.path / CONFIG, *files.files)
    return AssistantHead(files.path, own_files, named, {**config}, clusters, count, chosen)


def _count(values: Mapping[str, Any], name: str, default: int, most: int, where: str) -> int:
    value = values.get(name, default)
    if type(value) is not int or not 1 <= value <= most:
        raise ConfigError(f"field {name}", where=where, expected=f"an integer from 1 to {most}", found=shown(value))
    return value


def _clusters(order: TensorInfo | None, vocab: int, count: int, where: str) -> NDArray[np.int32]:
    """The cluster of each token: each has as many, one after the other in `order`."""
    good = order is not None and order.dtype in ("int64", "int32") and order.shape == (vocab,) and vocab % count == 0
    if order is None or not good:
        raise CheckpointError(
            f"tensor {_ORDER}", where=where, expected=f"int64 [{vocab}], {count} equal clusters",
            found="none" if order is None else f"{order.dtype} {list(order.shape)}",
        )  # fmt: skip
    tokens = np.frombuffer(read_bytes(order), "<i8" if order.dtype == "int64" else "<i4")
    if not np.array_equal(np.sort(tokens), np.arange(vocab)):
        expected = f"each token below {vocab} once"
        raise CheckpointError(f"tensor {_ORDER}", where=where, expected=expected, found="others")
    clusters = np.empty(vocab, np.int32)
    clusters[tokens] = np.repeat(np.arange(count, dtype=np.int32), vocab // count)
    return clusters
