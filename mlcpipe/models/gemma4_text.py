"""Gemma 4 (Google 2026): heads by layer, layers that read the keys of others, rows for each layer, experts beside.

Models: the text of Gemma 4 E2B, E4B, 12B, 26B-A4B, 31B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.models.gemma2 import DEFAULTS as GEMMA2_DEFAULTS
from mlcpipe.models.gemma2 import GGUF_NAMES as GEMMA_NAMES
from mlcpipe.models.gemma2 import embedding_scale
from mlcpipe.models.gemma3n_text import reads_of
from mlcpipe.nn import per_layer
from mlcpipe.nn.assistant import AssistantHead, Clusters
from mlcpipe.nn.attention import Attention
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.base_config import BaseConfig, read_base
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.config import Fields, layer_windows
from mlcpipe.nn.decoder_layer import SANDWICH_NORM, DecoderLayer
from mlcpipe.nn.gguf import GgufFamily, GgufFile, by_layer, read_experts, read_windows
from mlcpipe.nn.kv_cache import PagedKVCache
from mlcpipe.nn.language_model import blocks_of
from mlcpipe.nn.linear import Float32, Linear
from mlcpipe.nn.moe import Routing, SparseMoE, expert_counts, route
from mlcpipe.nn.names import CheckpointNames
from mlcpipe.nn.norm import NormSpec, rms_norm
from mlcpipe.nn.per_layer import PerLayerInputs, PerLayerUpdate
from mlcpipe.nn.rope import Rope
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates

DEFAULTS = replace(GEMMA2_DEFAULTS, positions=1 << 17, num_kv_heads=4, norm=NormSpec())
FULL, SLIDING = "full_attention", "sliding_attention"
ROPES: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
ROPE_KINDS = ("default", "linear", "proportional")
NAMES = CheckpointNames(top=per_layer.NAMES, layer={
    **per_layer.LAYER_NAMES,
    "moe.experts": "experts",
    "moe.gate": "router",
    "moe.before": "pre_feedforward_layernorm_2",
    "moe.after": "post_feedforward_layernorm_2",
    "moe.after_mlp": "post_feedforward_layernorm_1",
})  # fmt: skip


def build(config: Mapping[str, Any]) -> CausalLM:
    """The module for a Gemma 4 text config.json. Raises ConfigError for unsupported fields."""
    base = read_base(
        config, DEFAULTS, use_bidirectional_attention=[None, "vision"], rope_scaling=[None], mlp_bias=[None, False]
    )
    fields, layers, hidden = base.fields, base.num_layers, base.hidden_size
    windows = _windows(base)
    size = fields.integer("hidden_size_per_layer_input", 256, low=0)
    reads = reads_of(base, windows)
    specs = attentions(base, windows, reads)
    ropes, rope_of = _ropes(base, specs)
    double = fields.flag("use_double_wide_mlp", False)

    def layer(i: int) -> Gemma4Layer:
        width = base.intermediate_size * (2 if double and reads[i] is not None else 1)
        made = Gemma4Layer(Attention(specs[i], i), base.mlp(width=width), hidden, base.norm, SANDWICH_NORM)
        made.moe = _experts(base) if fields.flag("enable_moe_block", False) else None
        made.per_layer = PerLayerUpdate(i, size, hidden, base.act, base.norm) if size else None
        return made

    facts = base.facts(
        ropes,
        rope_of,
        logit_softcap=fields.optional_number("final_logit_softcapping", None, low=1e-6) or 0.0,
        embedding_scale=embedding_scale(base),
    )
    inputs = None
    if size:
        tokens = fields.integer("vocab_size_per_layer_input", 262_144)
        inputs = PerLayerInputs(tokens, layers, size, hidden, base.norm)
    return CausalLM(facts, [layer(i) for i in range(layers)], base.norm, per_layer=inputs)


def build_assistant(config: Mapping[str, Any], model: CausalLM, clusters: Clusters | None) -> AssistantHead:
    """The assistant of a Gemma 4 model whose `text_config` is given. Raises ConfigError for another model's."""
    base = read_base(
        config, DEFAULTS, use_bidirectional_attention=[None, "vision"], rope_scaling=[None], mlp_bias=[None, False],
        enable_moe_block=[None, False], use_double_wide_mlp=[None, False], hidden_size_per_layer_input=[0],
    )  # fmt: skip
    fields, target = base.fields, model.facts
    fields.refuse(num_kv_shared_layers=[None, 0, base.num_layers])
    kept = {block.spec.window: block for block in blocks_of(model.model, Attention) if not block.reads_another}
    windows = _windows(base)
    if target.model_type != "gemma4_text" or any(window not in kept for window in windows):
        raise ConfigError(
            "an assistant of a Gemma 4 model", where=fields.where, expected="one with layers of each of its kinds",
            found=f"{target.model_type} with windows of {sorted(one or 0 for one in kept)}",
        )  # fmt: skip
    specs = _specs(base, windows, [kept[window].layer for window in windows])
    _check_read(fields, [(spec, kept[window].spec) for spec, window in zip(specs, windows)])
    # A window ends at the last token, which has no keys yet.
    specs = [spec if spec.window is None else replace(spec, window=spec.window - 1) for spec in specs]
    ropes, rope_of = _ropes(base, specs)
    layers = [
        Gemma4Layer(Attention(spec, i), base.mlp(), base.hidden_size, base.norm, SANDWICH_NORM)
        for i, spec in enumerate(specs)
    ]
    sizes = base.hidden_size, target.hidden_size, target.vocab_size
    return AssistantHead(layers, ropes, rope_of, base.norm, *sizes, clusters)


