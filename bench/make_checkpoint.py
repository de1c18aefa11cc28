"""Writes a checkpoint of a known model's shape with random weights.

    python -m bench.make_checkpoint llama-1b FOLDER

Speed does not depend on the values; a checkpoint without tokenizer is enough for `mlcpipe bench`. Runtimes of browsers
want text: `--tokenizer` adds one that makes a token of each letter, so that a prompt has as many as are wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.program import command_line, run_program
from mlcpipe.support.atomic import atomic_directory

# The published config.json of Qwen2-0.5B and SmolLM2-360M, and of Llama 3.2 1B without its RoPE scaling (which
# llama.cpp keeps in a tensor and mlcpipe in a table: no difference in speed).
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
    # Drafts for llama-1b: a twelfth of its weights, the same vocabulary.
    "llama-100m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
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
    # SmolLM2 360M: narrow and deep.
    "smollm2-360m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 960,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
        "intermediate_size": 2560,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
    },
    # 25 million parameters: what a software adapter of a browser still runs.
    "llama-25m": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    },
}
_SEED = 20260101
_SPREAD = 0.02  # initializer_range of both models


def make_checkpoint(name: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """Write config.json and model.safetensors (float16) of the shape `name` into a new `folder`."""
    config = SHAPES[name]
    with atomic_directory(folder) as partial:
        if tokenizer:
            _write_tokenizer(config["vocab_size"], partial)
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


def _write_tokenizer(size: int, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json: three special tokens, printable ASCII, made-up words.

    Every token has a text, so a runtime that streams text has something to say for each.
    """
    named = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127))]
    words = named + [f"t{i}" for i in range(size - len(named))]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(ends) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and write one checkpoint."""
    parser = command_line(__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", action="store_true", help="a token for each letter")
    options = parser.parse_args()
    make_checkpoint(options.shape, options.folder, tokenizer=options.tokenizer)


if __name__ == "__main__":
    run_program(main)
