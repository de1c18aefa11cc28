"""Splits tensors that stack all experts into the matrices and biases of single experts.

gpt-oss: `gate_up_proj` [experts, hidden, 2 * width] and `down_proj` [experts, width, hidden] have inputs as rows; gate
and up take turns as columns. `gate_up_proj_bias` is [experts, 2 * width], `down_proj_bias` [experts, hidden]. Llama 4
has the same without biases, all columns of gate first, and so has Qwen3-VL.

Others as transformers 5 has them: `experts.gate_up_proj` [experts, 2 * width, hidden], gate rows first, and
`experts.down_proj` [experts, hidden, width]. Granite calls them `input_linear.weight` and `output_linear.weight` of
`block_sparse_moe`, and without the first axis of `shared_mlp`.

Nomic's encoders: `experts.mlp.w1` [experts * width, hidden] of all experts one after the other, and `experts.mlp.w2` of
the same shape, transposed.

mlx-lm: the matrices [N, K] of `gate_proj`, `up_proj` and `down_proj` lie one after the other, [experts, N, K], in a
module `switch_mlp`, or for gpt-oss in `experts`, where biases [experts, N] are too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mlcpipe.checkpoint.checkpoint import Checkpoint
from mlcpipe.checkpoint.matrix import FLOAT_DTYPES, Matrix, check_tensor, scales_of
from mlcpipe.checkpoint.quantized import QuantizedCheckpoint
from mlcpipe.checkpoint.quantized_matrix import Parts, widened
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.errors import CheckpointError
from mlcpipe.support.json_files import shown, shown_path

MAX_EXPERTS = 4096
MAX_TENSORS = 400_000  # of experts; gpt-oss-120b has 27,648
# The modules of an expert whose rows a stacked one holds.
PARTS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_TURNED_FAMILIES = {"gpt_oss": True, "llama4_text": False}  # whether gate and up take turns
_TURNED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_FUSED = re.compile(
    r"(?P<block>.+)\.experts\.(?P<projection>gate_up_proj|down_proj)"
    r"|(?P<module>.+\.(?:block_sparse_moe|shared_mlp))\.(?P<linear>input_linear|output_linear)\.weight"
)
_OF_NOMIC = re.compile(r"(.+\.experts)\.mlp\.(w1|w2)")
_OF_GRANITE = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_ALIKE = re.compile(r"(.+)\.(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj)")
_OF_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_BLOCKS = (".block_sparse_moe", ".feed_forward")  # whose experts have Mixtral's names
_RANKS = {"weight": 3, "bias": 2}


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with one tensor per expert. Raises CheckpointError for a stack of another form."""
    experts = checkpoint.config.get("num_experts")
    turns = _TURNED_FAMILIES.get(str(checkpoint.config.get("model_type")))
    turns = False if turns is None and _inputs_are_rows(checkpoint) else turns
    tensors: dict[str, TensorInfo] = {}
    for tensor in checkpoint.tensors.values():
        nomic = _OF_NOMIC.fullmatch(tensor.name)
        for one in _singles(tensor, turns) if nomic is None else _joined(tensor, experts, *nomic.groups()):
            if tensors.setdefault(one.name, one) is not one:
                raise CheckpointError(f"tensor {shown(one.name)} is stored twice", where=shown_path(one.file))
        if tensor.name not in tensors:
            check_number(len(tensors), tensor)
    if tensors.keys() == checkpoint.tensors.keys():
        return checkpoint
    ordered = MappingProxyType(dict(sorted(tensors.items())))
    return QuantizedCheckpoint(
        checkpoint.path, checkpoint.config, checkpoint.generation_config, ordered, checkpoint.weight_files,
        method=checkpoint.quantized_as or "", pictures=checkpoint.pictures,
    )  # fmt: skip


def _inputs_are_rows(checkpoint: Checkpoint) -> bool:
    """Whether the stacks of a Qwen 3 mixture are those of Qwen3-VL, which its config.json no longer says here."""
    config = checkpoint.config
    if config.get("model_type") != "qwen3_moe":
        return False
    sizes = config.get("hidden_size"), config.get("moe_intermediate_size")
    names = (name for name in checkpoint.tensors if name.endswith(".experts.gate_up_proj"))
    shape = next((checkpoint.tensors[name].shape[1:] for name in names), ())
    return isinstance(sizes[1], int) and shape == (sizes[0], 2 * sizes[1])


def _singles(tensor: TensorInfo, turns: bool | None) -> Iterator[TensorInfo]:
    """The tensors of each expert of a stack, or the tensor itself.

    `turns`: None for stacks that are not transposed, else whether gate and up take turns as columns.
    """
    module, _, part = tensor.name.rpartition(".")
    match = _TURNED.fullmatch(tensor.name)
    if turns is not None and match is not None:
        yield from _turned(tensor, turns, *match.groups())
    elif turns is None and (match := _FUSED.fullmatch(tensor.name)) is not None:
        yield from _fused(tensor, match)
    elif part in _RANKS and _ALIKE.fullmatch(module):
        for expert, parts in alike(module, {part: tensor}, _RANKS[part]):
            yield replace(parts[part], name=f"{expert}.{part}")
    else:
        yield tensor


