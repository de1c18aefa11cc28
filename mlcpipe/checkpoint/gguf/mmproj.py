"""The tower of a model that sees, from the second file of GGUF, whose name has mmproj.

The file says what the tower is, and has no fields of a processor but means, deviations and sizes: the others are those
that the families publish, in the files of `mlcpipe/vision`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from mlcpipe.checkpoint.checkpoint import Checkpoint, PictureTower
from mlcpipe.checkpoint.flat_convolutions import as_modules_have_it
from mlcpipe.checkpoint.gguf.checkpoint import GgufCheckpoint
from mlcpipe.checkpoint.gguf.choice import is_mmproj
from mlcpipe.checkpoint.gguf.families import GgufTensor
from mlcpipe.checkpoint.gguf.header import Header, read_header
from mlcpipe.checkpoint.gguf.made_tensors import channels_last, framed, joined
from mlcpipe.checkpoint.gguf.special_tokens import tokens_of
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.json_files import shown, shown_path
from mlcpipe.vision import build_tower, towers
from mlcpipe.vision.mmproj import BOUNDS, PART, Config, Mmproj

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)

NO_MMPROJ = "none"  # instead of a file: the text alone
MOST_FILES = 16  # of a folder that are read to choose one
_NUMBERED = re.compile(r"v\.blk\.(\d{1,4})\.(.+)")
_PART = re.compile(rf"(.+){PART}(\d)(\..+)")  # of the rows of a matrix
_EXCHANGED = re.compile("ffn_(?:up|down)")
_SOUND = ("a.", "mm.a.")  # tensors of another tower
_UNREAD = ("v.token_embd.img_break",)  # a row of the text's embedding
_PATCHES, _SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
_MOST = 1 << 32  # of an integer; towers have closer bounds
# Key -> field of `vision_config`.
_FIELDS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "patch_size": "patch_size",
    "image_size": "image_size",
}


def with_mmproj(checkpoint: AnyCheckpoint, given: str | Path | None = None) -> AnyCheckpoint:
    """A model with the tower of the file `given`; without it of the one in the model's folder that fits; none with
    NO_MMPROJ.

    Raises CheckpointError and ConfigError for a given file that is damaged or of another model. One of the folder is
    left alone then, and `notes` say why, as they do where several fit.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        if given is None:
            return checkpoint
        raise ConfigError("an mmproj file", where=str(given), expected="a model in GGUF", found=str(checkpoint.path))
    if given == NO_MMPROJ:
        return replace(checkpoint, pictures=None, notes=())
    if given is not None:
        return replace(checkpoint, pictures=read_mmproj(Path(given), checkpoint), notes=())
    towers_found, reasons = [], []
    for file in mmproj_files(checkpoint.path):
        try:
            towers_found.append(read_mmproj(file, checkpoint))
        except (CheckpointError, ConfigError) as error:
            reasons.append(f"{file.name} is not read: {error}")
    if len(towers_found) == 1:
        return replace(checkpoint, pictures=towers_found[0])
    if towers_found:
        names = ", ".join(tower.files[0].name for tower in towers_found)
        reasons = [f"the text alone is read: {names} all fit; choose one with --mmproj FILE"]
    return replace(checkpoint, notes=tuple(reasons[:1]))


def mmproj_files(model: Path) -> list[Path]:
    """The files beside a model that may have its tower, at most MOST_FILES of them."""
    try:
        names = sorted(path for path in model.parent.iterdir() if path.suffix == ".gguf")
    except OSError:
        return []
    return [path for path in names if is_mmproj(path.name) and path != model and path.is_file()][:MOST_FILES]


