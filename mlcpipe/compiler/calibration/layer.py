"""Single layers of a model as functions of their weights, compiled for this machine in float32.

Layers with the same function share one compilation: a model has one or two kinds of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor

from mlcpipe.bundle.memory import Units
from mlcpipe.bundle.states import State
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.build import build
from mlcpipe.compiler.export import prepare_model
from mlcpipe.devices.support.threads import use_threads
from mlcpipe.errors import ConfigError
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.language_model import LanguageModel
from mlcpipe.nn.module_builder import exported
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.rope import cos_sin
from mlcpipe.nn.step_states import StepStates, argument
from mlcpipe.passes import pipeline
from mlcpipe.passes.lowering import Lowering, Observed
from mlcpipe.quantization.layout import load_layout
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.support.defaults import LOCAL_TARGET, RTN
from mlcpipe.targets import compiled_variants, load_target
from mlcpipe.weights.table import Tensors, Weight, as_named, load, weight_table
from tir_schedules.step_layout import PAGE

RUN = "run_layer"


class _OneLayer(LanguageModel):
    """One decoder layer by number, or the norm after all of them, as an entry point."""

    def __init__(self, model: CausalLM, index: int) -> None:
        super().__init__(model.facts)
        self.dtype, self.kv_dtype, self.kernels = model.dtype, model.kv_dtype, model.kernels
        self.index, self.is_norm = index, index == model.facts.num_layers
        self.model: nn.Module = model.model.norm if self.is_norm else model.model.layers[index]

    def run_layer(self, x: Tensor, step: Tensor, states: list[Tensor]) -> Tensor:
        """x f32[n, hidden] -> [n, hidden]; `step` and `states` are those of `StepStates`."""
        if self.is_norm:
            return self.model(x)
        kv = StepStates(self, self.states(), step, states, prefill_rows=True)
        rows, rope = x.shape[0], self.facts.ropes[self.facts.rope_of[self.index]]
        lengths = kv.rope_lengths(rows) if rope.depends_on_length else None
        return self.model(x, kv, *cos_sin(rope, kv.positions(rows), lengths))

    def spec(self) -> dict[str, Any]:
        """Argument specifications of the entry point."""
        tensor = nn.spec.Tensor
        return {
            RUN: {
                "x": tensor(["n", self.facts.hidden_size], self.dtype),
                "step": tensor(["k"], "int32"),
                "states": argument(self.states()),
                "$": {"param_mode": "plain", "effect_mode": "none"},
            }
        }


@dataclass(frozen=True, eq=False)
class LayerFunction:
    """A compiled layer. `weights` are those of the layer that it is for, `observed` the inputs it returns too.

    `states` are what it keeps; a text is computed at once, so that what is in them before does not matter.
    """

    function: Any
    weights: tuple[Weight, ...]
    observed: tuple[Observed, ...]
    states: Any

    def params(self, tensors: Tensors) -> Any:
        """Its weights in the order of the function's arguments."""
        arrays = (array for weight in self.weights for _, array, _ in load(weight, tensors, RTN))
        return tvm_ffi.convert([tvm.runtime.tensor(array) for array in arrays])

    def sources(self, observed: Observed) -> list[tuple[str, ...]]:
        """The checkpoint's tensors that multiply an input: per expert, or for all rows."""
        named = {weight.name: weight for weight in self.weights}
        groups = [named[name].sources for name in observed.names]
        return [tuple(source for group in several for source in group) for several in zip(*groups)]


@dataclass(frozen=True)
class TensorNames:
    """The checkpoint's names of a model's tensors: `prefix` begins them, `table` is the embedding's."""

    names: CheckpointNames
    prefix: str
    table: str

    @staticmethod
    def of(model: CausalLM, tensors: Tensors) -> TensorNames:
        """Those of a checkpoint."""
        tables = model.names.candidates("model.embed_tokens.weight")
        table = next((name for name in tables if name in tensors.tensors), tables[0])
        found = TensorNames(model.names, "", table)
        return replace(found, prefix=table.removesuffix(found.named("embed_tokens.weight")))

    def named(self, name: str) -> str:
        """The name, without the prefix, of a tensor of the model."""
        return self.names.published(f"model.{name}").removeprefix("model.")

    def of_layer(self, index: int) -> Callable[[str], str]:
        """What gives the name of a tensor of a layer."""
        return lambda name: self.prefix + self.named(f"layers.{index}.{name}")


def model_of(
    checkpoint: Checkpoint, *, what: str = "a calibration text", without: str = "use --method rtn"
) -> CausalLM:
    """The model of a checkpoint for this machine; messages say `what` is wanted, and what to do `without`.

    Raises ConfigError for an embedding model, and one whose layers cannot be computed one by one.
    """
    model = prepare_model(checkpoint.config, load_target(LOCAL_TARGET), load_scheme("q0f32"), "f32")
    if not isinstance(model, CausalLM):
        raise ConfigError(f"{what} is for models that write text", found=checkpoint.config["model_type"])
    more = (model.model.per_layer, model.model.streams)
    if more != (None, None) or any(of.reads is not None for of in model.attentions()):
        raise ConfigError(
            f"{what} for layers that read more than their input", where=checkpoint.path,
            expected="a model without streams, inputs for each layer or shared keys", next_step=without,
        )  # fmt: skip
    return model


def compile_layers(model: CausalLM, checkpoint: Tensors, rows: int) -> list[LayerFunction]:
    """The functions of all layers, for up to `rows` tokens, and last the norm's. Raises CompileError."""
    use_threads()  # before the first run: TVM's default is half of the processors
    known: list[tuple[tvm.IRModule, LayerFunction]] = []
    found = []
    for index in range(model.facts.num_layers + 1):
        mod, params = exported(_OneLayer(model, index), _OneLayer(model, index).spec())
        made = next((one for other, one in known if tvm_ffi.structural_equal(mod, other, map_free_vars=True)), None)
        if made is None:
            made = _compiled(mod, weight_table(params), rows, _OneLayer(model, index).states())
            known.append((mod, made))
        name = "norm" if index == model.facts.num_layers else f"layers.{index}"
        found.append(replace(made, weights=_named(made.weights, f"model.{name}.", checkpoint, model.names)))
    return found


def _compiled(mod: tvm.IRModule, weights: Sequence[Weight], rows: int, states: Sequence[State]) -> LayerFunction:
    target = load_target(LOCAL_TARGET)
    state = Lowering(
        mod, tuple(weights), target, compiled_variants(target)[0], load_scheme("q0f32"),
        load_layout(target.weight_layout), bounds={"n": rows},
    )  # fmt: skip
    state = pipeline.run(state, pipeline.LAYER, pipeline.OPERATORS, pipeline.MEMORY, pipeline.SCHEDULE)
    machine = relax.VirtualMachine(build(state).jit(), tvm.cpu())
    units = Units((-(-rows // PAGE),), 1)
    made = [np.zeros((units.of(states, one), one.unit_items), one.dtype) for one in states]
    return LayerFunction(machine[RUN], state.weights, state.observed, tvm_ffi.convert([*map(tvm.runtime.tensor, made)]))


def _named(weights: Sequence[Weight], prefix: str, checkpoint: Tensors, names: CheckpointNames) -> tuple[Weight, ...]:
    """The weights of a layer with the names of the checkpoint."""

    def named(source: str) -> str:
        return prefix + source.removeprefix("model.")

    renamed = [replace(w, sources=tuple(tuple(map(named, group)) for group in w.sources)) for w in weights]
    return as_named(renamed, checkpoint, names)[0]
