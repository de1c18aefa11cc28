"""A tower: patches of a picture become rows beside a text's embeddings, in a function of the model's library."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.memory import tower_pages
from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.bundle.states import State
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.encoder_layer import AttendingLayer
from mlcpipe.nn.language_model import LanguageModel, ModelFacts, blocks_of
from mlcpipe.nn.mrope import Layout
from mlcpipe.nn.rows import write_rows
from mlcpipe.nn.step_states import StepStates, argument
from tir_schedules.step_layout import HEADER


class Tower(LanguageModel):
    """`model` is called as model(patches [m, numbers], places i32[m, info.places], kv); places are i32[m] if it is 1.

    `projector` is called as projector(what `model` returned, t) -> a list of parts, whose columns are side by side in
    the t rows. A row is made of `info.merged` patches, which follow each other. The patches of a call attend to each
    other; keys and values are in pages only during a layer. No decode step reads the weights. `facts` are those of the
    layers.
    """

    def __init__(
        self, facts: ModelFacts, body: nn.Module, projector: nn.Module, info: VisionInfo,
        layout: Layout | None = None, usual: VisionInfo | None = None,
    ) -> None:  # fmt: skip
        """`layout` is that of the text's RoPE, if it has three positions of each row. `info` is for the largest
        pictures, `usual` for those of an engine that is not asked for them.
        """
        super().__init__(facts)
        self.model, self.projector, self.info, self.layout = body, projector, info, layout
        self.usual = info if usual is None else usual.model_copy(update={"largest": info.rows})
        for param in (*body.parameters(), *projector.parameters()):
            param.attrs["reads"] = Fraction(0)

    def attentions(self) -> list[AttentionSpec]:
        """As `LanguageModel.attentions`."""
        return [layer.attention for layer in blocks_of(self.model, AttendingLayer)]

    def states(self) -> list[State]:
        """One state for all layers: a layer's keys and values are not needed after it."""
        return [self.attention_state(self.attentions()[0], "tower", *range(self.facts.num_layers))]

    def described(self) -> VisionInfo:
        """For the manifest, once the dtypes are set."""
        return self.usual.model_copy(update={"page_bytes": self.states()[0].unit_bytes})

    def encode_picture(
        self, patches: Tensor, places: Tensor, step: Tensor, rows: Tensor, states: list[Tensor]
    ) -> Tensor:
        """patches f32[t, merged * numbers] and places i32[t, merged * places] -> f32[t, width], written to `rows`.

        `step` and `states` are those of `StepStates`, of one sequence with t * merged rows.
        """
        kv, t, merged = StepStates(self, self.states(), step, states, True, True), patches.shape[0], self.info.merged
        x = op.reshape(patches, (t * merged, self.info.numbers))
        x = x if x.dtype == self.dtype else op.astype(x, self.dtype)
        shape = (t * merged, self.info.places) if self.info.places > 1 else (t * merged,)
        return write_rows(self.projector(self.model(x, op.reshape(places, shape), kv), t), rows)

    def bounds(self) -> dict[str, int]:
        """The most rows of a call, and integers of its step, and of the one after it for windows."""
        rows, most = self.info.most * self.info.merged, []
        for sequences in (1, self.info.windows):
            size = HEADER + 4 * rows + 3 * sequences + 2 + tower_pages(self.info)  # `StepBuffer` has the arrays
            most.append(max(1024, 1 << (size - 1).bit_length()))
        return {"t": self.info.most, "step_size": sum(most)}

    def spec(self) -> dict[str, Any]:
        """Argument specifications of `encode_picture`, for `nn.Module.export_tvm`."""
        tensor, info = nn.spec.Tensor, self.info
        return {
            "encode_picture": {
                "patches": tensor(["t", info.merged * info.numbers], "float32"),
                "places": tensor(["t", info.merged * info.places], "int32"),
                "step": tensor(["step_size"], "int32"),
                "rows": tensor(["t", info.width], "float32"),
                "states": argument(self.states()),
                "$": {"param_mode": "plain", "effect_mode": "none"},
            }
        }
