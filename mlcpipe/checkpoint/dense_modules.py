"""The dense layers that sentence-transformers puts after the pooling, in folders such as `2_Dense`.

Their tensors become `dense.0.weight`, `dense.0.bias`, … of the checkpoint, and what their configurations say its field
`dense_modules`: a list of objects with `in_features`, `out_features`, `bias` and `activation`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlcpipe.checkpoint.checkpoint import DENSE_FOLDERS, SINGLE_FILE, Checkpoint
from mlcpipe.checkpoint.safetensors_reader import read_header
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.nn.config import Fields
from mlcpipe.support.json_files import read_json_object, shown_path

FIELD = "dense_modules"
_MAX_BYTES = 1 << 16
_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}


def with_dense(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the dense modules of its folder, or the same one.

    A checkpoint without tensors gets the field alone. Raises ConfigError and CheckpointError for broken modules.
    """
    if FIELD in checkpoint.config:
        raise ConfigError(f"field {FIELD}", where="config.json", expected="folders with dense layers instead")
    folders = [checkpoint.path / name for name in DENSE_FOLDERS if (checkpoint.path / name / "config.json").exists()]
    if not folders:
        return checkpoint
    config = {**checkpoint.config, FIELD: [_facts(folder) for folder in folders]}
    if not checkpoint.tensors:
        return replace(checkpoint, config=config)
    tensors, files = dict(checkpoint.tensors), []
    for i, (folder, facts) in enumerate(zip(folders, config[FIELD])):
        files.append(folder / SINGLE_FILE)
        found = {tensor.name: tensor for tensor in read_header(files[-1])}
        expected = {"linear.weight", *(["linear.bias"] if facts["bias"] else [])}
        if found.keys() != expected:
            raise CheckpointError(
                "tensors of a dense layer", where=shown_path(files[-1]), expected=", ".join(sorted(expected)),
                found=", ".join(sorted(found))[:80],
            )  # fmt: skip
        named = {f"dense.{i}.{name.removeprefix('linear.')}": tensor for name, tensor in found.items()}
        tensors |= {name: replace(tensor, name=name) for name, tensor in named.items()}
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    return replace(checkpoint, config=config, tensors=ordered, weight_files=(*checkpoint.weight_files, *files))


def _facts(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    fields = Fields(read_json_object(file, limit=_MAX_BYTES, error=ConfigError), f"{folder.name}/config.json")
    activation = fields.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            "field activation_function", where=fields.where, expected=" or ".join(_ACTIVATIONS),
            found=repr(activation)[:80],
        )  # fmt: skip
    return {
        "in_features": fields.integer("in_features"),
        "out_features": fields.integer("out_features"),
        "bias": fields.flag("bias", True),
        "activation": _ACTIVATIONS[activation],
    }