def _windows(base: BaseConfig) -> list[int | None]:
    """The window of each layer; the last one has none."""
    window, count = base.fields.integer("sliding_window", 512, low=2), base.num_layers
    return [*layer_windows(base.fields, window, [(i + 1) % 6 != 0 for i in range(count)])[:-1], None]


def attentions(base: BaseConfig, windows: Sequence[int | None], reads: Sequence[int | None]) -> list[AttentionSpec]:
    """The attention of each layer, which may read the keys of one before."""
    specs = _specs(base, windows, reads)
    _check_read(base.fields, [(spec, specs[spec.reads]) for spec in specs if spec.reads is not None])
    return specs


def _specs(base: BaseConfig, windows: Sequence[int | None], reads: Sequence[int | None]) -> list[AttentionSpec]:
    """The attention of each layer: full ones have heads of their own width and number, by either way to say so."""
    fields = base.fields
    bias, same = fields.flag("attention_bias", False), fields.flag("attention_k_eq_v", False)
    wide = {"head_dim": fields.integer("global_head_dim", 512, high=1024)}
    if same and fields.get("num_global_key_value_heads") is not None:
        wide["num_kv_heads"] = fields.integer("num_global_key_value_heads", high=1024)
    stated = _stated_sizes(base)

    def sizes(i: int, window: int | None) -> dict[str, int]:
        if stated is None:
            return {} if window else wide
        return stated[i]

    return [
        base.attention(
            window=window, reads=reads[i], norm="head", value_norm=True, scale=1.0, qkv_bias=bias, o_bias=bias,
            keys_as_values=same and window is None, **sizes(i, window),
        )
        for i, window in enumerate(windows)
    ]  # fmt: skip


def _check_read(fields: Fields, pairs: Sequence[tuple[AttentionSpec, AttentionSpec]]) -> None:
    """Raises ConfigError where heads differ from those of the layer whose keys they read."""
    for spec, read in pairs:
        if (spec.head_dim, spec.num_kv_heads) != (read.head_dim, read.num_kv_heads):
            raise ConfigError(
                "field num_kv_shared_layers", where=fields.where,
                expected="layers with heads like those of the one whose keys they read",
                found=f"{spec.num_kv_heads} of {spec.head_dim}, {read.num_kv_heads} of {read.head_dim}",
            )  # fmt: skip


def _stated_sizes(base: BaseConfig) -> list[dict[str, int]] | None:
    """What `per_layer_config` says of each layer's heads; its keys are numbers, some with zeros before them."""
    if base.fields.get("per_layer_config") is None:
        return None
    table = Fields(base.fields.table("per_layer_config"), "config.json per_layer_config")
    sizes: list[dict[str, int]] = [{} for _ in range(base.num_layers)]
    layer_of = {str(i).zfill(digits): i for i in range(base.num_layers) for digits in range(1, 5)}
    names = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
    table.refuse(**{name: () for name in table.values if name not in layer_of})
    for key in table.values:
        own = Fields(table.table(key), table.where)
        own.refuse(**{name: () for name in own.values if name not in names})
        sizes[layer_of[key]] |= {to: own.integer(name, high=1024) for name, to in names.items() if name in own.values}
    return sizes


def _ropes(base: BaseConfig, specs: Sequence[AttentionSpec]) -> tuple[list[Rope], list[int]]:
    """The frequencies of each kind of layer, and which are those of each layer."""
    tables = Fields(base.fields.get("rope_parameters", ROPES), "config.json rope_parameters")
    tables.refuse(**{name: () for name in tables.values if name not in ROPES})
    kinds = [(SLIDING if spec.window else FULL, spec.head_dim) for spec in specs]
    known = list(dict.fromkeys(kinds))
    ropes = []
    for kind, size in known:
        table = tables.table(kind)
        whole = table.get("rope_type", table.get("type", "default")) == "default"  # in transformers, whatever is stated
        partial = None if whole else 1.0
        ropes.append(replace(base, head_dim=size).read_rope(table, base.theta, partial=partial, kinds=ROPE_KINDS))
    return ropes, [known.index(kind) for kind in kinds]


