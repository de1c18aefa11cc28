"""config.json as transformers 4 wrote it, which is what most published checkpoints carry."""

from __future__ import annotations

from typing import Any


def hub_config(config: dict[str, Any]) -> dict[str, Any]:
    """Renames what transformers 5 renamed, back. `config` is a parsed config.json of transformers 5.

    Old names: `torch_dtype`, top-level `rope_theta` and `partial_rotary_factor`, `rope_scaling` with `type`,
    gemma3's `rope_local_base_freq` and `sliding_window_pattern` in place of `layer_types`, qwen3_moe's `num_experts`.
    Gemma files leave out `tie_word_embeddings`: true was the base class's default, and defaults were not written.
    """
    old = {**config, "torch_dtype": config["dtype"], "transformers_version": "4.46.0"}
    del old["dtype"]
    rope = old.pop("rope_parameters")
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    # `type` came first, `rope_type` with llama3 (transformers 4.43); files of later families always have the latter.
    key = "rope_type" if kind == "llama3" or config["model_type"] in ("gemma3_text", "gpt_oss") else "type"
    old["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    if config["model_type"] != "gpt_oss":
        old.pop("layer_types", None)
    if "_sliding_window_pattern" in old:
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    if config["model_type"] == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if config["model_type"].startswith("gemma") and old["tie_word_embeddings"]:
        del old["tie_word_embeddings"]
    return old
