"""Puts a family's blocks together: what its file says of each layer becomes a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm.relax.frontend import nn

from mlcpipe.nn.attention import Attention
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.decoder_layer import PRE_NORM, DecoderLayer, LayerForm
from mlcpipe.nn.next_token import NextTokenHead
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.rope import Rope, no_rope


class Mixer(NamedTuple):
    """A block that mixes tokens otherwise than attention: its attribute in a layer, and the module."""

    name: str
    block: nn.Module | None


_OF_MODEL = ("head_bias", "embedding_norm", "positions")


def decoder(
    base: BaseConfig,
    mixers: Sequence[AttentionSpec | Mixer | None],
    mlp: Callable[[int], nn.Module | None] | None = None,
    *,
    form: LayerForm | Sequence[LayerForm] = PRE_NORM,
    scale: float = 1.0,
    ropes: Sequence[Rope] | None = None,
    rope_of: Sequence[int] | None = None,
    rotated: Sequence[bool] | None = None,
    drafts: AttentionSpec | Mixer | None = None,
    norm: NormSpec | None = None,
    **options: Any,
) -> CausalLM:
    """A model of layers that attend, or mix tokens otherwise; None: a layer has an MLP alone.

    `mlp(i)` makes the MLP of layer i, if it has one, by default all are `base.mlp()`. `form` is that of all layers or
    of each. `scale` multiplies what a layer adds. `ropes` are `base.rope()` if they are not given, `rope_of[i]` is the
    one of layer i; layers that are not `rotated` have none. `drafts` attends in the layer that checkpoints have after
    the last one to draft tokens, if they have it, by the first rope or by `rope_of[count]`. `norm` comes after the last
    layer, by default one as those of layers. `options` are those of CausalLM and ModelFacts.
    """
    count = base.num_layers
    ropes = [base.rope()] if ropes is None else list(ropes)
    *of, of_draft = [0] * (count + 1) if rope_of is None else [*rope_of, 0][: count + 1]
    if rotated is not None and not all(rotated):
        ropes = ropes if any(rotated) else []
        of = [one if turned else len(ropes) for one, turned in zip(of, rotated)]
        ropes = [*ropes, no_rope(base.head_dim)]
    forms = [form] * count if isinstance(form, LayerForm) else list(form)
    mlps = [base.mlp() if mlp is None else mlp(i) for i in range(count)]
    blocks = [_mixer(one, i) for i, one in enumerate(mixers)]
    layers = [
        DecoderLayer(block, mlps[i], base.hidden_size, base.norm, forms[i], scale, mixer_name=name)
        for i, (name, block) in enumerate(blocks)
    ]
    of_model = {name: options.pop(name) for name in _OF_MODEL if name in options}
    model = CausalLM(base.facts(ropes, of, **options), layers, norm or base.norm, **of_model)
    if drafts is not None and not ropes[of_draft].depends_on_length:
        block = _mixer(drafts, 0).block
        layer = DecoderLayer(block, base.mlp() if mlp is None else mlp(count), base.hidden_size, base.norm, forms[-1])
        model.own_head = NextTokenHead(layer, ropes[of_draft], base.norm, model.facts)
    return model


def _mixer(of: AttentionSpec | Mixer | None, layer: int) -> Mixer:
    if isinstance(of, AttentionSpec):
        return Mixer("self_attn", Attention(of, layer))
    return Mixer("self_attn", None) if of is None else of
