"""A causal language model: the entry points of the compiled library around a stack of decoder layers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol, runtime_checkable

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.errors import ConfigError
from mlcpipe.nn import cache_functions, state_functions
from mlcpipe.nn.attention import Attention, AttentionSpec
from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates
from tir_schedules.paged import QUANTIZED


@dataclass(frozen=True)
class ModelFacts:
    """Model properties that the compiler, the manifest and the runtime need. Facts of a layer are in its blocks.

    `ropes[rope_of[i]]` has the frequencies of layer i. `logit_softcap` bounds logits (0: none). `embedding_scale`
    multiplies embeddings, `logit_scale` logits.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    norm_eps: float
    norm_offset: float = 0.0
    tied: bool = False
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


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


class Decoder(nn.Module):
    """Embedding, layers and final norm, named as in Hugging Face's `model`; families have names of their own for it."""

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module], norm: str) -> None:
        self.facts, self.norm_name = facts, norm
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size)
        self.layers = nn.ModuleList(list(layers))
        setattr(self, norm, RMSNorm(facts.hidden_size, facts.norm_eps, facts.norm_offset))

    @property
    def final_norm(self) -> RMSNorm:
        """The norm after all layers."""
        found: RMSNorm = getattr(self, self.norm_name)
        return found

    def forward(self, x: Tensor, kv: PagedKVCache | StepStates, kept: Sequence[int] = ()) -> list[Tensor]:
        """x [m, hidden] -> the inputs [m, hidden] of the layers `kept`, and the normalized hidden states."""
        rows = x.shape[0]
        positions = kv.positions(rows)
        lengths = kv.rope_lengths(rows) if any(rope.depends_on_length for rope in self.facts.ropes) else None
        tables = [cos_sin(rope, positions, lengths) for rope in self.facts.ropes]
        inputs = []
        for index, (layer, rope) in enumerate(zip(self.layers, self.facts.rope_of)):
            inputs += [x] if index in kept else []
            x = layer(x, kv, *tables[rope])
        return [*inputs, self.final_norm(x)]


class LanguageModel(nn.Module):
    """The compiler's view of any model: dtypes, the folder of kernels, whether the runtime owns the pages."""

    model: nn.Module

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.dtype = "float32"
        self.kv_dtype = "float32"
        self.kernels = ""
        self.own_pages = False

    def attentions(self) -> list[AttentionSpec]:
        """The specs of the attention layers, in order."""
        return [block.spec for block in blocks_of(self.model, Attention)]

    def states(self) -> list[State]:
        """The state table, in the order of the functions' argument `states`."""
        return [state for block in blocks_of(self.model, Stateful) for state in block.states(self)]

    def attention_shape(self, of: AttentionSpec, group: int = 0, **options: Any) -> Any:
        """The AttentionShape that the target's kernels of a layer are built for, with pages of a group."""
        shape = importlib.import_module(f"tir_schedules.{self.kernels}.attention").AttentionShape
        if self.kv_dtype in QUANTIZED:
            options["activation_dtype"] = self.dtype
        sizes = (of.num_heads, of.num_kv_heads, of.head_dim)
        return shape(*sizes, self.kv_dtype, of.softcap, sinks=of.sinks, page_group=group, **options)

    def check_uniform(self, where: str) -> None:
        """Raises ConfigError for layers that TVM's cache cannot serve: it has one shape for all."""
        kinds = {replace(of, window=None) for of in self.attentions()}
        windows = {of.window for of in self.attentions()} - {None}
        if len(kinds) > 1 or len(windows) > 1 or len(self.attentions()) < self.facts.num_layers:
            raise ConfigError(
                f"layers of {self.facts.model_type}", where=where, expected="attention of one shape in every layer",
                found="several kinds of layers", next_step="compile for a target with kv_cache = pages",
            )  # fmt: skip

    def spec(self) -> dict[str, Any]:
        """Argument specifications of every entry point, for `nn.Module.export_tvm`."""
        raise NotImplementedError


class CausalLM(LanguageModel):
    """The model functions of the compiled library, over states of the runtime or over TVM's cache, for MLC's hosts.

    Layers are called as `layer(x [m, hidden], kv, cos, sin) -> [m, hidden]`; the m rows are the
    tokens of all sequences.
    """

    def __init__(self, facts: ModelFacts, layers: Sequence[nn.Module], norm: str = "norm") -> None:
        super().__init__(facts)
        self.draft_head: DraftHead | None = None
        self.model = Decoder(facts, layers, norm)
        if not facts.tied:
            self.lm_head = Linear(facts.hidden_size, facts.vocab_size)
            self.model.embed_tokens.weight.attrs["reads"] = Fraction(1, facts.vocab_size)

    def add_draft_head(self, head: DraftHead) -> None:
        """Add the parameters and functions of a head, and forwards that keep rows for it."""
        self.draft_head = head
        setattr(self, head.parameter, head.module)
        for name, function in head.functions(self).items():
            setattr(self, name, function)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> f32[m, vocab]."""
        y = self.model.embed_tokens.project(hidden) if self.facts.tied else self.lm_head(hidden)
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        y = scaled(y, self.facts.logit_scale)
        if self.facts.logit_softcap:
            cap = Tensor.from_scalar(self.facts.logit_softcap, "float32")
            y = op.multiply(op.tanh(op.divide(y, cap)), cap)
        return y

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids i32[n] -> [n, hidden]."""
        return scaled(self.model.embed_tokens(input_ids), self.facts.embedding_scale)

    def spec(self) -> dict[str, Any]:
        """Argument specifications of every entry point, for `nn.Module.export_tvm`.

        Symbolic sizes: "n" tokens of a prompt, "b" decode rows (one or more of each sequence), "v" verified tokens. The
        arithmetic of prompts may differ, see `passes/mark_prompt_rows.py`.
        """
        made = state_functions if self.own_pages else cache_functions
        for name, function in made.functions(self).items():
            setattr(self, name, function)
        specs: dict[str, Any] = made.specs(self)
        return specs
