"""Writes a checkpoint of a known model's shape with random weights.

    python -m tests.peers.make_checkpoint llama-1b FOLDER

Speed does not depend on the values; a checkpoint without tokenizer is enough for `mlcpipe bench`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mlcpipe.atomic import atomic_directory
from mlcpipe.errors import MlcpipeError

# The published config.json of Qwen2-0.5B, and of Llama 3.2 1B without its RoPE scaling (which llama.cpp keeps
# in a tensor and mlcpipe in a table: no difference in speed).
_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
    "qwen2-0.5b": _COMMON
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
    },
}
_SEED = 20260101
_SPREAD = 0.02  # initializer_range of both models


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write config.json and model.safetensors (float16) of the shape `name` into a new `folder`."""
    config = SHAPES[name]
    with atomic_directory(folder) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file(dict(_tensors(config)), partial / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.float16]]]:
    draw = np.random.default_rng(_SEED)

    def weight(*shape: int) -> NDArray[np.float16]:
        values = draw.standard_normal(shape, dtype=np.float32)
        values *= _SPREAD
        return values.astype(np.float16)

    d, ff = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", d // config["num_attention_heads"])
    q, kv = (config[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    ones = np.ones(d, np.float16)
    yield "model.embed_tokens.weight", weight(config["vocab_size"], d)
    yield "model.norm.weight", ones
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", ones.copy()
        yield prefix + "post_attention_layernorm.weight", ones.copy()
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", weight(rows, d)
            if config["model_type"] == "qwen2":
                yield f"{prefix}self_attn.{name}_proj.bias", weight(rows)
        yield prefix + "self_attn.o_proj.weight", weight(d, q)
        yield prefix + "mlp.gate_proj.weight", weight(ff, d)
        yield prefix + "mlp.up_proj.weight", weight(ff, d)
        yield prefix + "mlp.down_proj.weight", weight(d, ff)


def main() -> int:
    """Parse the command line and write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        make_checkpoint(options.shape, options.folder)
    except MlcpipeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
