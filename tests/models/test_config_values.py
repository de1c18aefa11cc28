"""What each family reads from config.json: windows, ropes, sizes, caps, tensor names. Compiles nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlcpipe.models import build_model
from tests.models.small_configs import LONG, YARN, build, config, names, slides

NONE = (None,) * 4
ALL = (8,) * 4

# (family, fields, the windows of the four layers)
WINDOWS: list[tuple[str, dict[str, Any], tuple[int | None, ...]]] = [
    ("llama", {"sliding_window": None}, NONE),
    ("olmo2", {"layer_types": ["full_attention"] * 4}, NONE),
    ("mistral", {}, (4096,) * 4),
    ("mistral", {"sliding_window": None}, NONE),
    ("mistral", {"sliding_window": 8, "layer_types": slides(4)}, ALL),
    ("phi3", {}, NONE),
    ("phi3", {"sliding_window": 8}, ALL),
    ("mixtral", {}, NONE),
    ("mixtral", {"sliding_window": 8}, ALL),
    ("qwen2", {"sliding_window": 8, "max_window_layers": 1}, NONE),
    ("qwen2", {"use_sliding_window": True}, NONE),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
    ("qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, NONE),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": slides(1)}, (8, None, None, None)),
    ("qwen3_moe", {"sliding_window": 8}, NONE),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, ALL),
    ("gemma2", {"sliding_window": 8}, (8, None, 8, None)),
    ("gemma2", {}, (4096, None, 4096, None)),
    ("gemma2", {"sliding_window": 8, "layer_types": slides(3)}, (8, 8, 8, None)),
    ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None, 8, None)),
    (
        "exaone4",
        {"sliding_window": 8, "layer_types": slides(1), "sliding_window_pattern": "LLLG"},
        (8, None, None, None),
    ),
    ("olmo3", {}, (4096, 4096, 4096, None)),
    ("gpt_oss", {}, (128, None, 128, None)),
    ("gpt_oss", {"sliding_window": 8, "layer_types": slides(1)}, (8, None, None, None)),
    ("gemma3_text", {"sliding_window": 8}, ALL),
    ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None, 8)),
    ("gemma3_text", {"sliding_window": 8, "layer_types": slides(1)}, (8, None, None, None)),
]


@pytest.mark.parametrize(("family", "fields", "expected"), WINDOWS, ids=lambda value: str(value)[:50])
def test_windows(family: str, fields: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert tuple(of.window for of in build(family, **fields).attentions()) == expected


# (family, fields, attribute of ModelFacts, its value)
FACTS: list[tuple[str, dict[str, Any], str, Any]] = [
    ("llama", {"head_dim": None}, "head_dim", 16),
    ("llama", {"num_key_value_heads": None}, "num_kv_heads", 4),
    ("llama", {"max_position_embeddings": None}, "context_length", 2048),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "context_length", 256),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "context_length", 64),
    ("llama", {"rope_scaling": {**YARN, "factor": 8.0}}, "context_length", 128),
    ("llama", {"rope_scaling": YARN, "original_max_position_embeddings": 32}, "context_length", 128),
    ("llama", {}, "tied", False),
    ("llama", {"tie_word_embeddings": True}, "tied", True),
    ("mistral", {"num_key_value_heads": None}, "num_kv_heads", 4),
    ("olmo2", {}, "eps", 1e-5),
    ("phi3", {}, "eps", 1e-5),
    ("mixtral", {}, "eps", 1e-5),
    ("mixtral", {"rms_norm_eps": 1e-6}, "eps", 1e-6),
    ("mixtral", {"head_dim": None}, "head_dim", 16),
    ("gpt_oss", {}, "sinks", True),
    ("mixtral", {}, "sinks", False),
    ("gpt_oss", {}, "eps", 1e-5),
    ("gpt_oss", {"max_position_embeddings": 64}, "context_length", 131072),
    ("gemma2", {}, "tied", True),
    ("gemma2", {"tie_word_embeddings": False}, "tied", False),
    ("gemma2", {}, "softcap", 50.0),
    ("gemma2", {}, "logit_softcap", 30.0),
    ("gemma2", {"attn_logit_softcapping": None}, "softcap", 0.0),
    ("gemma2", {"final_logit_softcapping": None}, "logit_softcap", 0.0),
    ("gemma2", {"hidden_size": 3072}, "embedding_scale", float(np.float32(3072) ** np.float32(0.5))),
    ("gemma2", {}, "offset", 1.0),
    ("gemma3_text", {}, "tied", True),
    ("gemma3_text", {}, "softcap", 0.0),
    ("gemma3_text", {"final_logit_softcapping": 5.0}, "logit_softcap", 5.0),
    ("gemma3_text", {"sliding_window_pattern": 2}, "rope_of", (1, 0, 1, 0)),
    ("exaone4", {}, "rope_of", (0, 0, 0, 1)),
    ("exaone4", {"sliding_window": None}, "rope_of", (0,) * 4),
    ("lfm2", {}, "eps", 1e-5),
    ("lfm2", {"norm_eps": 1e-6}, "eps", 1e-6),
    ("lfm2", {"tie_embedding": False}, "tied", False),
    ("gemma4_text", {"per_layer_config": {"03": {"head_dim": 32}}}, "head_dim", 32),
    ("llama4_text", {"no_rope_layers": []}, "rope_of", (0, 0, 0, 1)),
    ("llama4_text", {"attention_chunk_size": 32, "rope_scaling": YARN}, "context_length", 32),
    ("llama4_text", {"attention_chunk_size": None, "rope_scaling": {**YARN, "factor": 8.0}}, "context_length", 128),
    ("deepseek_v32", {"index_topk": 32}, "context_length", 32),
    ("glm_moe_dsa", {}, "context_length", 64),
]


@pytest.mark.parametrize(("family", "fields", "name", "value"), FACTS, ids=lambda value: str(value)[:40])
def test_facts(family: str, fields: dict[str, Any], name: str, value: Any) -> None:
    model = build(family, **fields)
    owners = (model.facts, model.attentions()[-1], model.attentions()[-1].norm_of)
    assert getattr(next(one for one in owners if hasattr(one, name)), name) == value


def test_a_length_before_yarn_beside_the_table_counts_for_every_theta_of_granite_swash() -> None:
    """As for other families: transformers puts it into the table, where it replaces what the table says."""
    table, thetas = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, [1e4, 1e3]
    length = "original_max_position_embeddings"
    model, inside, other = (
        build("granite_swa", rope_parameters={**table, **inner}, layer_rope_theta=thetas, num_hidden_layers=2, **outer)
        for inner, outer in (({length: 32}, {length: 16}), ({length: 16}, {}), ({length: 32}, {}))
    )
    assert model.facts.ropes == inside.facts.ropes != other.facts.ropes


@pytest.mark.parametrize(("family", "scale"), [("deepseek_v3", 2.5), ("glm4_moe_lite", 1.8), ("glm4_moe", 1.0)])
def test_an_absent_scale_of_experts_is_the_family_s(family: str, scale: float) -> None:
    assert build(family).model.layers[-1].mlp.routing.scale == scale


def test_queries_of_mistral_4_grow_from_the_length_before_yarn() -> None:
    table = {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    for fields, length in (({}, 64), ({"original_max_position_embeddings": 16}, 16)):
        block = build("mistral4", rope_parameters=table, **fields).model.layers[0].self_attn
        assert block.latent.growth == (0.1, length, 0)


@pytest.mark.parametrize(
    ("family", "head_dim"), [("qwen3", 128), ("gemma2", 256), ("gemma3_text", 256), ("gpt_oss", 64)]
)
def test_an_absent_head_dim_is_the_family_s(family: str, head_dim: int) -> None:
    fields = config(family)
    del fields["head_dim"]
    assert build_model(fields).attentions()[0].head_dim == head_dim


@pytest.mark.parametrize(
    ("family", "kv_heads"),
    [("mistral", 8), ("mixtral", 8), ("gemma2", 4), ("qwen3_moe", 4), ("olmo2", 16), ("gpt_oss", 8)],
)
def test_absent_kv_heads_are_the_family_s(family: str, kv_heads: int) -> None:
    fields = config(family, num_attention_heads=16)
    del fields["num_key_value_heads"]
    assert build_model(fields).attentions()[0].num_kv_heads == kv_heads


# (family, fields, index of the rope, its theta)
THETAS: list[tuple[str, dict[str, Any], int, float]] = [
    ("llama", {}, 0, 1e4),
    ("llama", {"rope_theta": 5e5}, 0, 5e5),
    ("llama", {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 2e5}}, 0, 2e5),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 2e5}}, 0, 1e4),
    ("mixtral", {}, 0, 1e6),
    ("gpt_oss", {"rope_parameters": {"rope_type": "default"}}, 0, 150000.0),
    # transformers does not read a `rope_theta` beside the table that it takes if there is none,
    ("apertus", {"rope_theta": 3e5}, 0, 1.2e7),
    ("cwm", {"rope_theta": 3e5}, 0, 1e6),
    # and of OLMo 3 for full layers only.
    ("olmo3", {"rope_theta": 3e5}, 0, 3e5),
    ("olmo3", {"rope_theta": 3e5}, 1, 5e5),
    ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "alpha": 50.0}}, 0, 1e4 * 50 ** (16 / 14)),
    ("gemma3_text", {}, 0, 1e6),
    ("gemma3_text", {}, 1, 1e4),
    ("gemma3_text", {"rope_theta": 3e5, "rope_local_base_freq": 3e3}, 0, 3e5),
    ("gemma3_text", {"rope_theta": 3e5, "rope_local_base_freq": 3e3}, 1, 3e3),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}}}, 0, 1e6),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": 7e3}}}, 1, 7e3),
]


@pytest.mark.parametrize(("family", "fields", "index", "theta"), THETAS, ids=lambda value: str(value)[:40])
def test_rope_bases(family: str, fields: dict[str, Any], index: int, theta: float) -> None:
    rope = build(family, **fields).facts.ropes[index]
    assert rope.theta == theta
    if rope.dynamic_factor == 0 and "rope_scaling" not in fields:
        assert rope.inv_freq[1] == pytest.approx(theta ** (-2 / 16), rel=1e-6)


def test_scaling_of_gemma3_holds_for_full_layers_only() -> None:
    model = build("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    full, sliding = model.facts.ropes
    assert full.inv_freq[0] == 0.125
    assert sliding.inv_freq[0] == 1.0


# (fields, switch length): phi3 takes the top-level original length or its own default, not the dictionary's.
PHI3_LENGTHS = [
    ({"rope_scaling": {"type": "longrope", **LONG}}, 4096),
    ({"rope_scaling": {"type": "su", **LONG}, "original_max_position_embeddings": 32}, 32),
    ({"rope_scaling": {"type": "yarn", **LONG, "original_max_position_embeddings": 16}}, 4096),
]


@pytest.mark.parametrize(("fields", "length"), PHI3_LENGTHS, ids=lambda value: str(value)[:40])
def test_phi3_changes_factors_above_its_original_length(fields: dict[str, Any], length: int) -> None:
    rope = build("phi3", **fields).facts.ropes[0]
    assert rope.switch_length == length
    assert rope.long_inv_freq[0] == 0.5 * rope.inv_freq[0]


@pytest.mark.parametrize(
    ("family", "fields", "rotary_dim"),
    [
        ("phi3", {}, 16),
        ("phi3", {"partial_rotary_factor": 0.5}, 8),
        ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, 12),
        ("minimax", {}, 16),
        ("minimax", {"rotary_dim": 8}, 8),
        # Ling's files say what of whole heads turns, which is what latent attention turns anyway.
        ("bailing_hybrid", {"head_dim": 32, "linear_head_dim": 32, "partial_rotary_factor": 0.5, "rotary_dim": 16}, 16),
        ("bailing_hybrid", {"linear_head_dim": 32, "rope_parameters": {"partial_rotary_factor": 0.5}}, 16),
    ],
)
def test_a_part_of_each_head_rotates(family: str, fields: dict[str, Any], rotary_dim: int) -> None:
    rope = build(family, **fields).facts.ropes[0]
    assert (rope.rotary_dim, len(rope.inv_freq)) == (rotary_dim, rotary_dim // 2)


@pytest.mark.parametrize(
    ("given", "rotated"),
    [({}, (8, 8)), ({"sliding_attention": {"rope_theta": 1e3}}, (8, 8)), ({"full_attention": {}}, (16, 8))],
)
def test_kinds_without_a_rope_have_that_of_lfm3(given: dict[str, Any], rotated: tuple[int, int]) -> None:
    full, sliding = build("lfm3", rope_parameters=given).facts.ropes
    assert (2 * np.count_nonzero(full.inv_freq), np.count_nonzero(sliding.inv_freq)) == rotated


def test_yarn_of_kimi_linear_which_rotates_nothing_scales_nothing() -> None:
    scales = {build("kimi_linear", **fields).model.layers[3].self_attn.latent.scale
              for fields in ({}, {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}})}  # fmt: skip
    assert len(scales) == 1


ATTENTION = "model.layers.0.self_attn."

# (family, fields, names that must be there, names that must not)
NAMES: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("llama", {}, ("lm_head.weight",), (ATTENTION + "q_proj.bias",)),
    ("llama", {"tie_word_embeddings": True}, (), ("lm_head.weight",)),
    (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        (ATTENTION + "o_proj.bias", "model.layers.3.mlp.down_proj.bias"),
        (),
    ),
    ("qwen2", {}, (ATTENTION + "v_proj.bias",), (ATTENTION + "o_proj.bias",)),
    ("qwen3", {}, (ATTENTION + "q_norm.weight",), (ATTENTION + "q_proj.bias",)),
    ("qwen3", {"attention_bias": True}, (ATTENTION + "q_proj.bias", ATTENTION + "o_proj.bias"), ()),
    (
        "phi3",
        {},
        (ATTENTION + "qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        (ATTENTION + "q_proj.weight",),
    ),
    (
        "gemma2",
        {},
        ("model.layers.0.pre_feedforward_layernorm.weight",),
        ("lm_head.weight", ATTENTION + "q_norm.weight"),
    ),
    ("gemma3_text", {"attention_bias": True}, (ATTENTION + "q_norm.weight", ATTENTION + "k_proj.bias"), ()),
    ("gpt_oss", {}, (ATTENTION + "sinks", ATTENTION + "o_proj.bias", "model.layers.0.mlp.router.bias"), ()),
    ("gpt_oss", {"attention_bias": False}, (ATTENTION + "sinks",), (ATTENTION + "q_proj.bias",)),
    ("olmo2", {}, ("model.layers.0.post_feedforward_layernorm.weight",), ("model.layers.0.input_layernorm.weight",)),
    (
        "lfm2",
        {"layer_types": ["full_attention", "conv"] * 2, "conv_bias": True},
        (ATTENTION + "q_norm.weight", "model.layers.1.conv.in_proj.bias", "model.norm.weight"),
        (ATTENTION + "o_proj.bias", "model.layers.0.conv.conv.weight", "lm_head.weight"),
    ),
    ("mixtral", {}, ("model.layers.0.mlp.gate.weight",), ("model.layers.0.mlp.gate_proj.weight",)),
    (
        "qwen3_moe",
        {"mlp_only_layers": [1], "num_local_experts": None, "num_experts": 4},
        ("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("model.layers.1.mlp.gate.weight",),
    ),
    (
        "qwen3_moe",
        {"decoder_sparse_step": 2},
        ("model.layers.1.mlp.gate.weight", "model.layers.2.mlp.gate_proj.weight"),
        ("model.layers.0.mlp.gate.weight",),
    ),
    (
        "qwen3_moe",
        {"num_local_experts": 0, "num_experts_per_tok": 1},
        ("model.layers.3.mlp.gate_proj.weight",),
        ("model.layers.3.mlp.gate.weight",),
    ),
]


@pytest.mark.parametrize(("family", "fields", "there", "absent"), NAMES, ids=lambda value: str(value)[:40])
def test_parameter_names(family: str, fields: dict[str, Any], there: tuple[str, ...], absent: tuple[str, ...]) -> None:
    found = names(build(family, **fields))
    assert found.issuperset(there)
    assert found.isdisjoint(absent)


# (fields, rows of the first matrix): the width of LFM2's MLP follows from another number.
WIDTHS: list[tuple[dict[str, Any], int]] = [
    ({"intermediate_size": 12288, "block_multiple_of": 256}, 8192),
    ({"block_ff_dim": 12288, "block_multiple_of": None}, 8192),
    ({"intermediate_size": 100, "block_ffn_dim_multiplier": 1.3}, 96),
    ({"intermediate_size": 100, "block_ffn_dim_multiplier": None}, 66),
    ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ({"intermediate_size": None, "block_auto_adjust_ff_dim": False}, 12288),
]


@pytest.mark.parametrize(("fields", "width"), WIDTHS, ids=str)
def test_width_of_lfm2(fields: dict[str, Any], width: int) -> None:
    assert build("lfm2", **fields).model.layers[0].mlp.gate_proj.weight.shape[0] == width


def test_layers_that_draft_tokens_are_not_used() -> None:
    assert build("glm4_moe", num_nextn_predict_layers=2).names.unused == ("layers.4.", "layers.5.")


def test_a_fused_expert_matrix_names_its_tensors() -> None:
    model = build("mixtral")
    gate_up = dict(model.named_parameters())["model.layers.0.mlp.experts_gate_up.weight"]
    sources = [f"model.layers.0.mlp.{name}" for name in gate_up.attrs["sources"][3]]
    experts = "model.layers.0.block_sparse_moe.experts.3"
    assert [*map(model.names.published, sources)] == [f"{experts}.w1.weight", f"{experts}.w3.weight"]
    assert [int(extent) for extent in gate_up.shape] == [4, 96, 64]
