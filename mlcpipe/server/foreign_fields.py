"""Fields of other servers' APIs that change an answer: honoured as one of ours, or refused by name.

Sources: the request parameters of vLLM's OpenAI-compatible server, of SGLang, llama-server, TGI and Ollama. Fields of
other APIs of our own are treated alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mlcpipe.runtime.serving.grammar import GrammarSource
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import value_in
from mlcpipe.server.tool_formats.style import ANY_OBJECT, quoted

if TYPE_CHECKING:
    from mlcpipe.server.bodies import ResponseFormat, SamplingFields

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
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def check_foreign(body: SamplingFields, *, adds_special_tokens: bool) -> None:
    """Raises ApiError for an unsupported field that would change the answer."""
    neutral = {**_NEUTRAL, "add_special_tokens": (adds_special_tokens,)}
    if all(getattr(body, name) in (None, value) for name, value in _NO_PENALTY.items()):
        del neutral["repeat_last_n"]
    for name, value in (body.model_extra or {}).items():
        if name in neutral and value is not None and value not in neutral[name]:
            raise ApiError(400, f"{name}: not offered here; leave it out", param=name, code="unsupported_parameter")


def constraint(body: SamplingFields, form: ResponseFormat | None) -> GrammarSource | None:
    """The form of the whole answer, None for any. Raises ApiError for a malformed schema, and for two different ones:
    clients may name one schema in the fields of several servers.
    """
    given: list[tuple[str, str, Any]] = [
        ("response_format", "json", None if form is None else _schema_of(form)),
        ("json_schema", "json", body.json_schema),
        ("regex", "regex", body.regex),
        ("grammar", "grammar", body.grammar),
        ("ebnf", "grammar", body.ebnf),
        *((f"guided_{kind}", kind, getattr(body, f"guided_{kind}")) for kind in _MADE),
    ]
    if (structured := body.structured_outputs) is not None:
        given += [(f"structured_outputs.{kind}", kind, getattr(structured, f"{kind}_")) for kind in _MADE]
        given.append(("structured_outputs.json_object", "json", ANY_OBJECT if structured.json_object else None))
    made = {name: _MADE[kind](value, name) for name, kind, value in given if value not in (None, "")}
    if len({*made.values()}) > 1:
        raise ApiError(400, f"{', '.join(made)}: expected one of them", param=[*made][1])
    return next(iter(made.values()), None)


def _schema_of(form: ResponseFormat) -> Any:
    given = form.schema_ if form.json_schema is None else form.json_schema.schema_
    if form.type == "json_schema" and given is None:
        raise ApiError(400, "response_format.json_schema.schema: expected a schema", param="response_format")
    if form.type == "text" and given is not None:
        raise ApiError(400, "response_format: a schema, expected the type json_schema", param="response_format")
    return ANY_OBJECT if form.type == "json_object" and given is None else given


def _json(schema: Any, name: str) -> GrammarSource:
    if isinstance(schema, str):
        try:
            schema = value_in(schema)
        except ValueError:
            schema = None
    if not isinstance(schema, (dict, bool)):
        raise ApiError(400, f"{name}: expected a JSON schema", param=name)
    return GrammarSource("json_schema", json.dumps(schema))


def _choice(texts: list[str], name: str) -> GrammarSource:
    if not texts:
        raise ApiError(400, f"{name}: expected texts to choose from", param=name)
    return GrammarSource("lark", f"start: {' | '.join(map(quoted, texts))}")


def _grammar(text: str, name: str) -> GrammarSource:
    """Lark, or llama.cpp's form, whose rules are `name ::= …`."""
    return GrammarSource("gbnf" if _GBNF.search(text) else "lark", text)


_MADE: Mapping[str, Callable[[Any, str], GrammarSource]] = {
    "json": _json, "regex": lambda text, name: GrammarSource("regex", text), "choice": _choice, "grammar": _grammar,
}  # fmt: skip
