"""`mlc-chat-config.json`: the configuration that MLC's consumers read.

Format: MLC's `protocol/mlc_chat_config.py`, and `ChatConfig` of `@mlc-ai/web-llm` 0.2.86.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlcpipe.bundle.conv_template import ConvTemplate
from mlcpipe.bundle.model_info import ModelInfo
from mlcpipe.errors import ConfigError

MLC_CONFIG = "mlc-chat-config.json"
_VERSION = "0.1.0"

# Consumers require these and a checkpoint may omit them; the values are MLC's defaults.
_SAMPLING = {
    "temperature": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
}


def mlc_chat_config(
    *,
    model: ModelInfo,
    quantization: str,
    model_config: Mapping[str, Any],
    tokenizer_files: Sequence[str],
    tokenizer_json: Mapping[str, Any],
    conv_template: ConvTemplate | None,
    generation_config: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of `mlc-chat-config.json`.

    Args:
        model: as in the manifest. The compiled cache keeps all pages and masks by position, so that MLC's sliding
            window stays off.
        quantization: the scheme's name.
        model_config: the checkpoint's `config.json`; consumers read a few of its fields.
        tokenizer_files: names in the bundle; the browser needs `tokenizer.json`.
        tokenizer_json: the parsed `tokenizer.json`.
        conv_template: None for a checkpoint without one: the bundle then serves plain text completion.
        generation_config: the checkpoint's `generation_config.json`, `{}` if absent. Missing token ids come
            from `model_config`; an id in neither is left out.

    Raises:
        ConfigError: no `tokenizer.json` among the files, or a sampling field or token id of the wrong type.
    """
    if "tokenizer.json" not in tokenizer_files:
        raise ConfigError("no tokenizer.json among the tokenizer files", found=", ".join(tokenizer_files) or "none")
    config: dict[str, Any] = {
        "version": _VERSION,
        "model_type": model.model_type,
        "quantization": quantization,
        "model_config": dict(model_config),
        "vocab_size": model.vocab_size,
        "context_window_size": model.context_length,
        "sliding_window_size": -1,
        "prefill_chunk_size": model.prefill_chunk,
        "attention_sink_size": -1,
        "tensor_parallel_shards": 1,
    }
    for key, default in _SAMPLING.items():
        config[key] = _number(key, generation_config.get(key), default)
    config["tokenizer_files"] = list(tokenizer_files)
    config["tokenizer_info"] = tokenizer_info(tokenizer_json)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = generation_config.get(key)
        value = model_config.get(key) if value is None else value
        if value not in (None, -1):  # as old files of Llama say that there is none
            config[key] = _token_ids(key, value)
    stops = config.get("eos_token_id", [])
    stops = stops if isinstance(stops, list) else [stops]
    config["conv_template"] = _plain_text(stops) if conv_template is None else conv_template.fields
    return config


def tokenizer_info(tokenizer_json: Mapping[str, Any]) -> dict[str, Any]:
    """How token texts become bytes, by the rules of MLC's `Tokenizer::DetectTokenizerInfo`."""
    decoders = _steps(tokenizer_json.get("decoder"), "decoders")
    normalizers = _steps(tokenizer_json.get("normalizer"), "normalizers")
    byte_level = any(step.get("type") == "ByteLevel" for step in decoders)
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "token_postproc_method": "byte_level" if byte_level else "byte_fallback",
        "prepend_space_in_encode": {"type": "Prepend", "prepend": "\u2581"} in normalizers,
        "strip_space_in_decode": strip in decoders,
    }


def _plain_text(stop_token_ids: list[int]) -> dict[str, Any]:
    # Consumers refuse a config without a conv_template; this one adds no text to the messages.
    return {
        "name": "LM",
        "system_template": "",
        "system_message": "",
        "add_role_after_system_message": True,
        "roles": {"user": "", "assistant": ""},
        "role_templates": {"user": "{user_message}", "assistant": "{assistant_message}"},
        "messages": [],
        "seps": [""],
        "role_content_sep": "",
        "role_empty_sep": "",
        "stop_str": [],
        "stop_token_ids": stop_token_ids,
        "function_string": "",
        "use_function_calling": False,
    }


def _steps(value: object, inner: str) -> list[dict[str, Any]]:
    if not isinstance(value, dict):
        return []
    steps = value.get(inner) if value.get("type") == "Sequence" else [value]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _number(key: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} of generation_config.json", expected="a number", found=repr(value)[:80])
    return float(value)


def _token_ids(key: str, value: object) -> int | list[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"{key} of the checkpoint", expected="token ids", found=repr(value)[:80])
    return value  # type: ignore[return-value]
