"""The fields of other servers' APIs: each is honoured, changes no answer, or is refused by name.

Sources: the request parameters of vLLM's OpenAI-compatible server, of SGLang, llama-server, TGI and Ollama, and of
OpenAI's and Anthropic's APIs. Fields of other APIs of our own are treated alike: a field that one path honours is
refused on the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlcpipe.server.errors import ApiError

HONOURED = frozenset((
    # sampling
    "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "repeat_penalty", "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "mirostat",
    "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "allowed_token_ids", "min_tokens", "samplers",
    "block", "steps", "threshold", "editing_threshold", "max_post_steps", "remasking", "alg_temp",
    # the end of an answer
    "max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "stop_token_ids",
    "ignore_eos", "timeout", "n", "best_of", "n_predict",
    # its form
    "response_format", "json_schema", "grammar", "ebnf", "regex", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "structured_outputs", "output_format", "output_config", "text", "tools", "tool_choice",
    "parallel_tool_calls",
    # its thoughts
    "reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget", "thinking_budget_tokens",
    "thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens", "include_reasoning", "separate_reasoning",
    "reasoning_format",
    # the prompt
    "messages", "prompt", "suffix", "input", "instructions", "system", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "prediction", "echo",
    # what else is reported or done
    "logprobs", "top_logprobs", "prompt_logprobs", "timings_per_token", "return_progress", "lora", "stream",
    "stream_options", "model", "priority", "service_tier",
    "cache_salt", "deterministic",
))  # fmt: skip
"""Fields of at least one of our bodies."""

HARMLESS = frozenset((
    "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "t_max_prompt_ms", "keep_alive",
    "request_id", "rid", "kv_transfer_params", "return_tokens_as_token_ids", "spaces_between_special_tokens",
    "detokenize", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity", "mm_processor_kwargs",
    "cache_control", "betas", "container", "mcp_servers", "context_management", "truncation",
    "truncation_side", "stream_interval", "session_id", "ec_transfer_params", "stream_reasoning", "backend_sampling",
))  # fmt: skip
"""They change where and how an answer is computed, or its style at one maker alone; they are ignored and counted."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "min_new_tokens": (0,), "max_new_tokens": (), "n_predict": (-1,), "num_predict": (-1,),
    "bad_words": ([],), "logits_processors": ([],), "no_repeat_ngram_size": (0,),
    "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1, 0),
    "top_a": (0,), "tfs_z": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "dynatemp_range": (0,), "repeat_last_n": (-1,),
    "cfg_scale": (0,),
    "adaptive_target": (-1,), "samplers": ([], ""), "sampler_seq": ("",), "t_max_predict_ms": (-1, 0),
    "guided_whitespace_pattern": (), "structural_tag": (),
    "truncate_prompt_tokens": (-1,), "skip_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "chat_template": (), "documents": ([],), "think": (), "reasoning_in_content": (False,),
    "stop_regex": ([], ""), "no_stop_trim": (False,), "custom_logit_processor": ("",), "lora_path": ("",),
    "sampling_seed": (), "random_seed": (), "do_sample": (True,), "num_beams": (1,), "min_keep": (0, 1),
    "parse_tool_calls": (True,), "tool_prompt": ("",), "guideline": ("",), "safe_prompt": (False,),
    "watermark": (False,), "truncate": (), "return_full_text": (False,), "prompt_embeds": (), "input_ids": (),
    "images": ([],), "n_probs": (0,), "options": ({},), "format": ("",), "template": ("",),
    "return_token_ids": (False,), "logprob_token_ids": (), "repetition_detection": (), "vllm_xargs": ({},),
    "return_prompt_text": (False,), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_prompt_token_ids": (False,), "return_meta_info": (False,), "custom_params": ({},), "session_params": ({},),
    "images_config": ({},), "media_io_kwargs": ({},), "grammar_lazy": (False,), "grammar_triggers": ([],),
    "reasoning_budget_message": ("",),
    "timings_per_token": (False,), "return_progress": (False,), "post_sampling_probs": (False,),
    # Where another path honours them.
    "max_completion_tokens": (), "max_output_tokens": (), "best_of": (1,), "echo": (False,), "prompt_logprobs": (),
    "system": ("",), "instructions": ("",), "tools": ([],), "response_format": ({"type": "text"},),
    "chat_template_kwargs": ({},), "continue_final_message": (False,), "add_generation_prompt": (True,),
    "include_reasoning": (True,), "thinking_budget_tokens": (-1,), "reasoning_budget": (-1,),
    "reasoning_format": ("auto", "deepseek"), "thinking_token_budget": (-1,), "thinking_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "enable_thinking": (True,), "thinking": (), "reasoning": ({},), "reasoning_effort": (),
    "separate_reasoning": (True,), "stop": ([], ""), "stop_sequences": ([],), "n": (1,), "logprobs": (False,),
    "top_logprobs": (0,), "suffix": ("",), "output_config": ({},), "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("auto", "none"), "parallel_tool_calls": (True, False),
}  # fmt: skip
"""Fields that are not offered, with their neutral values, which are; those of `HONOURED` without any may lack here."""

OF_ENCODERS: Mapping[str, tuple[Any, ...]] = {
    "use_activation": (True,), "activation": (True,), "softmax": (True,), "normalize": (True,),
    "add_special_tokens": (True,), "truncation_side": ("right",), "padding": ("do_not_pad",),
    "embed_dtype": ("float32",), "endianness": ("native", "little"), "embd_normalize": (2,), "pooling": (),
    "messages": ([],), "chat_template": (), "chat_template_kwargs": ({},), "media_io_kwargs": ({},),
    "instruction": ("",), "prompt_name": ("",), "task": (), "input_type": (), "late_chunking": (False,),
    "dimensions": (), "output_dimension": (), "output_dtype": ("float",), "embedding_type": ("float",),
    "embedding_types": (["float"],),
}  # fmt: skip
"""As `REFUSED`, of requests for embeddings and scores: those of vLLM, llama-server, TEI, Jina, Voyage and Cohere."""

_ELSEWHERE = HONOURED - {"stream_options"}  # which changes no answer

_NO_PENALTY = {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def check_foreign(body: BaseModel, *, adds_special_tokens: bool) -> None:
    """Raises ApiError for an unsupported field that would change the answer."""
    neutral = {**dict.fromkeys(_ELSEWHERE, ()), **REFUSED, "add_special_tokens": (adds_special_tokens,)}
    if all(getattr(body, name) in (None, value) for name, value in _NO_PENALTY.items()):
        del neutral["repeat_last_n"]
    _check(body, neutral)


def check_of_encoders(body: BaseModel) -> None:
    """Raises ApiError for an unsupported field that would change embeddings or scores."""
    _check(body, OF_ENCODERS)


def _check(body: BaseModel, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, value in (body.model_extra or {}).items():
        if name in neutral and value is not None and value not in neutral[name]:
            raise ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")
