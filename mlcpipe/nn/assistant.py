"""Assistants of Gemma 4 (Google 2026): layers that guess tokens over the keys and values of the model.

x = pre_projection [e; h], where e embeds the last token and h is the input of the model's logits that it was drawn
from. The layers make queries alone, as of the last token's position, and attend to the keys of the tokens that the
model has computed, in its last layer of their kind that has keys. y = norm(layers(x)) gives the logits of the next
token, and post_projection y replaces h for the one after it; keys and position stay. Formulas as in transformers'
`modeling_gemma4_assistant.py`, and SinglePositionMultiTokenCandidateGenerator in its `candidate_generator.py`.

Of small models the head has clusters of tokens, each with a centroid: only tokens of the best ones are guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.layer_head import NEVER
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.nn.rows import columns, write_rows
from mlcpipe.nn.step_states import StepStates, argument


@dataclass(frozen=True, eq=False)
class Clusters:
    """The cluster i32[V] of each token, of `count`; the tokens of the best `chosen` are guessed."""

    of_token: NDArray[np.int32]
    count: int
    chosen: int


class AssistantModule(nn.Module):
    """Parameters, named as in transformers but for prefixes."""

    def __init__(
        self, layers: Sequence[nn.Module], norm: NormSpec, hidden: int, target: int, vocab: int, centroids: int
    ) -> None:
        self.embed_tokens = Embedding(vocab, hidden)
        self.pre_projection, self.post_projection = Linear(2 * target, hidden), Linear(hidden, target)
        self.layers = nn.ModuleList(list(layers))
        self.norm = norm(hidden)
        self.centroids = Linear(hidden, centroids, quantize=False) if centroids else None
        for param in self.parameters():
            param.attrs["reads"] = Fraction(0)


class AssistantHead(DraftHead):
    """`layers` of `hidden` numbers read states of a model of `target` numbers; layer i has ropes[rope_of[i]]."""

    parameter = "assistant"

    def __init__(
        self, layers: Sequence[nn.Module], ropes: Sequence[Rope], rope_of: Sequence[int], norm: NormSpec,
        hidden: int, target: int, vocab: int, clusters: Clusters | None,
    ) -> None:  # fmt: skip
        count = 0 if clusters is None else clusters.count
        self.module: AssistantModule = AssistantModule(layers, norm, hidden, target, vocab, count)
        self.ropes, self.rope_of, self.clusters = ropes, rope_of, clusters
        self.hidden, self.target = hidden, target

    @property
    def width(self) -> int:
        """Numbers of a row that `draft_from` continues from: h, and y after it."""
        return self.target + self.hidden

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """As `DraftHead.functions`."""
        return {"draft_from": partial(self._draft, model)}

    def _draft(
        self, model: Any, tokens: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, states: list[Tensor]
    ) -> Tensor:
        """The last tokens i32[d], and `hidden` f32[d, width], which is replaced -> logits f32[d, V].

        Rows of the step are those of the tokens before: the last keys that there are.
        """
        of, kv = self.module, StepStates(model, model.states(), step, list(states), prefill_rows=False)
        kept = columns(hidden, 0, self.target, model.dtype)
        x = of.pre_projection(op.concat([model.embed(tokens), kept], dim=1))
        at = op.add(kv.positions(tokens.shape[0]), Tensor.from_scalar(1, "int32"))
        tables = [cos_sin(rope, at, None) for rope in self.ropes]
        for layer, rope in zip(of.layers, self.rope_of):
            x = layer(x, kv, *tables[rope])
        y = of.norm(x)
        written = write_rows([op.concat([of.post_projection(y), y], dim=1)], hidden)
        return self._logits(columns(written, self.target, self.hidden, y.dtype))

    def _logits(self, y: Tensor) -> Tensor:
        """y [d, hidden] -> f32[d, V]."""
        of, clusters = self.module, self.clusters
        found = _float32(of.embed_tokens.project(y))
        if clusters is None or of.centroids is None:
            return found
        ranks = op.tensor_expr_op(_ranks, "ranks", [_float32(of.centroids(y))])
        inputs = [found, ranks, Tensor.from_const(clusters.of_token)]
        return op.tensor_expr_op(partial(_of_best, chosen=clusters.chosen), "of_best_clusters", inputs)

    def spec(self, model: Any) -> dict[str, Any]:
        """As `DraftHead.spec`."""
        tensor = nn.spec.Tensor
        return {
            "draft_from": {
                "tokens": tensor(["d"], "int32"),
                "hidden": tensor(["d", self.width], "float32"),
                "step": tensor(["k"], "int32"),
                "logits": tensor(["d", model.facts.vocab_size], "float32"),
                "states": argument(model.states(), model.windows()),
                "$": {"param_mode": "plain", "effect_mode": "none"},
            }
        }


def _float32(x: Tensor) -> Tensor:
    return x if x.dtype == "float32" else op.astype(x, "float32")


def _ranks(scores: te.Tensor) -> te.Tensor:
    """scores f32[m, c] -> i32[m, c]: how many are better, or equal and before."""
    m, count = scores.shape
    other = te.reduce_axis((0, count), name="other")

    def rank(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        better = scores[i, other] > scores[i, j]
        equal = tirx.all(scores[i, other] == scores[i, j], other < j)
        return te.sum(tirx.if_then_else(tirx.any(better, equal), 1, 0), axis=other)

    return te.compute((m, count), rank, name="ranks")


def _of_best(logits: te.Tensor, ranks: te.Tensor, cluster: te.Tensor, chosen: int) -> te.Tensor:
    """logits f32[m, V], without those of tokens whose cluster i32[V] has a rank i32[m, c] from `chosen` on."""

    def logit(i: tirx.Var, token: tirx.Var) -> tirx.PrimExpr:
        rank = ranks[i, cluster[token].astype("int64")]
        return tirx.if_then_else(rank < chosen, logits[i, token], tirx.const(NEVER, "float32"))

    return te.compute(logits.shape, logit, name="of_best_clusters")
