"""Gemma 4's tower (Google 2026): sandwiched layers with 2D positions, the mean of squares of patches, one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.bundle.model_info import VisionInfo
from mlcpipe.errors import ConfigError
from mlcpipe.nn import definitions
from mlcpipe.nn.attention_spec import AttentionSpec
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import AttendingLayer, Rotation
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Embedding, Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import scaled
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.axial import COLUMN_BITS, axial_rotation
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, in_layers
from mlcpipe.vision.pooled import mean_of
from mlcpipe.vision.preprocessor import HALF, WHERE, preprocessor_fields, resample

_BEGIN, _END = "<|image>", "<image|>"
_SOFT_TOKENS = (70, 140, 280, 560, 1120)


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for pictures of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    fields, text = Fields(config), Fields(config).table("text_config")
    of_text = Fields(text, "config.json text_config")
    vision = Fields(fields.table("vision_config"), "config.json vision_config")
    body, facts = _body(vision, str(config["model_type"]))
    width, merge = of_text.integer("hidden_size", 2304), vision.integer("pooling_kernel_size", 3, high=16)
    given = preprocessor_fields(
        preprocessor, do_resize=(True, None), do_normalize=(False, None), patch_size=(body.patch, None),
        pooling_kernel_size=(merge, None),
    )  # fmt: skip
    rows = given.integer("max_soft_tokens", 280)
    if rows not in _SOFT_TOKENS or rows * merge > body.positions:
        raise ConfigError(
            "field max_soft_tokens", where=WHERE, found=rows,
            expected=f"one of {_SOFT_TOKENS}, for {body.positions} positions",
        )  # fmt: skip
    ahead = fields.get("use_bidirectional_attention", of_text.get("use_bidirectional_attention")) == "vision"
    if ahead and (of_text.integer("sliding_window", 512) < rows or of_text.get("num_kv_shared_layers", 0)):
        raise ConfigError(
            "field use_bidirectional_attention", where=of_text.where, found="vision",
            expected=f"windows of {rows} tokens or more, and no layers that read others' keys",
        )  # fmt: skip
    info = VisionInfo(
        processor="gemma4",
        settings={"most": rows, "resample": resample(given, 3), "patch": body.patch, "merge": merge},
        mean=HALF,
        std=HALF,
        token=fields.integer("image_token_id", 258880, low=0),
        row_token=of_text.integer("pad_token_id", 0, low=0),
        ahead="windows" if ahead else "",
        rows=rows,
        merged=merge * merge,
        numbers=3 * body.patch**2,
        width=width,
        page_bytes=1,
    )
    projector = _Projector(facts.hidden_size, merge * merge, width, body.eps, vision.flag("standardize", False))
    return Tower(facts, body, projector, info)


def _body(fields: Fields, model_type: str) -> tuple[Gemma4Vision, ModelFacts]:
    fields.refuse(attention_bias=[None, False], attention_dropout=[None, 0, 0.0])
    rope = Fields(fields.table("rope_parameters"), f"{fields.where} rope_parameters")
    rope.refuse(rope_type=[None, "default", "axial"])
    heads = fields.integer("num_attention_heads", 12, high=4096)
    dim = fields.integer("head_dim", 64, high=1024)
    if dim % 4:
        raise ConfigError("field head_dim", where=fields.where, expected="a multiple of 4", found=dim)
    kv_heads = fields.integer("num_key_value_heads", heads, high=heads)
    if heads % kv_heads:
        expected = f"a divisor of {heads}"
        raise ConfigError("field num_key_value_heads", where=fields.where, expected=expected, found=kv_heads)
    hidden, layers = fields.integer("hidden_size", 768), fields.integer("num_hidden_layers", 16, high=1024)
    body = Gemma4Vision(
        AttentionSpec(hidden, heads, kv_heads, dim, scale=1.0),
        fields.integer("intermediate_size", 3072),
        layers,
        act=str(fields.get("hidden_activation", "gelu_pytorch_tanh")),
        eps=fields.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
        patch=fields.integer("patch_size", 16, high=1024),
        positions=fields.integer("position_embedding_size", 10240, high=1 << COLUMN_BITS),
        clipped=fields.flag("use_clipped_linears", False),
        theta=rope.number("rope_theta", 100.0, low=1.0),
    )
    return body, ModelFacts(model_type, 0, hidden, layers, 1, (), ())


class Gemma4Vision(nn.Module):
    """Embeddings and layers; the first half of a head turns with the column, the other with the row."""

    def __init__(
        self, spec: AttentionSpec, width: int, count: int, *, act: str, eps: float, patch: int, positions: int,
        clipped: bool, theta: float,
    ) -> None:  # fmt: skip
        self.patch, self.positions, self.eps = patch, positions, eps
        self.patch_embedder = _Embedder(spec.hidden_size, patch, positions)
        self.encoder = _Layers(spec, width, count, act, eps, clipped)
        half = spec.head_dim // 2
        self.frequencies = [theta ** (-2 * i / half) for i in range(half // 2)]

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        x = self.patch_embedder(patches, places)
        rotation = axial_rotation(places, self.frequencies, self.frequencies, columns_first=True)
        for layer in self.encoder.layers:
            x = layer(x, kv, rotation)
        return x


class _Embedder(nn.Module):
    """A patch's projection plus the vectors of its column and its row."""

    def __init__(self, hidden_size: int, patch: int, positions: int) -> None:
        self.positions = positions
        self.input_proj = Linear(3 * patch * patch, hidden_size, quantize=False)
        self.table = Embedding(2 * positions, hidden_size, quantize=False)
        self.table.weight.attrs["sources"] = [["position_embedding_table"]]

    def forward(self, patches: Tensor, places: Tensor) -> Tensor:
        """patches [m, 3 * patch * patch], places i32[m] -> [m, hidden]."""
        columns, rows = op.tensor_expr_op(self._ids, "places", [places])
        return op.add(self.input_proj(patches), op.add(self.table(columns), self.table(rows)))

    def _ids(self, places: te.Tensor) -> list[te.Tensor]:
        columns = te.compute(places.shape, lambda i: places[i] & (1 << COLUMN_BITS) - 1, name="columns")
        return [columns, te.compute(places.shape, lambda i: (places[i] >> COLUMN_BITS) + self.positions, name="rows")]