class Gemma4Layer(DecoderLayer):
    """A layer with four norms, whose MLP may have experts beside it; then its token's update, and a scale."""

    moe: Experts | None = None
    per_layer: PerLayerUpdate | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer_scalar = Float32((1,))

    def fed(self, y: Tensor) -> Tensor:
        """What the MLP, and the experts beside it, make of the residual stream [m, hidden]."""
        fed = super().fed(y)
        return fed if self.moe is None else op.add(self.moe.after_mlp(fed), self.moe(y))

    def forward(
        self, x: Tensor, kv: PagedKVCache | StepStates, cos: Tensor, sin: Tensor, inputs: Tensor | None = None
    ) -> Tensor:
        """x [m, hidden], inputs [m, layers * size] of `PerLayerInputs` -> [m, hidden]."""
        y = super().forward(x, kv, cos, sin)
        if self.per_layer is not None:
            y = op.add(y, self.per_layer(y, inputs))
        scalar = self.layer_scalar if y.dtype == "float32" else op.astype(self.layer_scalar, y.dtype)
        return op.multiply(y, scalar)


class Gate(nn.Module):
    """Logits of experts: proj(norm(x) * scale) / sqrt(hidden), the norm without other weights."""

    def __init__(self, hidden_size: int, experts: int, norm: NormSpec) -> None:
        self.eps, self.root, self.scale = norm.eps, hidden_size**0.5, nn.Parameter((hidden_size,))
        self.proj = Linear(hidden_size, experts, quantize=False)
        self.per_expert_scale = Float32((experts,))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, experts]."""
        return scaled(self.proj(rms_norm(x, self.eps, self.scale)), 1 / self.root)


class Experts(SparseMoE):
    """after(sum of weight_e * scale_e * expert_e(before(x))), routed by x. `after_mlp` is the dense MLP's norm."""

    def __init__(self, base: BaseConfig, width: int, routing: Routing) -> None:
        super().__init__(base.hidden_size, width, routing, base.act)
        self.gate = Gate(base.hidden_size, routing.experts, base.norm)
        self.before, self.after, self.after_mlp = (base.norm(base.hidden_size) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        weights, ids = route(self.gate(x), self.routing)
        scales = op.take(self.gate.per_expert_scale, op.reshape(ids, (ids.shape[0] * self.routing.chosen,)), axis=0)
        weights = op.multiply(weights, op.reshape(scales, weights.shape))
        return self.after(self.mixed(self.before(x), weights, ids))


def _complete_gguf(file: GgufFile, config: dict[str, Any]) -> None:
    """Heads are those of full layers in the file; MLPs of layers that share keys may be twice as wide."""
    layers, full = config["num_hidden_layers"], config["head_dim"]
    read_windows(file, config, 6, 512)
    shared = config["num_kv_shared_layers"] = file.integer("attention.shared_kv_layers", 0)
    widths, heads = (by_layer(file, key, layers) for key in ("feed_forward_length", "attention.head_count_kv"))
    width = config["intermediate_size"] = widths[0]
    double = config["use_double_wide_mlp"] = widths[-1] == 2 * width
    if widths != [width * (2 if double and i >= layers - shared else 1) for i in range(layers)]:
        raise file.error("feed_forward_length", "one width, or twice as much in layers that share keys", widths[:8])
    slides = [one == SLIDING for one in config["layer_types"]]
    sizes = {True: file.integer("attention.key_length_swa", full), False: full}
    config["per_layer_config"] = {
        str(i): {"head_dim": sizes[slide], "num_key_value_heads": count}
        for i, (slide, count) in enumerate(zip(slides, heads))
    }
    config |= {"num_key_value_heads": heads[0], "head_dim": sizes[True]}
    config["attention_k_eq_v"] = not slides[layers - 1] and f"blk.{slides.index(False)}.attn_v.weight" not in file
    config["hidden_size_per_layer_input"] = file.integer("embedding_length_per_layer_input", 0)
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    config |= {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": "blk.0.attn_q.bias" in file}
    config["final_logit_softcapping"] = file.number("final_logit_softcapping", 0.0) or None
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {
        FULL: {**scaling, "rope_theta": config.pop("rope_theta")},
        SLIDING: {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", 1e4)},
    }
    if file.integer("expert_count", 0):
        read_experts(file, config)
        config |= {"enable_moe_block": True, "top_k_experts": config.pop("num_experts_per_tok")}


GGUF = GgufFamily(
    "gemma4",
    _complete_gguf,
    {
        **GEMMA_NAMES,
        **per_layer.GGUF_NAMES,
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
    },
    {f"ffn_{x}_exps": f"experts.{{}}.{x}_proj" for x in ("gate", "up", "down")},
    rope="proportional",
    by_layer=True,
)


def _experts(base: BaseConfig) -> Experts:
    experts, chosen = expert_counts(base.fields)
    return Experts(base, base.fields.integer("moe_intermediate_size"), Routing(experts, chosen, normalize=True))