def alike(module: str, stacks: Mapping[str, TensorInfo], rank: int = 3) -> Iterator[tuple[str, dict[str, TensorInfo]]]:
    """The module of each expert and its parts of `stacks`, whose first axis is that of the experts.

    Raises CheckpointError for stacks of other ranks, or of different numbers of experts.
    """
    match = _ALIKE.fullmatch(module)
    first = next(iter(stacks.values()))
    for stack in stacks.values():
        check_experts(stack, rank, 1, 1)
        if match is None or stack.shape[0] != first.shape[0]:
            raise CheckpointError(
                f"tensor {shown(stack.name)} is no stack of experts", where=shown_path(stack.file),
                expected="that of a module switch_mlp" if match is None else f"{first.shape[0]} experts",
                found=list(stack.shape),
            )  # fmt: skip
    assert match is not None
    block, projection = match.groups()
    for expert in range(first.shape[0]):
        of_one = {part: part_of(stack, expert) for part, stack in stacks.items()}
        yield _module(block, expert, projection), of_one


def _module(block: str, expert: int, projection: str) -> str:
    """The name of an expert's module."""
    projection = _OF_MIXTRAL[projection] if block.endswith(_MIXTRAL_BLOCKS) else projection
    return f"{block}.experts.{expert}.{projection}"


def check_experts(tensor: TensorInfo, rank: int, parts: int, axis: int) -> None:
    """Raise CheckpointError unless a stack has `rank` axes, some experts, and `parts` that take turns along `axis`."""
    shape = tensor.shape
    if len(shape) != rank or 0 in shape or shape[0] > MAX_EXPERTS or shape[axis] % parts:
        raise CheckpointError(
            f"tensor {shown(tensor.name)} is no stack of experts", where=shown_path(tensor.file),
            expected=f"{rank} axes, 1 to {MAX_EXPERTS} experts" + (f", axis {axis} even" if parts == 2 else ""),
            found=list(shape),
        )  # fmt: skip


def check_number(count: int, stack: TensorInfo) -> None:
    """Raise CheckpointError if the experts have more tensors than memory can list."""
    if count > MAX_TENSORS:
        raise CheckpointError(
            "too many experts", where=shown_path(stack.file), expected=f"at most {MAX_TENSORS} tensors"
        )


def part_of(tensor: TensorInfo, expert: int) -> TensorInfo:
    """The place of one expert's part in a stack."""
    nbytes = tensor.nbytes // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * nbytes, nbytes=nbytes)


def rows_of(tensor: TensorInfo, part: int, parts: int) -> TensorInfo:
    """The place of one of `parts` equal ranges of a matrix's rows."""
    nbytes = tensor.nbytes // parts
    shape = (tensor.shape[0] // parts, *tensor.shape[1:])
    return replace(tensor, shape=shape, offset=tensor.offset + part * nbytes, nbytes=nbytes)


def _fused(stack: TensorInfo, match: re.Match[str]) -> Iterator[TensorInfo]:
    """The matrices of each expert of transformers 5 and Granite, or of the one that all tokens use."""
    block, projection, module, linear = match.groups()
    names = PARTS[projection or _OF_GRANITE[linear]]
    shared = module is not None and module.endswith(".shared_mlp")
    stack = replace(stack, shape=(1, *stack.shape)) if shared else stack
    check_experts(stack, 3, len(names), 1)
    check_tensor(stack, FLOAT_DTYPES, stack.shape)
    for expert in range(stack.shape[0]):
        for i, name in enumerate(names):
            found = f"{module}.{name}" if shared else _module(block or module, expert, name)
            yield replace(rows_of(part_of(stack, expert), i, len(names)), name=f"{found}.weight")


def _turned(stack: TensorInfo, turns: bool, module: str, projection: str, bias: str | None) -> Iterator[Matrix]:
    """The tensors of each expert of a transposed stack."""
    parts = PARTS[projection]
    check_experts(stack, 2 if bias else 3, len(parts), -1)
    check_tensor(stack, FLOAT_DTYPES, stack.shape)
    rows = stack.shape[-1] // len(parts)
    shape = (rows,) if bias else (rows, stack.shape[1])
    suffix = "bias" if bias else "weight"
    for expert in range(stack.shape[0]):
        part = part_of(stack, expert)
        for i, name in enumerate(parts):
            columns = slice(i, None, len(parts)) if turns else slice(i * rows, (i + 1) * rows)
            yield Matrix(
                f"{module}.{expert}.{name}.{suffix}", shape, stack.dtype, part.file, part.offset,
                part.nbytes // len(parts), _no_codes, values=_Rows(part, columns),
            )  # fmt: skip


def _joined(joined: TensorInfo, experts: object, module: str, name: str) -> Iterator[TensorInfo]:
    """The matrix of each expert of Nomic's, whose number config.json has."""
    if (
        type(experts) is not int
        or not 0 < experts <= MAX_EXPERTS
        or len(joined.shape) != 2
        or joined.shape[0] % experts
    ):
        raise CheckpointError(
            f"tensor {shown(joined.name)} is no stack of experts", where=shown_path(joined.file),
            expected="two axes, rows for each of num_experts of config.json", found=list(joined.shape),
        )  # fmt: skip
    check_tensor(joined, FLOAT_DTYPES, joined.shape)
    for expert in range(experts):
        part = rows_of(joined, expert, experts)
        if name == "w1":
            yield replace(part, name=f"{module}.{expert}.up_proj.weight")
        else:
            yield Matrix(
                f"{module}.{expert}.down_proj.weight", part.shape[::-1], part.dtype, part.file, part.offset,
                part.nbytes, _no_codes, values=_Rows(part, slice(None)),
            )  # fmt: skip


class _Rows:
    """Reads the rows of an expert's module: some of the stored columns."""

    def __init__(self, stored: TensorInfo, columns: slice) -> None:
        self.stored, self.columns = stored, columns

    def __call__(self) -> NDArray[np.float32]:
        stored = scales_of(self.stored)
        return np.ascontiguousarray(widened(stored[..., self.columns].T))


def _no_codes() -> Parts:
    raise CheckpointError("a stack of experts has no codes")