def read_mmproj(path: Path, text: GgufCheckpoint) -> PictureTower:
    """The tower of a file for a text. Reads its header alone. Raises CheckpointError, and ConfigError for one that does
    not fit the text or is not supported.
    """
    header = read_header(path)
    file = _File(header, text)
    family, model_type = _family_of(file, text)
    width = file.integer("projection_dim")
    if width != text.config["hidden_size"]:
        raise file.error("projection_dim", f"{text.config['hidden_size']}, the width of the text", width)
    vision: Config = {name: file.integer(key) for key, name in _FIELDS.items()}
    up = file.shape("v.blk.0.ffn_up.weight")  # what the key says of Qwen2-VL is another number
    vision["intermediate_size"] = up[0] if up[-1] == vision["hidden_size"] else up[-1]
    vision["layer_norm_eps"] = file.number("attention.layer_norm_epsilon", 1e-6)
    whole: Config = {"model_type": model_type, "text_config": _text_of(text), "vision_config": vision}
    preprocessor: Config = {name: file.colors(name) for name in ("image_mean", "image_std")}
    family.complete(file, whole, preprocessor)
    build_tower(whole, preprocessor)  # raises for what is not supported
    tensors = {tensor.name: tensor for tensor in _renamed(file, family, vision["num_attention_heads"])}
    return PictureTower(whole, preprocessor, MappingProxyType(tensors), (path,))


class _File:
    """As `MmprojFile`."""

    def __init__(self, header: Header, text: GgufCheckpoint) -> None:
        self.metadata, self._text = header.metadata, text
        self.tensors: Mapping[str, TensorInfo] = {tensor.name: tensor for tensor in header.tensors}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        found = self.tensors.get(tensor)
        return (0, 0) if found is None or len(found.shape) < 2 else found.shape

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.metadata.integer(self._full(key), default)
        if not 0 < found <= _MOST:
            raise self.error(key, f"an integer from 1 to {_MOST}", found)
        return found

    def number(self, key: str, default: float | None = None) -> float:
        return self.metadata.number(self._full(key), default)

    def text(self, key: str) -> str:
        return self.metadata.text(self._full(key))

    def flag(self, key: str, default: bool) -> bool:
        return self.metadata.flag(self._full(key), default)

    def flags(self, key: str, count: int) -> list[bool]:
        if self._full(key) not in self.metadata.values:
            return [False] * count
        found = self.metadata.numbers(self._full(key), count)
        if found.dtype != np.bool_:
            raise self.error(key, "an array of booleans")
        return [bool(one) for one in found]

    def colors(self, key: str) -> list[float]:
        found = self.metadata.numbers(self._full(key), 3)
        if found.dtype.kind not in "iuf" or not np.isfinite(found).all():
            raise self.error(key, "three numbers")
        # The shortest decimals of float32: what preprocessor_config.json had.
        return [float(str(number)) for number in found]

    def token(self, text: str) -> int:
        try:
            return tokens_of(self._text.metadata).index(text)
        except ValueError:
            raise ConfigError(
                "a picture's token", where=self._text.metadata.where, expected=text, found="no such token",
                next_step="take a file of the text that has it, from the author of the mmproj file",
            ) from None  # fmt: skip

    def error(self, key: str, expected: object, found: object = None) -> ConfigError:
        return self.metadata.error(self._full(key), expected, found)

    def _full(self, key: str) -> str:
        names = [f"clip.vision.{key}", f"clip.{key}"]
        return next((name for name in names if name in self.metadata.values), names[0])


def _family_of(file: _File, text: GgufCheckpoint) -> tuple[Mmproj, str]:
    """The tower's family, and the model_type of the whole. Raises ConfigError."""
    architecture = file.metadata.text("general.architecture")
    if architecture != "clip":
        expected = "clip, which files have that read pictures"
        raise file.metadata.error("general.architecture", expected, shown(architecture))
    projector = file.text("projector_type")
    modules = [importlib.import_module(f"mlcpipe.vision.{name}") for name in towers()]
    known = {one.MMPROJ.projector: one.MMPROJ for one in modules if hasattr(one, "MMPROJ")}
    family = known.get(projector)
    if family is None:
        raise file.error("projector_type", ", ".join(sorted(known)), shown(projector))
    own = str(text.config["model_type"])
    if own not in family.wholes:
        expected = f"a text of {', '.join(family.wholes)}"
        raise file.error("projector_type", f"{expected} for {projector}", f"{own} in {text.path.name}")
    return family, family.wholes[own]


