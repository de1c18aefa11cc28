"""Gemma 3n (Google 2025): alternating updates of four streams, low-rank residuals, sparse MLPs, rows for each layer.

Models: the text of Gemma 3n E2B, E4B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.models.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from mlcpipe.models.gemma2 import GGUF_NAMES, embedding_scale
from mlcpipe.models.gemma3_text import DEFAULT_SLIDING_THETA, ropes_by_layer_type
from mlcpipe.nn import per_layer
from mlcpipe.nn.altup import AltUp, Streams
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.gguf import GgufFamily, GgufFile, by_layer, read_windows
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mlp import GatedMLP
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec
from mlcpipe.nn.per_layer import PerLayerInputs, PerLayerUpdate
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates

DEFAULTS = replace(GEMMA2_DEFAULTS, positions=1 << 15, num_kv_heads=2, norm=NormSpec(), theta=1e6)
DEFAULT_WIDTH = 16384
NAMES = CheckpointNames(
    top={
        **per_layer.NAMES,
        **{f"streams.{name}": f"altup_{name}" for name in ("projections", "unembed_projections")},
    },
    layer=per_layer.LAYER_NAMES,
)


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Gemma 3n text config.json. Raises ConfigError for unsupported fields."""
    stated = Fields(config).get("intermediate_size", DEFAULT_WIDTH)
    first = stated[0] if isinstance(stated, list) and stated else stated
    base = read_base({**dict(config.items()), "intermediate_size": first}, DEFAULTS, mlp_bias=[None, False])
    fields, layers, hidden = base.fields, base.num_layers, base.hidden_size
    widths = [Fields({"intermediate_size": one}).integer("intermediate_size") for one in _each(base, stated)]
    default = [0.95 * (i < 10 < layers) for i in range(layers)]
    sparsity = fields.get("activation_sparsity_pattern", default)
    shares = [Fields({"share": one}, "config.json activation_sparsity_pattern") for one in _each(base, sparsity)]
    windows = layer_windows(fields, fields.integer("sliding_window", 512), [(i + 1) % 5 != 0 for i in range(layers)])
    reads = reads_of(base, windows, 15)
    bias = fields.flag("attention_bias", False)
    specs = [
        base.attention(
            window=window, reads=read, norm="head", value_norm=True, scale=1.0, qkv_bias=bias, o_bias=bias
        )
        for window, read in zip(windows, reads)
    ]  # fmt: skip
    size = fields.integer("hidden_size_per_layer_input", 256)

    def layer(i: int) -> Gemma3nLayer:
        mlp = base.mlp(width=widths[i])
        if share := shares[i].number("share", low=0.0, high=0.9999):
            mlp.act = _Sparse(mlp, share)
        return Gemma3nLayer(base, Attention(specs[i], i), mlp, PerLayerUpdate(i, size, hidden, base.act, base.norm))

    facts = base.facts(
        ropes_by_layer_type(base, DEFAULT_SLIDING_THETA),
        [0 if window is None else 1 for window in windows],
        logit_softcap=fields.number("final_logit_softcapping", 30.0, low=1e-6),
        embedding_scale=embedding_scale(base),
    )
    tokens = fields.integer("vocab_size_per_layer_input", 262_144)
    return CausalLM(
        facts,
        [layer(i) for i in range(layers)],
        base.norm,
        per_layer=PerLayerInputs(tokens, layers, size, hidden, base.norm),
        streams=Streams(_streams(fields), hidden),
    )


def reads_of(base: BaseConfig, windows: Sequence[int | None], default: int = 0) -> list[int | None]:
    """Whose keys and values each layer reads, None: its own. Raises ConfigError if no layer before makes them."""
    count = base.fields.integer("num_kv_shared_layers", default, low=0, high=base.num_layers - 1)
    own = base.num_layers - count
    last = {windows[i]: i for i in range(own)}
    if any(window not in last for window in windows[own:]):
        raise ConfigError(
            "field num_kv_shared_layers", where=base.fields.where, found=count,
            expected="a layer of each type that makes keys and values",
        )  # fmt: skip
    return [None if i < own else last[window] for i, window in enumerate(windows)]


def _each(base: BaseConfig, stated: Any) -> list[Any]:
    """A value for each layer, of a list or one for all."""
    values = stated if isinstance(stated, list) else [stated] * base.num_layers
    if len(values) != base.num_layers:
        raise ConfigError(
            "a list by layer", where=base.fields.where, expected=f"{base.num_layers} values", found=len(values)
        )
    return values


