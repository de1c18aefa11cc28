"""GLM-OCR's tower (Z.ai 2026): Qwen2-VL's patches and axial RoPE, norms of heads, and a matrix that joins patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.nn import mrope
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.linear import Linear
from mlcpipe.nn.mlp import activation
from mlcpipe.nn.norm import LayerNorm, RMSNorm
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, in_layers
from mlcpipe.vision.processors.qwen2_vl import USUAL_ROWS, limited
from mlcpipe.vision.qwen2_vl import (
    MMPROJ_NAMES,
    AxialEncoder,
    axial_spec,
    axial_theta,
    complete_mmproj,
    patch_info,
    text_of,
)

_MERGER_EPS = 1e-5


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for patches of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    whole = Fields(config)
    vision = Fields(whole.table("vision_config"), "config.json vision_config")
    vision.refuse(attention_dropout=[None, 0, 0.0])
    hidden, width = vision.integer("hidden_size", 1024), vision.integer("out_hidden_size", 1536)
    text = text_of(config, vision, "out_hidden_size", width)
    spec = axial_spec(
        vision, hidden, vision.integer("intermediate_size", 4096), "silu", num_heads=16,
        up=("mlp.gate_proj", "mlp.up_proj"), down=("mlp.down_proj",),
    )  # fmt: skip
    bias = vision.flag("attention_bias", True)
    spec = replace(
        spec, eps=vision.number("rms_norm_eps", 1e-5, low=0.0, high=1.0), gated=True, rms=True, attention_bias=bias,
        mlp_bias=bias, head_norms=("attn.q_norm", "attn.k_norm"),
    )  # fmt: skip
    layers = vision.integer("depth", 24, high=1024)
    info = patch_info(
        vision, preprocessor, whole.integer("image_token_id", 59280, low=0), width, patch=14, processor="glm_ocr",
        pixels=(112 * 112, 28 * 28 * 15000), all_frames=True,
    )  # fmt: skip
    facts = ModelFacts(str(config["model_type"]), 0, hidden, layers, info.rows * info.merged, (), ())
    body = AxialEncoder(spec, layers, info.numbers, axial_theta(vision), bias=True)
    layout = mrope.sectioned(mrope.sections(text, (8, 12, 12)))
    return Tower(facts, body, _Projector(spec, info.merged, width), info, layout, limited(info, USUAL_ROWS))


class _Projector(nn.Module):
    """A norm, a matrix that joins the patches of a square (channel by channel), and the merger."""

    def __init__(self, spec: EncoderSpec, merged: int, width: int) -> None:
        self.hidden_size, self.merged = spec.hidden_size, merged
        self.post_layernorm = RMSNorm(spec.hidden_size, spec.eps)
        self.downsample = Linear(merged * spec.hidden_size, width, True, quantize=False)
        self.merger = _Merger(width, spec.act)

    def forward(self, states: list[Tensor], t: tirx.Expr) -> list[Tensor]:
        """Hidden states [t * merged, hidden] of `AxialEncoder` -> one part [t, width]."""
        x = op.reshape(self.post_layernorm(states[-1]), (t, self.merged, self.hidden_size))
        x = op.reshape(op.permute_dims(x, [0, 2, 1]), (t, self.merged * self.hidden_size))
        return [self.merger(self.downsample(x))]


class _Merger(nn.Module):
    """down(act(gate(x)) * up(x)) of gelu(norm(proj(x))), three times as wide as a row."""

    def __init__(self, width: int, act: str) -> None:
        self.act, inner = activation(act), 3 * width
        self.proj = Linear(width, width, quantize=False)
        self.post_projection_norm = LayerNorm(width, _MERGER_EPS)
        self.gate_proj, self.up_proj = Linear(width, inner, quantize=False), Linear(width, inner, quantize=False)
        self.down_proj = Linear(inner, width, quantize=False)

    def forward(self, x: Tensor) -> Tensor:
        """[t, width] -> [t, width]."""
        x = op.gelu(self.post_projection_norm(self.proj(x)))
        return self.down_proj(op.multiply(self.act(self.gate_proj(x)), self.up_proj(x)))


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    vision = whole["vision_config"]
    vision |= {
        "out_hidden_size": file.integer("projection_dim"),
        "rms_norm_eps": vision["layer_norm_eps"],
        "attention_bias": "v.blk.0.attn_qkv.bias" in file,
    }
    complete_mmproj(file, whole, preprocessor, 112 * 112, 28 * 28 * 15000, "<|image|>")


MMPROJ = Mmproj(
    "glm4v",
    {"glm4": "glm_ocr"},
    _complete,
    {
        **MMPROJ_NAMES,
        **in_layers("tower.model.blocks", {f"attn_{x}_norm": f"attn.{x}_norm" for x in "qk"}),
        **in_layers("tower.model.blocks", {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
        "v.post_ln": "tower.projector.post_layernorm",
        "mm.patch_merger": "tower.projector.downsample",
        "mm.model.fc": "tower.projector.merger.proj",
        "mm.post_norm": "tower.projector.merger.post_projection_norm",
        **{f"mm.{x}": f"tower.projector.merger.{x}_proj" for x in ("gate", "up", "down")},
    },
)