def _text_of(text: GgufCheckpoint) -> Config:
    """`text_config` of the whole: with the sections of RoPE, which a text does not need."""
    key = f"{text.metadata.text('general.architecture')}.rope.dimension_sections"
    if key not in text.metadata.values:
        return dict(text.config)
    found: list[Any] = text.metadata.numbers(key, 4).tolist()
    if found[3]:
        raise text.metadata.error(key, "three sections, and 0", shown(found))
    config = {name: value for name, value in text.config.items() if name != "rope_scaling"}
    return config | {"rope_parameters": {"rope_type": "default", "mrope_section": found[:3]}}


def _renamed(file: _File, family: Mmproj, heads: int) -> Iterator[TensorInfo]:
    """The tensors by the names of the tower's modules. Raises ConfigError for one that the tower does not have."""
    names = {**family.names, **(family.names_of(file) if family.names_of is not None else {})}
    up, down = (file.shape(f"v.blk.0.ffn_{part}.weight") for part in ("up", "down"))
    # Of older files (llama.cpp's `is_ffn_swapped`).
    exchanged = up[0] == down[-1] == file.integer("embedding_length") != up[-1]
    apart: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in file.tensors.items():
        if name.startswith(_SOUND) or name in (*_UNREAD, _SECOND_FRAME):
            continue
        own = _own_name(_EXCHANGED.sub(_other_half, name) if exchanged else name, names)
        if own is None:
            raise ConfigError(
                f"tensor {shown(name)}", where=shown_path(tensor.file), expected=f"those of {family.projector}",
                next_step="take the mmproj file of the model's author",
            )  # fmt: skip
        if name == _PATCHES:
            yield _patches(file, family, own)
            continue
        interleaved = heads if name.rpartition(".")[0].endswith(family.interleaved or ("?",)) else 0
        if interleaved and tensor.shape[0] % (2 * heads):
            expected = f"a multiple of 2 * {heads} heads"
            raise ConfigError(f"the rows of {shown(name)}", expected=expected, found=tensor.shape[0])
        add = -next((value for end, value in family.added.items() if name == end), 0.0)
        made, part = _as(tensor, own, interleaved, add), _PART.fullmatch(own)
        if part is None:
            yield as_modules_have_it(made)
        else:
            apart.setdefault(part[1] + part[3], {})[part[2]] = made
    for name, parts in apart.items():
        yield joined(name, [parts[number] for number in sorted(parts)])


def _patches(file: _File, family: Mmproj, name: str) -> TensorInfo:
    """The projection of patches, of both frames where the file has two."""
    parts = [_as(file.tensors[one], name) for one in (_PATCHES, _SECOND_FRAME) if one in file]
    if len(parts) == 2:
        return framed(name, parts)
    return channels_last(name, parts[0]) if family.channels_last else as_modules_have_it(parts[0])


def _other_half(match: re.Match[str]) -> str:
    return "ffn_down" if match[0] == "ffn_up" else "ffn_up"


def _own_name(name: str, names: Mapping[str, str]) -> str | None:
    """The tower's name of a tensor of the file; None if it has none."""
    match = _NUMBERED.fullmatch(name)
    layer, pattern = (match[1], f"v.blk.{{}}.{match[2]}") if match else ("", name)
    stem, _, suffix = pattern.rpartition(".")
    if pattern in names:
        return names[pattern].format(layer)
    if stem not in names or suffix not in ("weight", "bias", *BOUNDS):
        return None
    module = names[stem].format(layer)
    return f"{module.removesuffix('.linear') if suffix in BOUNDS else module}.{suffix}"


def _as(tensor: TensorInfo, name: str, heads: int = 0, add: float = 0.0) -> GgufTensor:
    return GgufTensor(name, tensor.shape, tensor.dtype, tensor.file, tensor.offset, tensor.nbytes, heads, add)
