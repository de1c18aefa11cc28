"""MXFP4 of gpt-oss: experts in numbers of 4 bits (e2m1) with a power of two for 32 columns.

For `gate_up_proj` and `down_proj` of all experts, `*_blocks` uint8[experts, N, K / 32, 16] has two codes in a byte, the
first one below, and `*_scales` uint8[experts, N, K / 32] exponents, 127 higher; 255 is NaN. Rows of gate and up take
turns. Microscaling formats: OCP MX specification 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from mlcpipe.checkpoint.expert_stacks import PARTS, check_experts, check_number, part_of
from mlcpipe.checkpoint.matrix import E8M0, RUN, Matrix, byte_scales, check_tensor, matrix, nibbles_of, sibling
from mlcpipe.checkpoint.quantization_config import QuantizationConfig
from mlcpipe.checkpoint.quantized_matrix import Parts
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

_BLOCKS = re.compile(r"(.+)\.(gate_up_proj|down_proj)_blocks")


def matrices(settings: QuantizationConfig, tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Matrix], set[str]]:
    """The matrices of codes by name, and the tensors that were used. Raises ConfigError and CheckpointError."""
    is_plain = _plain_modules(settings)
    found: dict[str, Matrix] = {}
    used: set[str] = set()
    for match in filter(None, map(_BLOCKS.fullmatch, tensors)):
        module, projection = match.groups()
        blocks, scales = (sibling(tensors, module, f"{projection}_{part}") for part in ("blocks", "scales"))
        if is_plain(f"{module}.{projection}"):
            raise CheckpointError(
                f"tensor {shown(blocks.name)} has codes", where=shown_path(blocks.file),
                expected="numbers of a module in modules_to_not_convert",
            )  # fmt: skip
        check_number(len(found), blocks)
        found |= _experts(blocks, scales, module, PARTS[projection])
        used |= {blocks.name, scales.name}
    return found, used


def _plain_modules(settings: QuantizationConfig) -> Callable[[str], bool]:
    """Whether a module is one of `modules_to_not_convert`, or in one; `*` stands for any characters but dots."""
    names = settings.take("modules_to_not_convert", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise settings.refused("modules_to_not_convert", "a list of names", names)
    known = [re.compile(r"[^.]+".join(map(re.escape, name.split("*"))) + r"(\..+)?") for name in names]
    return lambda module: any(pattern.fullmatch(module) for pattern in known)


def _experts(blocks: TensorInfo, scales: TensorInfo, module: str, names: tuple[str, ...]) -> dict[str, Matrix]:
    """The matrices of all experts; rows of several modules take turns."""
    check_experts(blocks, 4, len(names), 1)
    experts, rows, groups, _ = blocks.shape
    check_tensor(blocks, ("uint8",), (experts, rows, groups, RUN // 2))
    check_tensor(scales, E8M0, (experts, rows, groups))
    found = {}
    for expert, (first, name) in product(range(experts), enumerate(names)):
        parts = partial(_parts, part_of(blocks, expert), part_of(scales, expert), slice(first, None, len(names)))
        shape, sources = (rows // len(names), groups * RUN), (part_of(blocks, expert), part_of(scales, expert))
        one = matrix(f"{module}.{expert}.{name}", shape, "MXFP4", sources, parts)
        found[one.name] = replace(one, nbytes=one.nbytes // len(names))
    return found


def _parts(blocks: TensorInfo, scales: TensorInfo, rows: slice) -> Parts:
    codes = nibbles_of(blocks)[rows]
    return Parts(codes.reshape(len(codes), -1), np.ascontiguousarray(byte_scales(scales, "MXFP4")[rows]))
