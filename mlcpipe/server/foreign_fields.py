"""Fields of other servers' APIs that change an answer and are not offered here: refused by name.

Sources: the request parameters of vLLM's OpenAI-compatible server, of SGLang, llama-server, TGI and Ollama. Fields of
other APIs of our own are treated alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from mlcpipe.server.errors import ApiError

# Unsupported fields, with their neutral values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (0,), "min_new_tokens": (0,), "max_new_tokens": (), "n_predict": (-1,), "num_predict": (-1,),
    "allowed_token_ids": ([],), "bad_words": ([],), "logits_processors": ([],), "no_repeat_ngram_size": (0,),
    "best_of": (1,), "use_beam_search": (False,), "early_stopping": (False,), "length_penalty": (1, 0),
    "typical_p": (1,), "top_n_sigma": (-1, 0), "top_a": (0,), "tfs_z": (1,), "epsilon_cutoff": (0,), "eta_cutoff": (0,),
    "mirostat": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "dynatemp_range": (0,), "repeat_last_n": (-1,),
    "adaptive_target": (-1,), "samplers": ([], ""), "sampler_seq": ("",), "lora": ([],), "t_max_predict_ms": (-1, 0),
    "guided_whitespace_pattern": (), "structural_tag": (), "echo": (False,), "prompt_logprobs": (),
    "truncate_prompt_tokens": (-1,), "skip_special_tokens": (True,), "include_stop_str_in_output": (False,),
    "chat_template": (), "documents": ([],), "include_reasoning": (True,), "thinking_budget_tokens": (-1,),
    "reasoning_budget": (-1,), "reasoning_format": ("auto", "deepseek"), "thinking_token_budget": (-1,),
    "thinking_budget": (-1,), "enable_thinking": (True,), "thinking": (), "think": (), "reasoning": ({},),
    "reasoning_effort": (), "separate_reasoning": (True,), "reasoning_in_content": (False,),
    "stop_regex": ([], ""), "no_stop_trim": (False,), "custom_logit_processor": ("",), "lora_path": ("",),
    "sampling_seed": (), "random_seed": (), "do_sample": (True,), "num_beams": (1,), "min_keep": (0, 1),
    "parse_tool_calls": (True,), "tool_prompt": ("",), "guideline": ("",), "safe_prompt": (False,),
    "watermark": (False,), "truncate": (), "return_full_text": (False,), "prompt_embeds": (), "input_ids": (),
    "images": ([],), "max_completion_tokens": (), "max_output_tokens": (),
    "options": ({},), "format": ("",), "system": ("",), "template": ("",), "instructions": ("",), "tools": ([],),
    "response_format": ({"type": "text"},), "chat_template_kwargs": ({},), "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}  # fmt: skip
_NO_PENALTY = {"repetition_penalty": 1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


def check_foreign(body: BaseModel, *, adds_special_tokens: bool) -> None:
    """Raises ApiError for an unsupported field that would change the answer."""
    neutral = {**_NEUTRAL, "add_special_tokens": (adds_special_tokens,)}
    if all(getattr(body, name) in (None, value) for name, value in _NO_PENALTY.items()):
        del neutral["repeat_last_n"]
    for name, value in (body.model_extra or {}).items():
        if name in neutral and value is not None and value not in neutral[name]:
            raise ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")
