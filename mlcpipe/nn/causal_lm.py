"""A causal language model: embedding, a stack of decoder layers, norm and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn.attention_spec import AttentionBlock
from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.language_model import LanguageModel, ModelFacts, Stateful, blocks_of
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import cos_sin
from mlcpipe.nn.rows import rows_of, scaled
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower


class Decoder(nn.Module):
    """Embedding, layers and final norm, named as in Hugging Face's `model`.

    `positions`: learned vectors of that many positions, from row `first` on, are added to the embeddings. `per_layer`:
    makes what each layer gets beside its input. `streams`: layers have several streams of hidden states. A stage
    (`nn/stages.py`) has the layers of `span` alone.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layers: Sequence[nn.Module],
        norm: NormSpec,
        *,
        embedding_norm: NormSpec | None,
        positions: tuple[int, int] | None,
        per_layer: nn.Module | None,
        streams: nn.Module | None,
    ) -> None:
        self.facts, (self.first, count) = facts, positions or (0, 0)
        self.embed_tokens = Embedding(facts.vocab_size, facts.hidden_size)
        rows = self.first + count
        self.embed_positions = Embedding(rows, facts.hidden_size, quantize=False) if count else None
        self.embedding_norm = embedding_norm(facts.hidden_size) if embedding_norm else None
        self.per_layer, self.streams = per_layer, streams
        self.layers = nn.ModuleList(list(layers))
        self.norm = norm(facts.hidden_size)
        self.span = range(len(layers))

    @property
    def last_storing(self) -> int:
        """The last layer that keeps something from step to step: those after it compute only what logits need.

        In a stage where none does, the one before its first.
        """
        storing = (index for index, layer in enumerate(self.layers) if any(_stores(layer)))
        return max(storing, default=self.span.start - 1)

    def forward(
        self,
        x: Tensor,
        kv: PagedKVCache | StepStates,
        kept: Sequence[int] = (),
        tokens: Tensor | None = None,
        wanted: Tensor | None = None,
        added: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> list[Tensor]:
        """x [m, hidden] -> the inputs [m, hidden] of the layers `kept`, and the normalized hidden states.

        `tokens` i32[m] are those of x. `wanted` i32[r]: rows whose hidden states [r, hidden] are wanted alone. added[i]
        adds to what layer i made. In a stage x are the states before its first layer, and all but the last give those
        after their last one.
        """
        tables = self._tables(kv, x)
        x = x if self.span.start else self._placed(x, kv.positions(x.shape[0]))
        extra = [] if self.per_layer is None else [self.per_layer(tokens, x)]
        x = x if self.streams is None else self.streams.begin(x)
        narrow, inputs = len(self.layers) if wanted is None else self.last_storing + 1, []
        for index in self.span:
            layer, rope = self.layers[index], self.facts.rope_of[index]
            if index == narrow:
                x, *extra = (op.tensor_expr_op(rows_of, "rows", [one, wanted]) for one in (x, *extra))
                kv = kv.of_rows(wanted)
                tables = self._tables(kv, x)
            inputs += [x] if index in kept else []
            x = layer(x, kv, *tables[rope], *extra)
            x = added[index](x) if index < len(added) else x
        if self.span.stop < len(self.layers):
            return [*inputs, x]
        x = self.norm(x if self.streams is None else self.streams.end(x))
        narrowed = wanted is None or narrow < len(self.layers)
        return [*inputs, x if narrowed else op.tensor_expr_op(rows_of, "rows", [x, wanted])]

    def _tables(self, kv: PagedKVCache | StepStates, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of each rope for the rows of x."""
        rows, ropes = x.shape[0], self.facts.ropes
        lengths = kv.rope_lengths(rows) if any(rope.depends_on_length for rope in ropes) else None
        positions, layout = [kv.rope_positions(rows) for _ in ropes], kv.layout
        each = [() if layout is None else layout(rope.rotary_dim // 2) for rope in ropes]
        return [cos_sin(rope, at, lengths, axes) for rope, at, axes in zip(ropes, positions, each)]

    def _placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [m, hidden] at their positions, normalized if the model does so."""
        if self.embed_positions is not None:
            first = Tensor.from_scalar(self.first, "int32")
            x = op.add(x, self.embed_positions(op.add(positions, first) if self.first else positions))
        return x if self.embedding_norm is None else self.embedding_norm(x)


def _stores(layer: nn.Module) -> Iterator[bool]:
    """Whether the layer's blocks keep something from step to step."""
    for block in blocks_of(layer, Stateful):
        yield not isinstance(block, AttentionBlock) or block.spec.reads is None


class CausalLM(LanguageModel):
    """A decoder with its logits; `entry_points.py` makes the functions of the compiled library of it.

    Layers are called as `layer(x [m, hidden], kv, cos, sin) -> [m, hidden]`, with `per_layer` after these if there are
    such inputs; the m rows are the tokens of all sequences.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layers: Sequence[nn.Module],
        norm: NormSpec,
        *,
        head_bias: bool = False,
        embedding_norm: NormSpec | None = None,
        positions: tuple[int, int] | None = None,
        per_layer: nn.Module | None = None,
        streams: nn.Module | None = None,
    ) -> None:
        """`head_bias`: of the logits; the others are those of `Decoder`."""
        super().__init__(facts)
        self.draft_head: DraftHead | None = None
        self.own_head: DraftHead | None = None  # that its checkpoints may have
        self.tower: Tower | None = None  # for pictures
        self.model = Decoder(
            facts,
            layers,
            norm,
            embedding_norm=embedding_norm,
            positions=positions,
            per_layer=per_layer,
            streams=streams,
        )
        if not facts.tied:
            self.lm_head = Linear(facts.hidden_size, facts.vocab_size, head_bias)
            self.model.embed_tokens.weight.attrs["reads"] = Fraction(1, facts.vocab_size)

    def check_uniform(self, where: str) -> None:
        """Raises ConfigError for what TVM's cache cannot serve: layers of several shapes, or with a row per token."""
        super().check_uniform(where)
        if self.model.per_layer is not None:
            raise ConfigError(
                f"layers of {self.facts.model_type}", where=where, expected="layers that get hidden states alone",
                found="embeddings for each layer", next_step="compile for a target with kv_cache = pages",
            )  # fmt: skip

    def add_draft_head(self, head: DraftHead) -> None:
        """Add the parameters and functions of a head, and forwards that keep rows for it."""
        self.draft_head = head
        setattr(self, head.parameter, head.module)
        for name, function in head.functions(self).items():
            setattr(self, name, function)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> f32[m, vocab]."""
        return self.finished(self.model.embed_tokens.project(hidden) if self.facts.tied else self.lm_head(hidden))

    def finished(self, y: Tensor) -> Tensor:
        """The products of some tokens [m, n] -> their logits, f32[m, n]."""
        y = y if y.dtype == "float32" else op.astype(y, "float32")
        y = scaled(y, self.facts.logit_scale)
        if self.facts.logit_softcap:
            cap = Tensor.from_scalar(self.facts.logit_softcap, "float32")
            y = op.multiply(op.tanh(op.divide(y, cap)), cap)
        return y

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids i32[n] -> [n, hidden]."""
        return scaled(self.model.embed_tokens(input_ids), self.facts.embedding_scale)
