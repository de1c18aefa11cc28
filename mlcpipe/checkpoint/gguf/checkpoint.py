"""A GGUF file as a checkpoint: tensors under Hugging Face's names, configuration and tokenizer from the metadata."""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import CONFIG, GENERATION_CONFIG, Checkpoint, printable_name
from mlcpipe.checkpoint.content_hash import hash_files
from mlcpipe.checkpoint.gguf.blocks import FORMATS, chunks
from mlcpipe.checkpoint.gguf.families import GgufTensor, family_of, numbers_of_layers, renamed
from mlcpipe.checkpoint.gguf.made_tensors import MadeTensor
from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.native_formats import PARTS
from mlcpipe.checkpoint.gguf.shards import read_shards
from mlcpipe.checkpoint.gguf.special_tokens import end_ids, token_id
from mlcpipe.checkpoint.gguf.vocabulary import tokenizer_files
from mlcpipe.checkpoint.matrix import Matrix
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_chunks, read_float32
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

_RECOMMENDED = "general.sampling."
# Name in generation_config.json -> name in the file.
_SAMPLING = {
    **{name: name for name in ("top_k", "top_p", "min_p")},
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True)
class GgufCheckpoint(Checkpoint):
    """An opened GGUF model. `config` and `generation_config` are made from the metadata, and so are the texts."""

    metadata: Metadata = field(kw_only=True)

    @property
    def name(self) -> str | None:
        """The model's name in the metadata, else that of the file."""
        name = self.metadata.values.get("general.name")
        return printable_name(name if isinstance(name, str) and name.strip() else self.path.stem)

    @cached_property
    def folder(self) -> Path:
        """A temporary folder with the configuration and the tokenizer, deleted with this object."""
        texts = {CONFIG: json.dumps(self.config), GENERATION_CONFIG: json.dumps(self.generation_config)}
        texts |= tokenizer_files(self.metadata)
        folder = Path(tempfile.mkdtemp(prefix="mlcpipe-gguf-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder

    @property
    def quantized_as(self) -> str | None:
        """The block format with the most bytes; None if all tensors are float32, float16 or bfloat16."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype in FORMATS:
                sizes[tensor.dtype] += tensor.nbytes
        return sizes.most_common(1)[0][0] if sizes else None

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor `name` as a new float32 array, dequantized exactly, checked to be finite."""
        return self._numbers(self.info(name))

    def _numbers(self, tensor: TensorInfo) -> NDArray[np.float32]:
        if isinstance(tensor, MadeTensor):
            return np.ascontiguousarray(tensor.make([self._numbers(part) for part in tensor.parts])).reshape(
                tensor.shape
            )
        if tensor.turned:
            stored = replace(tensor, shape=tensor.shape[::-1], turned=False)
            return np.ascontiguousarray(self._numbers(stored).T)
        if isinstance(tensor, GgufTensor) and tensor.value is not None:
            return np.array([tensor.value], np.float32)
        if isinstance(tensor, Matrix) and tensor.values is not None:
            return tensor.values()
        values = read_chunks(tensor, chunks) if tensor.dtype in FORMATS else read_float32(tensor)
        if not isinstance(tensor, GgufTensor):
            return values
        values = tensor.in_order(values)
        if tensor.negative_exp:
            if not (values < 0).all():
                raise CheckpointError(
                    f"tensor {shown(tensor.name)} has numbers that no decay has", where=shown_path(self.path),
                    expected="numbers below 0", next_step="the file is damaged: download it again",
                )  # fmt: skip
            values = np.log(-values)
        if tensor.add:
            values += np.float32(tensor.add)
        return values

    def read_parts(self, name: str) -> Parts:
        tensor = self.info(name)
        if isinstance(tensor, Matrix):
            return tensor.parts()
        split = PARTS.get(tensor.dtype)
        if split is None:
            return super().read_parts(name)
        blocks = np.frombuffer(self.read_raw(name), np.uint8).reshape(-1, FORMATS[tensor.dtype].nbytes)
        parts = split(blocks).map(lambda part: part.reshape(tensor.shape[0], -1))
        if not parts.finite:
            raise CheckpointError(
                f"tensor {shown(name)} is not finite", where=shown_path(self.path), expected="finite scales",
                next_step="the file is damaged: download it again",
            )  # fmt: skip
        return parts.map(tensor.in_order) if isinstance(tensor, GgufTensor) else parts

    def content_hash(self, cache_dir: Path | None = None) -> str:
        """sha256 (hex) over names, sizes and content of the model's files."""
        towers = () if self.pictures is None else self.pictures.files
        return hash_files((*self.weight_files, *towers, *self._head_files), cache_dir)


def open_gguf(path: Path) -> GgufCheckpoint:
    """Opens a GGUF model, split or not, and checks its header; of the data it reads only rope factors.

    Raises CheckpointError for the file, ConfigError for its metadata and TokenizerError for types of tokens.
    """
    header, files = read_shards(path)
    if not header.tensors:
        raise CheckpointError("no tensors", where=shown_path(path), expected="at least one", found="none")
    by_name = {tensor.name: tensor for tensor in header.tensors}
    family, config = family_of(header.metadata, by_name)
    tensors: dict[str, GgufTensor] = {}
    stored = numbers_of_layers(header.metadata, family, config, path)
    for tensor in chain(renamed(by_name, family, config), stored):
        if tensors.setdefault(tensor.name, tensor) is not tensor:
            raise CheckpointError(f"tensor {shown(tensor.name)} is stored twice", where=shown_path(path))
    config["bos_token_id"] = token_id(header.metadata, "bos")
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    return GgufCheckpoint(path, config, generation_of(header.metadata), ordered, files, metadata=header.metadata)


def generation_of(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: the tokens that end an answer, and the file's recommended sampling.

    Settings without a name there keep their own, so that the report can say they are not honoured.
    """
    ends = end_ids(metadata)
    found: dict[str, Any] = {"eos_token_id": ends} if ends else {}
    for name, stored in _SAMPLING.items():
        key = f"{_RECOMMENDED}{stored}"
        if key in metadata.values:
            value = metadata.number(key)
            found[name] = int(value) if name == "top_k" and value.is_integer() else value
    others = {key.removeprefix(_RECOMMENDED): key for key in metadata.values if key.startswith(_RECOMMENDED)}
    values = {name: metadata.values[key] for name, key in others.items() if name not in _SAMPLING.values()}
    return found | {name: value for name, value in values.items() if isinstance(value, int | float | str) and value}
