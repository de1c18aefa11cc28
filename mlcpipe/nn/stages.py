"""A stage: a run of a model's layers that is compiled for a device of its own.

Hidden states cross the border as float32, which holds those of every dtype of activations.
"""

from __future__ import annotations

from tvm.relax.frontend import nn

from mlcpipe.bundle.states import windows_of
from mlcpipe.errors import ConfigError
from mlcpipe.nn import experts
from mlcpipe.nn.attention_spec import AttentionBlock
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.language_model import LanguageModel, Stage, blocks_of
from mlcpipe.nn.moe import Mixture


def check_stageable(model: LanguageModel) -> CausalLM:
    """The model. Raises ConfigError for one whose layers need more than the hidden states before them."""
    why = ""
    if not isinstance(model, CausalLM):
        why = "a model that embeds texts"
    elif model.facts.diffusion is not None:
        why = "blocks of tokens that see each other"
    elif model.model.per_layer is not None:
        why = "layers that get embeddings of their own beside hidden states"
    elif model.model.streams is not None:
        why = "layers with several streams of hidden states"
    if why or not isinstance(model, CausalLM):
        raise ConfigError(
            f"no stages of a model of {model.facts.model_type}", expected="layers that pass on hidden states alone",
            found=why, next_step="compile it for one device",
        )  # fmt: skip
    return model


def cut(model: LanguageModel, layers: range, away: range = range(0)) -> CausalLM:
    """Leave only a stage's layers in a model that has its dtypes; all parameters keep their names.

    The experts of the layers `away` are on another device.

    The first stage keeps the embedding, the last one norm and output, and an embedding that the output shares. Raises
    ConfigError as `check_stageable` does, for a run that is not in the model, and for layers that use what an earlier
    stage has.
    """
    whole = check_stageable(model)
    count = len(whole.model.layers)
    if not 0 <= layers.start < layers.stop <= count or layers.step != 1:
        raise ConfigError("layers of a stage", expected=f"a run of 0 to {count}", found=f"{layers.start}:{layers.stop}")
    for index in layers:
        for block in blocks_of(whole.model.layers[index], AttentionBlock):
            if block.spec.reads is not None and block.spec.reads not in layers:
                raise ConfigError(
                    f"layer {index} reads the keys and values of layer {block.spec.reads}",
                    expected="both in one stage", next_step=f"cut before layer {block.spec.reads}, or elsewhere",
                )  # fmt: skip
    moved = [index for index in layers if index in away and any(blocks_of(whole.model.layers[index], Mixture))]
    stage = Stage(layers, count, windows_of(whole.states()), calls=bool(moved))
    owned = {name for name, _ in whole.named_parameters()}
    decoder = whole.model
    decoder.layers = nn.ModuleList(
        [layer if index in layers else nn.Module() for index, layer in enumerate(decoder.layers)]
    )
    decoder.span = layers
    if not stage.first:
        decoder.embed_positions = decoder.embedding_norm = None
    if not (stage.first or (stage.last and whole.facts.tied)):
        decoder.embed_tokens = None
    if not stage.last:
        decoder.norm = None
        if not whole.facts.tied:
            del whole.lm_head
    if not {name for name, _ in whole.named_parameters()} <= owned:
        raise ConfigError("layers of several stages share weights", expected="weights of one layer each")
    whole.draft_head = whole.own_head = whole.tower = None
    whole.stage = stage
    if moved:
        experts.move(whole, moved)
    return whole


def cut_experts(model: LanguageModel, layers: range) -> CausalLM:
    """Leave only the experts of some layers, for a device of their own; all parameters keep their names.

    Raises ConfigError as `check_stageable` does, and for layers without experts.
    """
    whole = check_stageable(model)
    stage = Stage(layers, len(whole.model.layers), windows_of(whole.states()), alone=True)
    whole.draft_head = whole.own_head = whole.tower = None
    experts.keep_alone(whole, layers)
    whole.stage = stage
    return whole
