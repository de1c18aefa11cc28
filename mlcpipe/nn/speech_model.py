"""A model that hears: an encoder makes rows of a window of sound, and a decoder that attends to them writes text.

The decoder's own keys and values are pages like those of any language model. Those of the sound are pages of a second
kind: written once for a window, read by every step. A step of the sound says which: each of its sequences has all of
the window's keys, and no row adds any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.states import State
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.language_model import LanguageModel, ModelFacts
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rows import rows_of, write_rows
from mlcpipe.nn.step_states import StepStates


@dataclass(frozen=True)
class SoundShape:
    """A window of sound: `rows` of the encoder, each of two frames of `mels` numbers."""

    rows: int
    mels: int
    encoder: AttentionSpec
    layers: int


class SpeechModel(LanguageModel):
    """`body.encoder(features [t, 2 * mels], kv) -> [t, hidden]`, and
    `body.decoder(tokens i32[n], kv, sound) -> [n, hidden]`.

    `body.decoder.keep(heard [t, hidden], sound)` stores the keys and values of the sound, `body.decoder.project` makes
    logits. `facts` are those of the decoder, `of` is the attention of its layers to text.
    """

    def __init__(
        self, facts: ModelFacts, body: nn.Module, of: AttentionSpec, shape: SoundShape, names: CheckpointNames
    ) -> None:
        super().__init__(facts)
        self.model, self.of, self.shape, self.names = body, of, shape, names

    def attentions(self) -> list[AttentionSpec]:
        """As `LanguageModel.attentions`: those to text, and of the encoder."""
        return [*[self.of] * self.facts.num_layers, *[self.shape.encoder] * self.shape.layers]

    def states(self) -> list[State]:
        """Keys and values of the text."""
        return [self.attention_state(self.of, f"text.{i}", i) for i in range(self.facts.num_layers)]

    def sound_states(self) -> list[State]:
        """Keys and values of the sound, for each layer of the decoder."""
        return [self.attention_state(self.of, f"sound.{i}", i) for i in range(self.facts.num_layers)]

    def encoder_states(self) -> list[State]:
        """One state for all layers of the encoder: a layer's keys and values are not needed after it."""
        return [self._encoder.attention_state(self.shape.encoder, "encoder", *range(self.shape.layers))]

    @property
    def _encoder(self) -> LanguageModel:
        """The compiler's view of the encoder, whose keys and values are as exact as its activations."""
        view = LanguageModel(self.facts)
        view.dtype = view.kv_dtype = self.dtype
        view.kernels = self.kernels
        return view

    def encode_sound(self, features: Tensor, step: Tensor, heard: Tensor, states: list[Tensor]) -> Tensor:
        """features f32[t, 2 * mels] -> f32[t, hidden], written to `heard`; `step` has one sequence of t rows."""
        kv = StepStates(self._encoder, self.encoder_states(), step, states, True, True)
        x = features if features.dtype == self.dtype else op.astype(features, self.dtype)
        return write_rows([self.model.encoder(x, kv)], heard)

    def keep_sound(self, heard: Tensor, step: Tensor, sound: list[Tensor]) -> list[Tensor]:
        """The keys and values of rows f32[t, hidden] go to the pages that `step` says, in the states of all layers."""
        kv = StepStates(self, self.sound_states(), step, sound, True)
        self.model.decoder.keep(heard if heard.dtype == self.dtype else op.astype(heard, self.dtype), kv)
        return kv.tensors

    def prefill(
        self, tokens: Tensor, rows: Tensor, step: Tensor, heard: Tensor, logits: Tensor, states: list[Tensor],
        sound: list[Tensor],
    ) -> Tensor:  # fmt: skip
        """tokens i32[n] of prompts -> logits f32[r, vocab] of the rows i32[r]; `heard` i32 is the step of the sound."""
        x = self._hidden(tokens, step, heard, states, sound, prefill_rows=True)
        return self.logits(op.tensor_expr_op(rows_of, "rows", [x, rows]))

    def decode(
        self, tokens: Tensor, step: Tensor, heard: Tensor, logits: Tensor, states: list[Tensor], sound: list[Tensor]
    ) -> Tensor:
        """tokens i32[b], with decode's arithmetic -> logits f32[b, vocab]."""
        return self.logits(self._hidden(tokens, step, heard, states, sound, prefill_rows=False))

    def logits(self, hidden: Tensor) -> Tensor:
        """[m, hidden] -> f32[m, vocab]."""
        y = self.model.decoder.project(hidden)
        return y if y.dtype == "float32" else op.astype(y, "float32")

    def _hidden(
        self, tokens: Tensor, step: Tensor, heard: Tensor, states: list[Tensor], sound: list[Tensor],
        prefill_rows: bool,
    ) -> Tensor:  # fmt: skip
        kv = StepStates(self, self.states(), step, states, prefill_rows)
        to_sound = StepStates(self, self.sound_states(), heard, sound, prefill_rows, True)
        hidden: Tensor = self.model.decoder(tokens, kv, to_sound)
        return hidden

    def spec(self) -> dict[str, Any]:
        """Argument specifications of the functions, for `nn.Module.export_tvm`."""
        tensor, f, shape = nn.spec.Tensor, self.facts, self.shape
        plain = {"$": {"param_mode": "plain", "effect_mode": "none"}}
        step, vocab = tensor(["k"], "int32"), f.vocab_size
        kept = {"states": _argument(self.states(), "P"), "sound": _argument(self.sound_states(), "S"), **plain}
        steps = {"step": step, "heard": tensor(["l"], "int32")}
        return {
            "decode": {"tokens": tensor(["b"], "int32"), **steps, "logits": tensor(["b", vocab], "float32"), **kept},
            "prefill": {
                "tokens": tensor(["n"], "int32"), "rows": tensor(["r"], "int32"), **steps,
                "logits": tensor(["r", vocab], "float32"), **kept,
            },
            "encode_sound": {
                "features": tensor(["t", 2 * shape.mels], "float32"), "step": step,
                "heard": tensor(["t", f.hidden_size], "float32"), "states": _argument(self.encoder_states(), "E"),
                **plain,
            },
            "keep_sound": {
                "heard": tensor(["t", f.hidden_size], "float32"), "step": step, "sound": kept["sound"], **plain,
            },
        }  # fmt: skip


def _argument(table: Sequence[State], units: str) -> list[nn.spec.Tensor]:
    """A list of states, all with so many pages."""
    return [nn.spec.Tensor([units, state.unit_items], state.dtype) for state in table]
