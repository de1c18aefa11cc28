"""How towers are stored in GGUF, in a file beside the text's: the type of `MMPROJ` in the files of towers.

Keys and names of tensors are llama.cpp's: gguf-py/gguf/constants.py has them, conversion/ writes them and
tools/mtmd/clip.cpp reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlcpipe.errors import ConfigError

Config = dict[str, Any]
PART = "#"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


class MmprojFile(Protocol):
    """Keys without `clip.vision.` or `clip.`, and tensors, of a file. Raises ConfigError that names the key."""

    def __contains__(self, tensor: str) -> bool:
        """Whether there is a tensor of this name."""

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The extents of a tensor of two axes or more, the slowest first; [0, 0] if there is none."""

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""

    def flags(self, key: str, count: int) -> list[bool]:
        """An array of `count` booleans, all false if there is none."""

    def token(self, text: str) -> int:
        """The id of a token of the text's vocabulary."""

    def error(self, key: str, expected: object, found: object = None) -> ConfigError:
        """An error about a key."""


@dataclass(frozen=True)
class Mmproj:
    """A tower in GGUF.

    projector    what `clip.projector_type` says
    wholes       the `model_type` of the text -> that of the whole
    complete     adds to config.json of the whole, whose `vision_config` has the fields that SigLIP's has, and to its
                 preprocessor_config.json
    names        llama.cpp's name of a tensor -> that in the tower; both without `.weight` and `.bias`, or with all they
                 end in. `{}` stands for the number of a layer; rows of names with PART and a number follow each other
    names_of     more names, which depend on the file
    interleaved  ends of names in the file whose rows are in pairs within each head, as llama.cpp rotates them
    added        the name of a tensor in the file -> what was added to its numbers
    channels_last  the tower has the numbers of a patch pixel by pixel
    """

    projector: str
    wholes: Mapping[str, str]
    complete: Callable[[MmprojFile, Config, Config], None]
    names: Mapping[str, str]
    names_of: Callable[[MmprojFile], Mapping[str, str]] | None = None
    interleaved: tuple[str, ...] = ()
    added: Mapping[str, float] = field(default_factory=dict)
    channels_last: bool = False


def in_layers(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Names of a layer's parts, in the file and in the tower, whose layers are `prefix`.{}."""
    return {f"v.blk.{{}}.{name}": f"{prefix}.{{}}.{own}" for name, own in names.items()}


def check_eps(file: MmprojFile, expected: float) -> None:
    """Raise ConfigError unless norms have this epsilon, which the family does not state elsewhere."""
    key = "attention.layer_norm_epsilon"
    found = file.number(key, expected)
    if abs(found - expected) > 1e-3 * expected:
        raise file.error(key, expected, found)