def _streams(fields: Fields) -> int:
    return fields.integer("altup_num_inputs", 4, low=2, high=64)


class _Sparse:
    """act(max(0, gate - (mean + deviation * quantile))): the largest share of a row's gates, as if they were normal."""

    def __init__(self, mlp: GatedMLP, share: float) -> None:
        self.act, self.quantile = mlp.act, NormalDist().inv_cdf(share)

    def __call__(self, gate: Tensor) -> Tensor:
        """gate [m, width] -> [m, width]."""
        width = int(gate.shape[1])

        def mean(x: Tensor) -> Tensor:
            return scaled(op.sum(x, axis=-1, keepdims=True), 1 / width)

        apart = op.subtract(gate, mean(gate))
        deviation = op.sqrt(mean(op.multiply(apart, apart)))
        return self.act(op.relu(op.subtract(apart, scaled(deviation, self.quantile))))


class Laurel(nn.Module):
    """x + norm(right(left(x))): a residual of low rank."""

    def __init__(self, hidden_size: int, rank: int, norm: NormSpec) -> None:
        self.linear_left, self.linear_right = Linear(hidden_size, rank), Linear(rank, hidden_size)
        self.post_laurel_norm = norm(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        return op.add(x, self.post_laurel_norm(self.linear_right(self.linear_left(x))))


class Gemma3nLayer(nn.Module):
    """A layer over streams [m, count * hidden]; its token's row updates all streams but the first."""

    def __init__(self, base: BaseConfig, attention: Attention, mlp: GatedMLP, update: PerLayerUpdate) -> None:
        fields, hidden = base.fields, base.hidden_size
        self.self_attn, self.mlp, self.per_layer = attention, mlp, update
        count = _streams(fields)
        active = fields.integer("altup_active_idx", 0, low=0, high=count - 1)
        self.altup = AltUp(count, active, hidden, base.norm, fields.flag("altup_correct_scale", True))
        self.laurel = Laurel(hidden, fields.integer("laurel_rank", 64), base.norm)
        self.input_layernorm, self.post_attention_layernorm = base.norm(hidden), base.norm(hidden)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = base.norm(hidden), base.norm(hidden)

    def forward(
        self, streams: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor, inputs: Tensor
    ) -> Tensor:
        """streams [m, count * hidden], inputs [m, layers * size] of `PerLayerInputs` -> streams."""
        predicted = self.altup.predict(streams)
        x = self.altup.of_active(predicted)
        normed = self.input_layernorm(x)
        mixed = op.add(x, self.post_attention_layernorm(self.self_attn(normed, kv, cos, sin)))
        y = scaled(op.add(mixed, self.laurel(normed)), 2**-0.5)
        y = op.add(y, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y))))
        corrected = self.altup.correct(predicted, y)
        return self.altup.add_to_others(corrected, self.per_layer(self.altup.output(corrected), inputs))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Ranks of residuals are not in the file: all models have the usual one."""
    layers = config["num_hidden_layers"]
    read_windows(file, config, 5, 512)
    config["intermediate_size"] = by_layer(file, "feed_forward_length", layers)
    config["num_key_value_heads"] = by_layer(file, "attention.head_count_kv", layers)[0]
    config["num_kv_shared_layers"] = file.integer("attention.shared_kv_layers")
    config["altup_num_inputs"] = file.integer("altup.num_inputs")
    config["altup_active_idx"] = file.integer("altup.active_idx")
    config["hidden_size_per_layer_input"] = file.integer("embedding_length_per_layer_input")
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    config["final_logit_softcapping"] = file.number("final_logit_softcapping", 30.0)
    quantiles = file.numbers("activation_sparsity_scale", layers).tolist()  # minus infinity in dense layers
    config["activation_sparsity_pattern"] = [NormalDist().cdf(float(one)) for one in quantiles]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["rope_local_base_freq"] = file.number("rope.freq_base_swa", DEFAULT_SLIDING_THETA)


GGUF = GgufFamily(
    "gemma3n",
    _complete_gguf,
    {
        **GGUF_NAMES,
        **per_layer.GGUF_NAMES,
        "altup_proj": "altup_projections.{}",
        "altup_unembd_proj": "altup_unembed_projections.{}",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    by_layer=True,
)
