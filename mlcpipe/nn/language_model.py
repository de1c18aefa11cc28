"""The compiler's view of any model: facts, states of its layers, shapes of attention."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from tvm.relax.frontend import nn

from mlcpipe.bundle.model_info import DiffusionInfo, WholeAnswerInfo
from mlcpipe.bundle.states import State, windows_of
from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import AttentionBlock, AttentionSpec
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rope import Rope
from tir_schedules.paged import QUANTIZED


@dataclass(frozen=True)
class ModelFacts:
    """Model properties that the compiler, the manifest and the runtime need. Facts of a layer are in its blocks.

    `ropes[rope_of[i]]` has the frequencies of layer i. `logit_softcap` bounds logits (0: none). `embedding_scale`
    multiplies embeddings, `logit_scale` logits. The definition holds up to `bound` tokens (0: without end).
    `diffusion`: how a model that denoises blocks, or whole answers, does it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    tied: bool = False
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    bound: int = 0
    diffusion: DiffusionInfo | WholeAnswerInfo | None = None


def blocks_of(module: nn.Module, kind: type) -> Iterator[Any]:
    """The modules of a class, or with methods of a protocol, in the order of the layers."""
    if isinstance(module, kind):
        yield module
        return
    for value in vars(module).values():
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, nn.Module):
                yield from blocks_of(one, kind)


@runtime_checkable
class Stateful(Protocol):
    """A block that keeps something from step to step."""

    def states(self, model: LanguageModel) -> list[State]:
        """What it keeps, once the model has its dtypes."""
        ...


@dataclass(frozen=True)
class Stage:
    """The layers of a stage, of `count`, and the windows of the whole model, whose page ids all stages share.

    `calls`: some of their experts are elsewhere. `alone`: it has the experts of its layers, and nothing else.
    """

    layers: range
    count: int
    windows: tuple[int, ...]
    calls: bool = False
    alone: bool = False

    @property
    def first(self) -> bool:
        """Whether it takes tokens."""
        return self.layers.start == 0 and not self.alone

    @property
    def last(self) -> bool:
        """Whether it gives logits."""
        return self.layers.stop == self.count and not self.alone


class LanguageModel(nn.Module):
    """The compiler's view of any model: its facts, its states, dtypes, the folder of kernels, checkpoints' names."""

    model: nn.Module
    names = CheckpointNames()

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.dtype = "float32"
        self.kv_dtype = "float32"
        self.kernels = ""
        self.stage: Stage | None = None  # that it was cut to

    def attentions(self) -> list[AttentionSpec]:
        """The specs of the attention layers, in order."""
        return [block.spec for block in blocks_of(self.model, AttentionBlock)]

    def states(self) -> list[State]:
        """The state table, in the order of the functions' argument `states`."""
        return [state for block in blocks_of(self.model, Stateful) for state in block.states(self)]

    def windows(self) -> tuple[int, ...]:
        """The window of each group of pages, of the whole model where this is a stage of it."""
        return windows_of(self.states()) if self.stage is None else self.stage.windows

    def attention_shape(self, of: AttentionSpec, group: int = 0, **options: Any) -> Any:
        """The AttentionShape that the target's kernels of a layer are built for, with pages of a group."""
        shape = importlib.import_module(f"tir_schedules.{self.kernels}.attention").AttentionShape
        if self.kv_dtype in QUANTIZED:
            options["activation_dtype"] = self.dtype
        options |= {"value_dim": of.value_dim, "latent": of.latent, "sinks": of.sinks, "page_group": group}
        options |= {"queries_only": of.reads is not None, "distances": of.distances}
        options |= {"ahead": self.facts.diffusion is not None}
        return shape(of.num_heads, of.num_kv_heads, of.head_dim, self.kv_dtype, of.softcap, **options)

    def attention_state(self, of: AttentionSpec, name: str, *layers: int) -> State:
        """The keys and values of layers with such attention, as the kernels of the target keep them."""
        parts = [
            {"name": part, "dtype": dtype, "shape": shape, "token_axis": axis}
            for part, dtype, shape, axis in self.attention_shape(of).parts
        ]
        return State.model_validate(
            {"name": name, "kind": "pages", "parts": tuple(parts), "copies": of.num_kv_heads,
             "window": of.window or 0, "layers": layers}
        )  # fmt: skip

    def check_uniform(self, where: str) -> None:
        """Raises ConfigError for layers that TVM's cache cannot serve: it has one shape for all."""
        kinds = {replace(of, window=None) for of in self.attentions()}
        windows = {of.window for of in self.attentions()} - {None}
        others = len(self.attentions()) < self.facts.num_layers
        others |= any(not isinstance(block, AttentionBlock) for block in blocks_of(self.model, Stateful))
        if any(of.value_dim for of in kinds):
            raise ConfigError(
                f"layers of {self.facts.model_type}", where=where, expected="keys and values of one size, stored apart",
                found="latent or narrower values", next_step="compile for a target with kv_cache = pages",
            )  # fmt: skip
        if len(kinds) > 1 or len(windows) > 1 or others:
            raise ConfigError(
                f"layers of {self.facts.model_type}", where=where, expected="attention of one shape in every layer",
                found="several kinds of layers", next_step="compile for a target with kv_cache = pages",
            )  # fmt: skip
