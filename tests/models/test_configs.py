"""Which config.json fields each family refuses by name, and which it rightly ignores. Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

AutoConfig = pytest.importorskip("transformers", reason="it knows the fields of families").AutoConfig

from mlcpipe.compiler.export import context_length, prepare_model
from mlcpipe.encoders import build_encoder
from mlcpipe.errors import ConfigError
from mlcpipe.models import build_model
from mlcpipe.quantization.scheme import load_scheme
from mlcpipe.targets import load_target
from tests.models import rwkv7
from tests.models.small_configs import EXPERTS, FAMILIES, LONG, YARN, build, config, names, slides, traits

# (fields, words that the error must contain): refused in every family.
REFUSED_EVERYWHERE: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama4"}, "model_type"),
    ({"model_type": "../llama"}, "model_type"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "ForCausalLM"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"is_causal": False}, "is_causal"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({"rope_parameters": {"rope_type": "mrope", "mrope_section": [1]}}, "rope"),
    ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_type"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": True}, "hidden_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"vocab_size": 1 << 40}, "vocab_size"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"rope_theta": -1.0}, "rope_theta"),
    ({"head_dim": 15}, "dim"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({"text_config": {}}, "text_config"),
    ({"vision_config": {}}, "vision_config"),
    ({"per_layer_config": [1]}, "per_layer_config"),
    ({"dual_chunk_attention_config": {"chunk_size": 4}}, "dual_chunk_attention_config"),
    ({"layer_types": ["dilated_attention"] * 4}, "layer_types"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_in_every_family(family: str) -> None:
    for fields, word in REFUSED_EVERYWHERE:
        with pytest.raises(ConfigError) as caught:
            build_model({**config(family), **fields})
        assert word in str(caught.value), fields
        assert "\n" not in str(caught.value), fields


# Fields that change the result of the families that have them.
CHANGING: list[dict[str, Any]] = [
    {"attention_chunk_size": 8},
    {"attention_sinks": True},
    {"clip_qkv": 8.0},
    {"logits_scaling": 8.0},
    {"logit_scale": 0.5},
    {"embedding_multiplier": 12.0},
    {"residual_multiplier": 0.2},
    {"attention_multiplier": 0.1},
    {"scale_emb": 12},
    {"scale_depth": 1.4},
    {"use_mrope": True},
    {"lm_head_bias": True},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"layer_types": slides(2), "sliding_window": 8},
    {"partial_rotary_factor": 0.75},
    {"rope_scaling": {"rope_type": "longrope", **LONG}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
]
# Those that others ignore, too.
OWN: list[dict[str, Any]] = [
    {"hidden_act": "relu"},
    {"hidden_activation": "relu"},
    {"final_logit_softcapping": 3.0},
    {"attn_logit_softcapping": 3.0},
    {"query_pre_attn_scalar": 7},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    {"no_rope_layers": [0, 1, 1, 1]},
    {"norm_topk_prob": True},
    {"routed_scaling_factor": 3.0},
    {"route_scale": 3.0},
    {"n_group": 2},
    {"moe_norm_min": 0.5},
    {"use_expert_bias": False},
    {"expert_selection_fn": "sigmoid"},
    {"num_shared_experts": 3},
    {"shared_expert_combination_strategy": "sum", "num_shared_experts": 1},
    {"shared_intermediate_size": 8},
    {"qkv_bias": False},
    {"first_k_dense_replace": 2},
    {"num_dense_layers": 3},
    {"moe_layer_interval": 2},
    {"moe_layer_end_index": 2},
    {"mlp_layer_types": ["sparse"] * 3 + ["dense"]},
    {"prefix_dense_intermediate_size": 32, "mlp_layer_types": ["sparse"] * 3 + ["dense"]},
    {"global_attn_every_n_layers": 2},
    {"mup_enabled": True},
    {"use_qk_norm": True},
    {"swiglu_limit": 3.0},
    {"full_attn_idxs": [0]},
    {"conv_bias": True},
    {"conv_L_cache": 4},
    {"block_auto_adjust_ff_dim": False},
    {"block_multiple_of": 64},
    {"block_ffn_dim_multiplier": 2.0},
    {"norm_eps": 1e-6},
    {"layer_norm_eps": 1e-6},
    {"use_qk_norm": True},
    {"use_bias": True},
    {"attention_out_bias": True},
]


rwkv7.register()
DEFAULTS = {family: AutoConfig.for_model(family).to_dict() for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_is_honoured_or_refused(family: str) -> None:
    default = DEFAULTS[family]
    changing = [
        fields
        for fields in [*CHANGING, *(own for own in OWN if next(iter(own)) in default)]
        if any(default.get(name) != value for name, value in fields.items())
    ]
    assert len(changing) > 5
    plain = traits(build(family))
    for fields in changing:
        try:
            found = build(family, **fields)
        except ConfigError as error:
            others = ("partial_rotary_factor", "longrope", "full_attention")
            assert any(name in str(error) for name in (*fields, *others)), fields
        else:
            assert traits(found) != plain, fields


# (family, fields, words that the error must contain)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((family, {"sliding_window": 8}, "sliding_window") for family in ("llama", "olmo2")),
    *((family, {"mlp_bias": True}, "mlp_bias") for family in ("qwen2", "gemma2", "mixtral", "gpt_oss")),
    *((family, {"attention_bias": True}, "attention_bias") for family in ("mistral", "phi3", "mixtral", "qwen2")),
    *((family, {"layer_types": slides(2)}, "layer_types") for family in ("llama", "mistral", "qwen3_moe")),
    # Windows are off, so that a sliding layer would have none.
    ("qwen2", {"layer_types": slides(4), "sliding_window": 8}, "sliding_window"),
    ("qwen3", {"use_sliding_window": 1}, "use_sliding_window"),
    *((family, {"head_dim": None}, "head_dim") for family in ("qwen3", "gemma2", "gemma3_text")),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    *((family, {"num_experts_per_tok": 5}, "num_experts_per_tok") for family in EXPERTS),
    *((family, {"num_experts": 5}, "num_experts") for family in EXPERTS),
    ("apertus", {"post_norm": True}, "post_norm"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
    ("cohere2", {"sliding_window": None}, "sliding_window"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("gemma", {"hidden_activation": "relu"}, "hidden_activation"),
    ("granite", {"residual_multiplier": "a"}, "residual_multiplier"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
    ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
    ("olmo", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    ("olmo3", {"rope_parameters": YARN}, "rope_parameters"),
    ("granite", {"logits_scaling": 0}, "logits_scaling"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
    *(("lfm2", {"layer_types": types}, "layer_types") for types in (["conv"], ["conv"] * 3 + ["mamba"], "conv")),
    *(("lfm2", {"full_attn_idxs": layers}, "full_attn_idxs") for layers in ([True], "1")),
    *(("lfm2", {field: 32}, field) for field in ("block_dim", "conv_dim", "conv_dim_out")),
    *(("lfm2", {field: False}, field) for field in ("use_pos_enc", "block_use_swiglu")),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
    ("lfm2", {"conv_bias": 1}, "conv_bias"),
    ("lfm2", {"norm_eps": -1.0}, "norm_eps"),
    ("lfm2", {"block_ffn_dim_multiplier": "2"}, "block_ffn_dim_multiplier"),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers"),
    ("qwen2", {"attention_bias": False}, "attention_bias"),
    ("falcon", {"alibi": True}, "alibi"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "new_decoder_architecture"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "new_decoder_architecture"),
    *((family, {"add_cross_attention": True}, "add_cross_attention") for family in ("gpt2", "gpt_bigcode")),
    *(
        ("opt", {field: value}, field)
        for field, value in (("do_layer_norm_before", False), ("word_embed_proj_dim", 32))
    ),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "long_factor": [2.0] * 7}}, "long_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "short_factor": [0.0] * 8}}, "short_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "long_factor"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling"),
    ("gemma3_text", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
    *(("glm4_moe", {"n_group": groups}, "n_group") for groups in (3, 4, 8)),
    ("glm4_moe", {"n_group": 2, "num_experts_per_tok": 3}, "n_group"),
    ("glm4_moe", {"num_nextn_predict_layers": 1000}, "num_nextn_predict_layers"),
    *(("hunyuan_v1_moe", {"moe_topk": value}, "moe_topk") for value in ([2, 1], [], ["2"])),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("cohere2_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("cohere2_moe", {"expert_selection_fn": ["softmax"]}, "expert_selection_fn"),
    ("cohere2_moe", {"num_shared_experts": 1, "shared_expert_combination_strategy": "max"}, "combination"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "factor"),
    ("llama", {"rope_scaling": {**YARN, "rope_theta": 1.0}}, "rope_theta"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "high_freq"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_theta": 10**400}, "rope_theta"),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG, "long_factor": [10**400] * 8}}, "long_factor"),
    ("llama", {"num_attention_heads": 2048, "num_key_value_heads": 1}, "num_key_value_heads"),
    ("deepseek_v3", {"num_attention_heads": 2048, "num_key_value_heads": 2048}, "num_attention_heads"),
    ("deepseek_v3", {"kv_lora_rank": 8192}, "kv_lora_rank"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk"),
    ("glm_moe_dsa", {"layer_types": ["full_attention"] * 2}, "layer_types"),
    ("deepseek_v2", {"rope_interleave": False}, "rope_interleave"),
    *(
        ("kimi_linear", {"linear_attn_config": {"num_heads": 4, "head_dim": 16, **lists}}, word)
        for lists, word in (
            ({"full_attn_layers": [400]}, "full_attn_layers"),
            ({"full_attn_layers": [True]}, "full_attn_layers"),
            ({"full_attn_layers": "4"}, "full_attn_layers"),
            ({"full_attn_layers": [4], "kda_layers": [1, 2]}, "kda_layers"),
            ({"kda_layers": [1, 2, 3]}, "kda_layers"),
        )
    ),
    ("kimi_linear", {"n_group": 2, "num_expert_group": 1}, "n_group has two names"),
    *(("bailing_hybrid", {f"{of}_swiglu_limit_list": [0, 0, 0, 4.0]}, of) for of in ("expert", "share_expert")),
    *(
        ("bailing_hybrid", {field: value}, field)
        for field, value in (("group_norm_size", 4), ("score_function", "softmax"), ("use_qkv_bias", True))
    ),
    *(("bailing_hybrid", {field: 8}, field) for field in ("rotary_dim", "partial_rotary_factor")),
    ("minimax", {"rotary_dim": 32}, "rotary_dim"),
    *(
        ("mimo_v2_flash", {"hybrid_layer_pattern": kinds}, "0, 1")
        for kinds in ([0, 1], [0, 1, 1, 2], [[], 0, 0, 0], "0")
    ),
    ("bamba", {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
    ("bamba", {"mamba_d_conv": 1}, "mamba_d_conv"),
    ("bamba", {"mamba_d_state": 2048}, "mamba_d_state"),
    *((family, {"mamba_expand": 65}, "mamba_expand") for family in ("bamba", "granitemoehybrid")),
    ("falcon_h1", {"mamba_d_ssm": None, "mamba_expand": 65}, "mamba_expand"),
    ("mamba2", {"expand": 65}, "expand"),
    ("nemotron_h", {"hybrid_override_pattern": "-E-E"}, "kinds of layers"),
    *(
        ("gemma4_text", {"per_layer_config": sizes, "layer_types": slides(1)}, word)
        for sizes, word in (
            ({"4": {"head_dim": 32}}, "field 4"),
            ({"1": {"self": 1}}, "field self"),
            ({"1": {"head_dim": 2048}}, "head_dim"),
            ({"1": {"num_key_value_heads": 3}}, "num_key_value_heads"),
        )
    ),
    (
        "gemma4_text",
        {"per_layer_config": {"3": {"head_dim": 32}}, "layer_types": slides(1), "num_kv_shared_layers": 1},
        "num_kv_shared_layers",
    ),
    (
        "gemma4_text",
        {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
        "partial_rotary_factor",
    ),
]


@pytest.mark.parametrize(("family", "fields", "word"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused(family: str, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(family, **fields)
    assert word in str(caught.value)


def test_a_browser_s_cache_refuses_layers_that_do_not_attend() -> None:
    def refuses(family: str, words: str, **fields: Any) -> None:
        with pytest.raises(ConfigError, match=f"layers of {family} in webgpu; expected {words}"):
            prepare_model(config(family, **fields), load_target("webgpu"), load_scheme("q4f32_1"))

    refuses("lfm2", "attention .* in every layer")
    refuses("gemma4_text", "attention .* in every layer")
    refuses("gemma3n_text", "layers that get hidden states alone")
    refuses("gemma3n_text", "attention .* in every layer", num_kv_shared_layers=1)


def test_a_context_longer_than_a_chunk_is_refused() -> None:
    model, target = build("llama4_text", attention_chunk_size=32), load_target("cpu")
    assert context_length(model, target, 32) == 32
    with pytest.raises(ConfigError, match="context length; expected at most 32 tokens for llama4_text.*; found 33"):
        context_length(model, target, 33)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "mamba", "gemma3n_text", "gemma4_text", "llama4_text"])
def test_only_decoders_whose_layers_all_attend_alike_embed(family: str) -> None:
    with pytest.raises(ConfigError, match=f"layers of {family} .*attention of one shape in every layer"):
        build_encoder(config(family))


def test_more_heads_than_dimensions() -> None:
    ntk = {"rope_scaling": {"type": "ntk", "factor": 2.0}, "hidden_size": 8, "num_attention_heads": 16}
    with pytest.raises(ConfigError, match="rotary dimension"):
        build_encoder({"model_type": "gte", "architectures": ["GteModel"], **ntk})


# Fields that published files carry and that change nothing.
HARMLESS: Mapping[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "attention_dropout": 0.1,
    "initializer_range": 0.02,
    "use_cache": True,
    "pretraining_tp": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
    "rope_scaling": None,
    "layer_types": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "lm_head_bias": False,
    "mlp_bias": False,
    "something_of_the_author": {"a": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_harmless_fields_change_nothing(family: str) -> None:
    partial = "partial_rotary_factor" in str(DEFAULTS[family].get("rope_parameters"))
    fields = {name: value for name, value in HARMLESS.items() if not (partial and name == "partial_rotary_factor")}
    plain, full = build(family), build_model({**fields, **config(family)})
    assert full.facts == plain.facts
    assert names(full) == names(plain)


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "mamba"])
def test_a_cache_without_slots_is_refused(family: str) -> None:
    """Also where every layer attends, with a scan beside it."""
    build("llama").check_uniform("webgpu")
    with pytest.raises(ConfigError, match="attention of one shape in every layer"):
        build(family).check_uniform("webgpu")
