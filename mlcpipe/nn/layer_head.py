"""A draft head of one decoder layer with pages of its own: the functions that prompts, answers and drafts call."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.errors import ConfigError
from mlcpipe.nn.draft_head import DraftHead
from mlcpipe.nn.rope import Rope, cos_sin
from mlcpipe.nn.rows import columns, rows_of, write_rows
from mlcpipe.nn.step_states import StepStates, argument

NEVER = -1e30  # the logit of a token that a head does not know


class LayerHead(DraftHead):
    """`draft_prompt` adds rows of a prompt to the pages, `draft_first` predicts from the model's hidden states, and
    `draft_next` continues from a prediction.
    """

    prompts = True

    def __init__(self, module: nn.Module, rope: Rope, hidden_size: int) -> None:
        """`hidden_size` is that of the rows from which `draft_next` continues."""
        self.module, self.rope, self.hidden_size = module, rope, hidden_size
        if rope.depends_on_length:
            raise ConfigError("the draft head's frequencies of RoPE follow the length", expected="fixed ones")
        for param in module.parameters():
            param.attrs["reads"] = Fraction(0)

    @abstractmethod
    def states(self, model: Any) -> list[State]:
        """The states of the head's layer, in separate pages."""

    @abstractmethod
    def features(self, model: Any, kept: Tensor) -> Tensor:
        """Kept rows f32[m, kept * hidden] -> the layer's input [m, hidden]."""

    @abstractmethod
    def attend(self, embedded: Tensor, x: Tensor, kv: StepStates, cos: Tensor, sin: Tensor) -> Tensor:
        """embedded and x [m, hidden] -> [m, hidden]; keys and values of the rows are added to the pages."""

    @abstractmethod
    def continued(self, x: Tensor) -> Tensor:
        """What `attend` gave [d, hidden] -> what the next draft continues from [d, hidden]."""

    @abstractmethod
    def logits(self, model: Any, x: Tensor) -> Tensor:
        """What `continued` gave [d, hidden] -> logits f32[d, V]."""

    def table(self, model: Any) -> Any:
        """The embedding."""
        return model.model.embed_tokens

    def functions(self, model: Any) -> Mapping[str, Callable[..., Tensor]]:
        """As `DraftHead.functions`."""
        return {
            "draft_prompt": partial(self._prompt, model),
            "draft_first": partial(self._first, model),
            "draft_next": partial(self._next, model),
        }

    def _prompt(self, model: Any, tokens: Tensor, features: Tensor, step: Tensor, pages: list[Tensor]) -> Tensor:
        """tokens i32[n], features f32[n, kept * hidden] of the rows before them -> the pages with their keys."""
        kv = self._cache(model, step, pages, prefill_rows=True)
        self._attend(model, kv, tokens, self.features(model, features))
        return kv.tensors[0]

    def _first(
        self, model: Any, tokens: Tensor, features: Tensor, rows: Tensor, hidden: Tensor, step: Tensor,
        logits: Tensor, pages: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """tokens i32[b], features f32[b, kept * hidden] of the rows before them -> logits f32[d, V] of the rows i32[d].

        They are written to `logits`, and the input of `draft_next` to `hidden` f32[d, hidden].
        """
        kv = self._cache(model, step, pages, prefill_rows=False)
        x = self._attend(model, kv, tokens, self.features(model, features))
        return self._guess(model, op.tensor_expr_op(rows_of, "rows", [x, rows]), hidden)

    def _next(
        self, model: Any, tokens: Tensor, hidden: Tensor, step: Tensor, logits: Tensor, pages: list[Tensor]
    ) -> Tensor:
        """The last sampled tokens i32[d], and `hidden` f32[d, hidden], which is replaced -> logits f32[d, V]."""
        kv = self._cache(model, step, pages, prefill_rows=False)
        x = columns(hidden, 0, self.hidden_size, model.dtype)
        return self._guess(model, self._attend(model, kv, tokens, x), hidden)

    def _cache(self, model: Any, step: Tensor, pages: list[Tensor], prefill_rows: bool) -> StepStates:
        return StepStates(model, self.states(model), step, list(pages), prefill_rows)

    def _attend(self, model: Any, kv: StepStates, tokens: Tensor, x: Tensor) -> Tensor:
        cos, sin = cos_sin(self.rope, kv.positions(tokens.shape[0]), None)
        return self.attend(self.table(model)(tokens), x, kv, cos, sin)

    def _guess(self, model: Any, x: Tensor, hidden: Tensor) -> Tensor:
        x, dtype = self.continued(x), x.dtype
        return self.logits(model, columns(write_rows([x], hidden), 0, self.hidden_size, dtype))

    def spec(self, model: Any) -> dict[str, Any]:
        """As `DraftHead.spec`."""
        tensor, d, vocab = nn.spec.Tensor, self.hidden_size, model.facts.vocab_size
        kept = self.kept_size(model)
        cache = {
            "step": tensor(["k"], "int32"),
            "pages": argument(self.states(model)),
            "$": {"param_mode": "plain", "effect_mode": "none"},
        }

        def rows(m: str) -> dict[str, Any]:
            return {"tokens": tensor([m], "int32"), **cache}

        def out(m: str) -> dict[str, Any]:
            return {"hidden": tensor([m, d], "float32"), "logits": tensor([m, vocab], "float32")}

        return {
            "draft_prompt": {**rows("n"), "features": tensor(["n", kept], "float32")},
            "draft_first": {
                **rows("b"), **out("d"), "features": tensor(["b", kept], "float32"), "rows": tensor(["d"], "int32")
            },
            "draft_next": {**rows("d"), **out("d")},
        }  # fmt: skip
