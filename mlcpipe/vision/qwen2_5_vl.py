"""Qwen2.5-VL's tower (Bai et al. 2025): gated MLPs, RMS norms, and in most layers attention within windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from mlcpipe.errors import ConfigError
from mlcpipe.nn import mrope
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderLayer, EncoderSpec, Rotation, named
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.norm import RMSNorm
from mlcpipe.nn.rows import rows_of
from mlcpipe.nn.step_states import StepStates
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, check_eps, in_layers
from mlcpipe.vision.processors.qwen2_5_vl import limited
from mlcpipe.vision.processors.qwen2_vl import USUAL_ROWS
from mlcpipe.vision.qwen2_vl import (
    EPS,
    MERGER_NAMES,
    MMPROJ_NAMES,
    MOST_ROWS,
    Merger,
    PatchEmbed,
    axial_rotation,
    axial_spec,
    axial_theta,
    complete_mmproj,
    layers_of,
    patch_info,
    text_of,
)


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for patches of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    whole = Fields(config)
    vision = Fields(whole.table("vision_config"), "config.json vision_config")
    hidden, width = vision.integer("hidden_size", 3584), vision.integer("out_hidden_size", 3584)
    text = text_of(config, vision, "out_hidden_size", width)
    spec = axial_spec(
        vision, hidden, vision.integer("intermediate_size", 3420), "silu", num_heads=16,
        up=("mlp.gate_proj", "mlp.up_proj"), down=("mlp.down_proj",),
    )  # fmt: skip
    layers = vision.integer("depth", 32, high=1024)
    whole_picture = layers_of(vision, "fullatt_block_indexes", layers, [7, 15, 23, 31], layers)
    info = patch_info(vision, preprocessor, whole.integer("image_token_id", 151655, low=0), width, patch=14)
    window = vision.integer("window_size", 112) // info.settings["merge"] // info.settings["patch"]
    if not window:
        raise ConfigError("field window_size", where=vision.where, expected="a block of patches", found="less")
    settings = {**info.settings, "window": window}
    info = info.model_copy(update={"processor": "qwen2_5_vl", "settings": settings, "places": info.places + 1})
    info = limited(info, MOST_ROWS)
    facts = ModelFacts(str(config["model_type"]), 0, hidden, layers, info.rows * info.merged, (), ())
    body = _Vision(replace(spec, gated=True), layers, info.numbers, whole_picture, axial_theta(vision))
    projector = _Projector(Merger(hidden, info.merged, width, names=("ln_q", "mlp.0", "mlp.2"), rms=True))
    layout = mrope.sectioned(mrope.sections(text, (16, 24, 24)))
    return Tower(facts, body, projector, info, layout, limited(info, USUAL_ROWS))


class _Layer(EncoderLayer):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, spec: EncoderSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.attention_norm, self.mlp_norm = (named(RMSNorm(spec.hidden_size, EPS), name) for name in spec.norms)

    def forward(self, x: Tensor, kv: StepStates, rotation: Rotation | None) -> Tensor:
        """x [m, hidden] -> [m, hidden]."""
        x = op.add(x, self.attend(self.attention_norm(x), kv, rotation))
        return op.add(x, self.feed(self.mlp_norm(x)))


class _Vision(nn.Module):
    """Embeddings and layers, of which those `whole_picture` attend beyond their window."""

    def __init__(
        self, spec: EncoderSpec, count: int, numbers: int, whole_picture: tuple[int, ...], theta: float
    ) -> None:
        self.spec, self.whole_picture, self.theta = spec, whole_picture, theta
        self.patch_embed = PatchEmbed(numbers, spec.hidden_size, False)
        self.blocks = nn.ModuleList([_Layer(spec, i) for i in range(count)])

    def forward(self, patches: Tensor, places: Tensor, kv: StepStates) -> tuple[Tensor, Tensor]:
        """patches [m, numbers], places i32[m, 5] -> hidden states [m, hidden], and the places."""
        x = self.patch_embed.proj(patches)
        rotation = axial_rotation(places, self.spec.hidden_size // self.spec.num_heads, self.theta)
        within = kv.second()
        for index, layer in enumerate(self.blocks):
            x = layer(x, kv if index in self.whole_picture else within, rotation)
        return x, places


class _Projector(nn.Module):
    """The merger, and rows in the order of the picture."""

    def __init__(self, merger: Merger) -> None:
        self.merger = merger

    def forward(self, found: tuple[Tensor, Tensor], t: tirx.Expr) -> list[Tensor]:
        """What `_Vision` returned -> one part [t, width]."""
        x, places = found
        merged = self.merger.size // int(x.shape[1])

        def back(of: te.Tensor) -> te.Tensor:
            return te.compute((t,), lambda i: of[i * merged, of.shape[1] - 1], name="back")

        rows = op.tensor_expr_op(back, "back", [places])
        return [op.tensor_expr_op(rows_of, "rows", [self.merger(x, t), rows])]


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    """Every `n_wa_pattern`-th layer attends to the whole picture."""
    vision, every = whole["vision_config"], file.integer("n_wa_pattern")
    vision |= {
        "out_hidden_size": file.integer("projection_dim"),
        "fullatt_block_indexes": [i for i in range(min(vision["num_hidden_layers"], 1024)) if (i + 1) % every == 0],
        "window_size": file.integer("window_size", 112),
    }
    check_eps(file, EPS)
    complete_mmproj(file, whole, preprocessor, 56 * 56, 14 * 14 * 4 * 16384)


MMPROJ = Mmproj(
    "qwen2.5vl_merger",
    {"qwen2": "qwen2_5_vl"},
    _complete,
    {
        **MMPROJ_NAMES,
        **MERGER_NAMES,
        **in_layers("tower.model.blocks", {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}),
    },
)
