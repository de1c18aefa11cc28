"""Checkpoints whose weights are not here yet: what a hub's small files say, to be judged before a download."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mlcpipe.checkpoint.checkpoint import CONFIG, GENERATION_CONFIG, Checkpoint, read_config
from mlcpipe.checkpoint.dense_modules import with_dense
from mlcpipe.checkpoint.gguf.checkpoint import GgufCheckpoint, open_gguf
from mlcpipe.checkpoint.gguf.families import ROPE_FACTORS
from mlcpipe.checkpoint.gguf.header import parse_header
from mlcpipe.checkpoint.gguf.mmproj import with_mmproj
from mlcpipe.checkpoint.quantized import without_quantization
from mlcpipe.checkpoint.remote_code import known
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.checkpoint.text_tower import text_tower
from mlcpipe.checkpoint.transfer import RemoteFile, read_range
from mlcpipe.errors import CheckpointError, ConfigError, naming

_NO_TENSORS: Mapping[str, TensorInfo] = MappingProxyType({})
_MAX_FACTOR_BYTES = 1 << 16


@dataclass(frozen=True)
class Download:
    """What is to be downloaded: bytes, and the folder where they are stored."""

    folder: Path
    nbytes: int


def config_preview(folder: Path) -> Checkpoint:
    """A folder of safetensors by its configuration: `tensors` and `weight_files` are empty. Raises ConfigError."""
    generation = folder / GENERATION_CONFIG
    generation_config = read_config(generation) if generation.exists() else {}
    config = read_config(folder / CONFIG)
    whole = Checkpoint(folder, config, generation_config, _NO_TENSORS, ())
    return with_dense(without_quantization(known(text_tower(whole))))


@contextmanager
def gguf_preview(parts: Sequence[RemoteFile], title: object, tower: RemoteFile | None = None) -> Iterator[Checkpoint]:
    """A model in GGUF by the headers of its parts and its tower, which are fetched; errors call it `title`.

    Its data are zeros, rope factors aside. A tower that is damaged or does not fit is left out. Raises CheckpointError
    and ConfigError as `open_checkpoint`, and what `read_range` raises.
    """
    with tempfile.TemporaryDirectory(prefix="mlcpipe-header-") as folder:
        copies = [Path(folder) / Path(part.name).name for part in parts]
        with naming(title, *copies):
            for part, copy in zip(parts, copies):
                with copy.open("wb") as file:
                    file.truncate(part.size)
                header = parse_header(_Copied(part, copy), part.size, copy)
                for tensor in header.tensors:
                    if tensor.name in ROPE_FACTORS and tensor.nbytes <= _MAX_FACTOR_BYTES:
                        _copy(part, copy, tensor.offset, tensor.nbytes)
            opened = open_gguf(copies[0])
            if tower is not None:
                opened = _with_tower(opened, tower, Path(folder) / Path(tower.name).name)
        yield opened


def _with_tower(model: GgufCheckpoint, tower: RemoteFile, copy: Path) -> GgufCheckpoint:
    with copy.open("wb") as file:
        file.truncate(tower.size)
    try:
        parse_header(_Copied(tower, copy), tower.size, copy)
        return with_mmproj(model, copy)
    except (CheckpointError, ConfigError):
        return model


class _Copied(io.RawIOBase):
    """Reads a hub's file from its start, and copies what it reads into a file with holes."""

    def __init__(self, remote: RemoteFile, copy: Path) -> None:
        self._remote, self._copy, self._at = remote, copy, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # type: ignore[override]
        content = _copy(self._remote, self._copy, self._at, len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _copy(remote: RemoteFile, copy: Path, start: int, count: int) -> bytes:
    """Bytes of a hub's file, written to the same place of its copy."""
    content = read_range(remote, start, count)
    with copy.open("r+b") as file:
        file.seek(start)
        file.write(content)
    return content
