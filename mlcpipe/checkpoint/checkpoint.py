"""An opened checkpoint: its configuration, and its tensors by their names in Hugging Face's layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.content_hash import hash_files
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo, read_bytes, read_float32
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.defaults import DEFAULT_QUANTIZATION, KEEP
from mlcpipe.support.json_files import read_json_object, shown, shown_path
from mlcpipe.vision import VIDEO_PROCESSOR

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# Of pictures, and of videos: newer files have both in the second one, as `image_processor` and `video_processor`.
PROCESSOR_CONFIGS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
TEMPLATES = "additional_chat_templates"  # a folder
# Of sentence-transformers: pooling and prompts of embeddings.
DENSE_FOLDERS = ("2_Dense", "3_Dense")
EMBEDDING_FILES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    *(f"{folder}/{name}" for folder in DENSE_FOLDERS for name in ("config.json", "model.safetensors")),
)
FITTED_TO = "mlcpipe_fitted_to"
"""Key of config.json: the `text_hash` of each text that the weights were pruned or distilled by."""
MAX_TEXTS = 64
MAX_NAME = 200  # characters of the model's
MAX_CONFIG_BYTES = 16_000_000  # quantized checkpoints list their modules there; real ones stay below 1 MB
_HASH = re.compile(r"[0-9a-f]{64}")
DOWNLOAD_AGAIN = "download the checkpoint again"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class DraftHead:
    """A draft head's tensors by their names in the model, and the files that hold them; kinds are in `draft_heads`."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo] = field(repr=False)


