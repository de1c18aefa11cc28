"""Qwen3-VL (Bai et al. 2025) and Qwen 3.5: a table of places between which patches lie, axial RoPE, and DeepStack.

Features of some layers (Meng et al. 2024) are added to the text's first layers, where a picture's rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn import Tensor

from mlcpipe.errors import ConfigError
from mlcpipe.nn import mrope
from mlcpipe.nn.config import Fields
from mlcpipe.nn.encoder_layer import EncoderSpec
from mlcpipe.nn.language_model import ModelFacts
from mlcpipe.nn.tower import Tower
from mlcpipe.vision.mmproj import Config, Mmproj, MmprojFile, check_eps, in_layers
from mlcpipe.vision.place_table import PlaceTable
from mlcpipe.vision.processors.qwen2_vl import USUAL_ROWS, limited
from mlcpipe.vision.qwen2_vl import (
    EPS,
    MMPROJ_NAMES,
    MOST_ROWS,
    AxialEncoder,
    Merger,
    Mergers,
    axial_spec,
    axial_theta,
    complete_mmproj,
    layers_of,
    patch_info,
    text_of,
    with_video,
)

# By model: pairs of RoPE that turn by time, row and column, the text's layers, and the token of a picture.
_DEFAULTS: Mapping[str, tuple[tuple[int, int, int], int, int]] = {
    "qwen3_vl": ((24, 20, 20), 32, 151655),
    "qwen3_vl_moe": ((24, 20, 20), 24, 151655),
    "qwen3_5": ((11, 11, 10), 32, 248056),
    "qwen3_5_moe": ((11, 11, 10), 40, 248056),
}


def build(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Tower:
    """The tower of config.json, for patches of preprocessor_config.json. Raises ConfigError for unsupported fields."""
    model_type, whole = str(config["model_type"]), Fields(config)
    pairs, of_text, picture = _DEFAULTS[model_type]
    vision = Fields(whole.table("vision_config"), "config.json vision_config")
    text = Fields(whole.table("text_config"), "config.json text_config")
    spec = axial_spec(
        vision, vision.integer("hidden_size", 1152), vision.integer("intermediate_size", 4304), "gelu_pytorch_tanh",
        up=("mlp.linear_fc1",), down=("mlp.linear_fc2",), num_heads=16,
    )  # fmt: skip
    layers = vision.integer("depth", 27, high=1024)
    places = vision.integer("num_position_embeddings", 2304)
    side = round(places**0.5)
    if side * side != places:
        raise ConfigError("field num_position_embeddings", where=vision.where, expected="a square", found=places)
    deep = _deepstack(vision, layers, text.integer("num_hidden_layers", of_text), model_type)
    width = vision.integer("out_hidden_size", 3584)
    text_of(config, vision, "out_hidden_size", width)
    token = whole.integer("image_token_id", picture, low=0)
    info = patch_info(vision, preprocessor, token, width * (1 + len(deep)), patch=16, processor="qwen3_vl")
    info = limited(with_video(info, preprocessor), MOST_ROWS)
    facts = ModelFacts(model_type, 0, spec.hidden_size, layers, info.rows * info.merged, (), ())
    body = _Vision(spec, layers, info.numbers, side, deep, axial_theta(vision))
    features = [Merger(spec.hidden_size, info.merged, width, together=True) for _ in deep]
    projector = Mergers(Merger(spec.hidden_size, info.merged, width), features)
    layout = mrope.interleaved(mrope.sections(text.values, pairs))
    return Tower(facts, body, projector, info, layout, limited(info, USUAL_ROWS))


def _deepstack(vision: Fields, layers: int, of_text: int, model_type: str) -> tuple[int, ...]:
    """The tower's layers after which features are taken. Raises ConfigError for other ones than it has."""
    if model_type.startswith("qwen3_5"):
        vision.refuse(deepstack_visual_indexes=[None, []])
        return ()
    return layers_of(vision, "deepstack_visual_indexes", layers, [8, 16, 24], of_text)


def interpolated(side: int, table: te.Tensor, places: te.Tensor) -> te.Tensor:
    """Bilinearly, where the corners are those of a picture: as transformers'
    `get_vision_interpolation_indices_and_weights` with aligned corners.
    """
    last = side - 1

    def taps(i: tirx.Var, axis: int) -> list[tuple[tirx.PrimExpr, tirx.PrimExpr]]:
        steps = tirx.max(places[i, axis + 2] - 1, 1).astype("float32")
        at = places[i, axis].astype("float32") * tirx.const(float(last), "float32") / steps
        low = tirx.floor(at)
        found = []
        for step in (0, 1):
            weight = tirx.max(tirx.const(1.0, "float32") - tirx.abs(at - low - float(step)), 0.0)
            place = tirx.max(tirx.min(low.astype("int64") + step, last), 0)
            found.append((place, weight))
        return found

    def element(i: tirx.Var, j: tirx.Var) -> tirx.PrimExpr:
        total = tirx.const(0.0, "float32")
        for row, down in taps(i, 0):
            for column, across in taps(i, 1):
                total = total + table[row * side + column, j] * (down * across)
        return total

    return te.compute((places.shape[0], table.shape[1]), element, name="interpolated")


class _Vision(AxialEncoder):
    """With vectors of places."""

    def __init__(
        self, spec: EncoderSpec, count: int, numbers: int, side: int, deep: Sequence[int], theta: float
    ) -> None:
        super().__init__(spec, count, numbers, theta, bias=True, deep=deep)
        self.pos_embed = PlaceTable(side, spec.hidden_size, interpolated)

    def embedded(self, patches: Tensor, places: Tensor) -> Tensor:
        """As `AxialEncoder.embedded`."""
        return self.pos_embed(super().embedded(patches, places), places)


def _deep_layers(file: MmprojFile) -> list[int]:
    layers = file.integer("block_count")
    return [i for i, deep in enumerate(file.flags("is_deepstack_layers", layers)) if deep] if layers <= 1024 else []


def _complete(file: MmprojFile, whole: Config, preprocessor: Config) -> None:
    whole["vision_config"] |= {
        "out_hidden_size": file.integer("projection_dim"),
        "num_position_embeddings": file.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": _deep_layers(file),
    }
    check_eps(file, EPS)
    complete_mmproj(file, whole, preprocessor, 1 << 16, 1 << 24)


def _deep_names(file: MmprojFile) -> dict[str, str]:
    """Of the mergers after layers; the file has them by the number of the layer."""
    parts = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
    return {
        f"v.deepstack.{layer}.{name}": f"tower.projector.deepstack_merger_list.{index}.{own}"
        for index, layer in enumerate(_deep_layers(file))
        for name, own in parts.items()
    }


MMPROJ = Mmproj(
    "qwen3vl_merger",
    {"qwen3": "qwen3_vl", "qwen3_moe": "qwen3_vl_moe", "qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"},
    _complete,
    {
        **MMPROJ_NAMES,
        "v.position_embd": "tower.model.pos_embed",
        **in_layers("tower.model.blocks", {"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}),
        "v.post_ln": "tower.projector.merger.norm",
        "mm.0": "tower.projector.merger.linear_fc1",
        "mm.2": "tower.projector.merger.linear_fc2",
    },
    _deep_names,
)