class _Layers(nn.Module):
    def __init__(self, spec: AttentionSpec, width: int, count: int, act: str, eps: float, clipped: bool) -> None:
        self.layers = nn.ModuleList([_Layer(spec, width, i, act, eps, clipped) for i in range(count)])


class _Layer(AttendingLayer):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, spec: AttentionSpec, width: int, layer: int, act: str, eps: float, clipped: bool) -> None:
        self.attention, hidden = spec, spec.hidden_size
        self.self_attn = _Attention(spec, layer, eps, clipped)
        self.mlp = _Mlp(hidden, width, act, clipped)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)

    def forward(self, x: Tensor, kv: StepStates, rotation: Rotation) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        x = op.add(x, self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), kv, rotation)))
        return op.add(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


class _Attention(nn.Module):
    """Norms over heads of q, k and v, then RoPE, whose pairs lie in halves of a head: rows of q and k are stored so
    that they lie in the whole.
    """

    def __init__(self, spec: AttentionSpec, layer: int, eps: float, clipped: bool) -> None:
        self.spec, self.layer = spec, layer
        hidden, dim, quarter = spec.hidden_size, spec.head_dim, spec.head_dim // 4
        order = np.concatenate([np.arange(at * quarter, (at + 1) * quarter) for at in (0, 2, 1, 3)]).astype(np.int32)

        def of_heads(count: int) -> Any:
            return (np.arange(count, dtype=np.int32)[:, None] * dim + order).reshape(-1)

        self.q_proj = _Clipped(hidden, spec.q_size, clipped, of_heads(spec.num_heads))
        self.k_proj = _Clipped(hidden, spec.kv_size, clipped, of_heads(spec.num_kv_heads))
        self.v_proj, self.o_proj = _Clipped(hidden, spec.kv_size, clipped), _Clipped(spec.q_size, hidden, clipped)
        self.q_norm, self.k_norm, self.v_norm = RMSNorm(dim, eps), RMSNorm(dim, eps), RMSNorm(dim, eps, weight=False)
        for norm in (self.q_norm, self.k_norm):
            assert norm.weight is not None
            norm.weight.attrs["order"] = order

    def forward(self, x: Tensor, kv: StepStates, rotation: Rotation) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        spec, m = self.spec, x.shape[0]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q = self.q_norm(op.reshape(self.q_proj(x), (m, heads, dim)))
        k = self.k_norm(op.reshape(self.k_proj(x), (m, kv_heads, dim)))
        v = self.v_norm(op.reshape(self.v_proj(x), (m, kv_heads, dim)))
        func = definitions.apply_rope(heads, kv_heads, dim, dim, x.dtype, x.dtype)
        out = Tensor.placeholder((m, heads + 2 * kv_heads, dim), x.dtype)
        joined = op.tensor_ir_op(func, "rope", [q, k, v, *rotation], out)
        return self.o_proj(kv.attend(self.layer, spec, joined))


class _Mlp(nn.Module):
    def __init__(self, hidden: int, width: int, act: str, clipped: bool) -> None:
        self.act = activation(act)
        self.gate_proj, self.up_proj = _Clipped(hidden, width, clipped), _Clipped(hidden, width, clipped)
        self.down_proj = _Clipped(width, hidden, clipped)

    def forward(self, x: Tensor) -> Tensor:
        """[m, hidden] -> [m, hidden]."""
        return self.down_proj(op.multiply(self.act(self.gate_proj(x)), self.up_proj(x)))


class _Clipped(nn.Module):
    """A linear layer, whose inputs and outputs the file bounds if `clipped`."""

    def __init__(self, in_features: int, out_features: int, clipped: bool, order: Any = None) -> None:
        self.clipped = clipped
        self.linear = Linear(in_features, out_features, quantize=False, order=order)
        if clipped:
            self.input_min, self.input_max = nn.Parameter((1,)), nn.Parameter((1,))
            self.output_min, self.output_max = nn.Parameter((1,)), nn.Parameter((1,))

    def forward(self, x: Tensor) -> Tensor:
        """[m, in_features] -> [m, out_features]."""
        if not self.clipped:
            return self.linear(x)
        x = op.tensor_expr_op(_bounded, "bounded", [x, self.input_min, self.input_max])
        return op.tensor_expr_op(_bounded, "bounded", [self.linear(x), self.output_min, self.output_max])


def _bounded(x: te.Tensor, low: te.Tensor, high: te.Tensor) -> te.Tensor:
    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        return tirx.min(tirx.max(x[i, j], low[0].astype(x.dtype)), high[0].astype(x.dtype))

    return te.compute(x.shape, element, name="bounded")


class _Projector(nn.Module):
    """The mean of a square's patches times sqrt(hidden), (x - std_bias) * std_scale, a norm, and one matrix."""

    def __init__(self, hidden: int, merged: int, width: int, eps: float, standardize: bool) -> None:
        self.hidden, self.merged, self.standardize = hidden, merged, standardize
        if standardize:
            self.std_bias, self.std_scale = nn.Parameter((hidden,)), nn.Parameter((hidden,))
        self.norm = RMSNorm(hidden, eps, weight=False)
        self.embedding_projection = Linear(hidden, width, quantize=False)

    def forward(self, x: Tensor, t: tirx.Expr) -> list[Tensor]:
        """[t * merged, hidden] -> one part [t, width]."""
        x = op.reshape(x, (t, self.merged * self.hidden))
        x = scaled(op.tensor_expr_op(lambda given: mean_of(given, self.merged), "mean_of", [x]), self.hidden**0.5)
        if self.standardize:
            x = op.multiply(op.subtract(x, self.std_bias), self.std_scale)
        return [self.embedding_projection(self.norm(x))]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """As published: up to 280 rows. Those of a picture see each other in models without embeddings of each layer."""
    vision, text = whole["vision_config"], whole["text_config"]
    heads = vision["num_attention_heads"]
    dim = file.shape("v.blk.0.attn_q.weight")[0] // heads
    vision |= {
        "head_dim": dim,
        "num_key_value_heads": file.shape("v.blk.0.attn_k.weight")[0] // max(dim, 1),
        "rms_norm_eps": vision.pop("layer_norm_eps"),
        "pooling_kernel_size": file.integer("projector.scale_factor", 3),
        "position_embedding_size": file.shape("v.position_embd.weight")[-2],
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in file,
        "standardize": "v.std_bias" in file,
    }
    whole["image_token_id"] = file.token("<|image|>")
    whole["use_bidirectional_attention"] = None if text.get("hidden_size_per_layer_input") else "vision"
    preprocessor.clear()  # the tower reads 2 x - 1
    preprocessor |= {"patch_size": vision["patch_size"], "max_soft_tokens": 280, "resample": 3}


_PROJECTIONS = {
    **{f"attn_{x}": f"self_attn.{x}_proj.linear" for x in "qkv"},
    "attn_out": "self_attn.o_proj.linear",
    **{f"ffn_{x}": f"mlp.{x}_proj.linear" for x in ("gate", "up", "down")},
}
MMPROJ = Mmproj(
    "gemma4v",
    {"gemma4_text": "gemma4"},
    _complete,
    {
        "v.patch_embd": "tower.model.patch_embedder.input_proj",
        "v.position_embd.weight": "tower.model.patch_embedder.position_embedding_table",
        **in_layers(
            "tower.model.encoder.layers",
            {
                **_PROJECTIONS,
                **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
                "ln1": "input_layernorm",
                "attn_post_norm": "post_attention_layernorm",
                "ln2": "pre_feedforward_layernorm",
                "ffn_post_norm": "post_feedforward_layernorm",
            },
        ),
        "v.std_bias": "tower.projector.std_bias",
        "v.std_scale": "tower.projector.std_scale",
        "mm.input_projection": "tower.projector.embedding_projection",
    },
    channels_last=True,
)