@dataclass(frozen=True)
class PictureTower:
    """The other part of a model that sees: the whole's config.json and preprocessor_config.json, and the tensors of its
    tower by the names of its modules. `files` are those of a tower that is in files of its own.
    """

    config: Mapping[str, Any] = field(repr=False)
    preprocessor: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Everything is checked except the numbers, which `read` checks.

    `config` and `generation_config` are the parsed files ({} for an absent generation_config.json); `tensors`
    is sorted by name; `weight_files` are the safetensors, sorted. `draft_head` describes the draft head, if any;
    `pictures` the tower whose tensors are not among them, if there is one for the family. `notes` say what of
    the files is not read, and why.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    weight_files: tuple[Path, ...]
    draft_head: DraftHead | None = field(default=None, kw_only=True)
    pictures: PictureTower | None = field(default=None, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def name(self) -> str | None:
        """The model's common name: `org/name` if it is in a hub's cache, else the folder's name."""
        folder = self.path.resolve()
        repo = folder.parents[1].name if folder.parent.name == "snapshots" else ""
        name = repo.removeprefix("models--").replace("--", "/", 1) if repo.startswith("models--") else folder.name
        return printable_name(name)

    @property
    def folder(self) -> Path:
        """The folder with the configuration and the tokenizer's files."""
        return self.path

    @property
    def quantized_as(self) -> str | None:
        """The format of quantized weights; None for float32, float16 and bfloat16."""
        return None

    @property
    def keeps_all(self) -> bool:
        """Whether `--quantization keep` is lossless: kernels read the stored codes and scales of every matrix."""
        return True

    @property
    def fitted_to(self) -> tuple[str, ...]:
        """`text_hash` of the texts that the weights were pruned or distilled by. Raises ConfigError."""
        found = self.config.get(FITTED_TO, [])
        if not isinstance(found, list) or len(found) > MAX_TEXTS or not all(map(_is_hash, found)):
            raise ConfigError(
                FITTED_TO, where=shown_path(self.path / CONFIG), found=shown(found),
                expected=f"at most {MAX_TEXTS} times 64 hexadecimal digits",
            )  # fmt: skip
        return tuple(found)

    def config_fitted_to(self, sha256: str) -> dict[str, Any]:
        """config.json of a checkpoint made from this one with a text of that `text_hash`. Raises ConfigError."""
        return self.config | {FITTED_TO: list(dict.fromkeys((*self.fitted_to, sha256)))}

    def quantization(self, requested: str | None) -> str:
        """`requested`, or the default, which keeps quantized weights: they are rounded again only on request."""
        return requested or (DEFAULT_QUANTIZATION if self.quantized_as is None else KEEP)

    def info(self, name: str) -> TensorInfo:
        """Location of tensor `name`. Raises CheckpointError when the checkpoint has no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"missing tensor {shown(name)}",
                where=shown_path(self.path),
                expected="this tensor in a weight file",
                found=f"{len(self.tensors)} other tensors",
                next_step="check that config.json belongs to these weights",
            )
        return tensor

    def read(self, name: str) -> NDArray[np.float32]:
        """Tensor `name` as a new C-contiguous float32 array of its shape, checked to be finite.

        bfloat16 and float16 are widened exactly. Raises CheckpointError (missing tensor, other dtype, truncated
        file, NaN or Inf) and ResourceError (out of memory).
        """
        return read_float32(self.info(name))

    def read_parts(self, name: str) -> Parts:
        """The codes and scales of a quantized matrix `name`, as stored; scales are checked to be finite.

        Raises CheckpointError, also for a tensor of another form.
        """
        raise CheckpointError(f"tensor {shown(name)} has no codes", where=shown_path(self.path))

    def columns(self, name: str) -> NDArray[np.int32] | None:
        """The column order int32[K] in which `read_parts` returns `name`; None if it is the matrix's own."""
        return None

    def read_raw(self, name: str) -> memoryview:
        """The stored bytes of tensor `name`, of any dtype, unchecked. Raises CheckpointError."""
        return read_bytes(self.info(name))

    def text_files(self) -> list[str]:
        """Names of the files beside config.json and the weights: generation, tokenizer, templates."""
        more = sorted(path.relative_to(self.path).as_posix() for path in self.path.glob(f"{TEMPLATES}/*.jinja"))
        names = (GENERATION_CONFIG, *TOKENIZER_FILES, *more)
        return [name for name in names if (self.path / name).is_file()]

    def content_hash(self, cache_dir: Path | None = None) -> str:
        """sha256 (hex) over names, sizes and content of the configuration, tokenizer and weight files.

        `cache_dir` stores digests of large files by path, size, times and inode, so that a second
        call does not read them. Raises CheckpointError for a file that cannot be read or changes meanwhile.
        """
        files = [self.path / name for name in (CONFIG, *self.text_files(), *EMBEDDING_FILES)]
        files += [self.path / name for name in PROCESSOR_CONFIGS] if self.pictures is not None else []
        present = [file for file in files if file.is_file()]
        if any(file.name != SINGLE_FILE for file in self.weight_files):
            present.append(self.path / INDEX)
        return hash_files((*present, *self.weight_files, *self._head_files), cache_dir)

    @property
    def _head_files(self) -> tuple[Path, ...]:
        return () if self.draft_head is None else self.draft_head.files


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def printable_name(name: str) -> str | None:
    """The model's name without control characters, at most MAX_NAME of it; None if nothing is left."""
    return "".join(filter(str.isprintable, name))[:MAX_NAME] or None


def read_preprocessor(folder: Path) -> dict[str, Any] | None:
    """How a folder's pictures are made ready, None if it does not say: what is in processor_config.json counts, as in
    transformers. What it says of videos alone is under `video_processor`. Raises ConfigError.
    """
    alone, whole, alone_of_videos = (folder / name for name in PROCESSOR_CONFIGS)
    both = read_config(whole) if whole.is_file() else {}
    pictures = _object(both, "image_processor", whole, alone)
    videos = _object(both, VIDEO_PROCESSOR, whole, alone_of_videos)
    if pictures is None:
        return None
    pictures.pop(VIDEO_PROCESSOR, None)
    return pictures if videos is None else {**pictures, VIDEO_PROCESSOR: videos}


def _object(both: Mapping[str, Any], name: str, whole: Path, alone: Path) -> dict[str, Any] | None:
    """An object of the file `whole`, or else the file `alone`. Raises ConfigError."""
    found = both.get(name)
    if found is None:
        return read_config(alone) if alone.is_file() else None
    if not isinstance(found, dict):
        raise ConfigError(name, where=whole.name, expected="an object", found=shown(found))
    return found


def read_config(path: Path) -> dict[str, Any]:
    """The object in config.json or generation_config.json. Raises ConfigError."""
    return read_json_object(path, limit=MAX_CONFIG_BYTES, error=ConfigError, next_step=DOWNLOAD_AGAIN)
