"""Opens a checkpoint: a folder in Hugging Face's layout, one safetensors file or several shards; or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE_FILE,
    Checkpoint,
    read_config,
)
from mlcpipe.checkpoint.dense_modules import with_dense
from mlcpipe.checkpoint.expert_stacks import unstacked
from mlcpipe.checkpoint.flat_convolutions import flat_convolutions
from mlcpipe.checkpoint.gguf import SUFFIX, is_gguf, open_gguf
from mlcpipe.checkpoint.gguf.mmproj import with_mmproj
from mlcpipe.checkpoint.latent import split_latent
from mlcpipe.checkpoint.misplaced import no_checkpoint, no_path
from mlcpipe.checkpoint.own_head import with_own_head
from mlcpipe.checkpoint.quantized import quantized
from mlcpipe.checkpoint.remote_code import known
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, check_name, read_header
from mlcpipe.checkpoint.text_tower import text_tower
from mlcpipe.checkpoint.tied import settled
from mlcpipe.checkpoint.turned import upright
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import read_json_object, shown, shown_path

MAX_INDEX_BYTES = 32 << 20  # 140,000 tensors take 14 MB


# What files have otherwise than models, one after the other.
_AS_MODELS_NAME_IT: tuple[Callable[[Checkpoint], Checkpoint], ...] = (
    text_tower, flat_convolutions, known, quantized, unstacked, upright, split_latent, with_dense, settled,
    with_own_head,
)  # fmt: skip


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint folder or a GGUF file, and checks its configuration, index and every header.

    A GGUF model has the tower of the mmproj file beside it, if one fits. Reads no weights except GPTQ's zero points and
    a head that may be the embedding. `model.safetensors` takes precedence over an index, as in transformers. Raises
    CheckpointError for the folder and the weights, ConfigError for config.json, generation_config.json and GGUF's
    metadata.
    """
    folder = Path(path)
    if not folder.is_dir():
        if (folder.suffix == SUFFIX and folder.exists()) or is_gguf(folder):
            return with_own_head(split_latent(with_mmproj(open_gguf(folder))))
        raise no_path(folder)
    if not os.path.lexists(folder / CONFIG):
        raise no_checkpoint(folder)
    config = read_config(folder / CONFIG)
    generation = folder / GENERATION_CONFIG
    generation_config = read_config(generation) if os.path.lexists(generation) else {}
    if (folder / SINGLE_FILE).exists():
        files: tuple[Path, ...] = (folder / SINGLE_FILE,)
        tensors = _gather(files)
    elif (folder / INDEX).exists():
        weight_map = read_weight_map(folder / INDEX)
        files = tuple(folder / name for name in sorted(set(weight_map.values())))
        tensors = _gather(files)
        _check_weight_map(weight_map, tensors, folder)
    else:
        raise no_checkpoint(folder)
    if not tensors:
        raise CheckpointError("no tensors", where=shown_path(folder), expected="at least one", found="none")
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    whole = Checkpoint(folder, config, generation_config, ordered, files)
    for read in _AS_MODELS_NAME_IT:
        whole = read(whole)
    return whole


def _gather(files: tuple[Path, ...]) -> dict[str, TensorInfo]:
    """Tensors of all shards, including those missing from the index, as in transformers."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in read_header(file):
            earlier = tensors.setdefault(tensor.name, tensor)
            if earlier is not tensor:
                raise CheckpointError(
                    f"tensor {shown(tensor.name)} is stored twice",
                    where=shown_path(file.parent),
                    expected="one shard with this tensor",
                    found=f"{shown(earlier.file.name)} and {shown(file.name)}",
                    next_step="download the checkpoint again",
                )
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file. A shard is a plain file name: nothing outside the folder is opened."""
    where = shown_path(index)
    weight_map = read_json_object(index, limit=MAX_INDEX_BYTES, error=CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "no weight_map",
            where=where,
            expected="an object from tensor names to shard files",
            found=shown(weight_map),
            next_step="download the index again",
        )
    for shard in {value if isinstance(value, str) else None for value in weight_map.values()}:
        if shard is None or not _is_plain_shard_name(shard):
            raise CheckpointError(
                "the index names a shard that is not allowed",
                where=where,
                expected="a *.safetensors file name without folders",
                found=shown(shard) if shard is not None else "a value that is not a string",
                next_step="do not trust this checkpoint; download it from its author",
            )
    return {check_name(name, where): shard for name, shard in weight_map.items()}


def _is_plain_shard_name(name: str) -> bool:
    allowed = name.isprintable() and not any(character in name for character in "/\\:")
    return allowed and name.endswith(".safetensors") and len(name) <= 255 and not name.startswith(".")


def _check_weight_map(weight_map: dict[str, str], tensors: dict[str, TensorInfo], folder: Path) -> None:
    """An index may name tensors that no shard has, such as a tied head; reading such a tensor fails later."""
    for name, shard in weight_map.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.file.name != shard:
            raise CheckpointError(
                f"the index assigns tensor {shown(name)} to a shard that does not contain it",
                where=shown_path(folder),
                expected=shown(shard),
                found=shown(tensor.file.name),
                next_step="download the checkpoint again",
            )
