"""Writes a draft head of random weights, in the shape of those that are published for models of such a shape.

python -m bench.make_draft_head eagle llama-1b FOLDER
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from bench.make_checkpoint import SHAPES, config_of
from bench.program import command_line, run_program
from mlcpipe.support.atomic import atomic_directory

KINDS = ("eagle", "medusa")
_GUESSED = 32000  # tokens that the authors' EAGLE-3 heads guess
_HEADS = 3


def make_draft_head(kind: str, name: str, folder: Path) -> Path:
    """Write config.json and model.safetensors of a head of `KINDS` for the model `name` into a new `folder`."""
    model, draw = config_of(name), np.random.default_rng(0)
    d, vocab = model["hidden_size"], model["vocab_size"]

    def weight(*shape: int) -> NDArray[np.float16]:
        return (0.02 * draw.standard_normal(shape, dtype=np.float32)).astype(np.float16)

    config = {"model_type": "llama"}
    if kind == "medusa":
        tensors = {}
        for head in range(_HEADS):
            block = {"0.linear.weight": weight(d, d), "0.linear.bias": weight(d), "1.weight": weight(vocab, d)}
            tensors |= {f"medusa_head.{head}.{part}": array for part, array in block.items()}
    else:
        config = {**model, "num_hidden_layers": 1, "draft_vocab_size": _GUESSED, "tie_word_embeddings": False}
        dim = model.get("head_dim", d // model["num_attention_heads"])
        q, kv = (model[f"num_{part}_heads"] * dim for part in ("attention", "key_value"))
        sizes = {"q": (q, 2 * d), "k": (kv, 2 * d), "v": (kv, 2 * d), "o": (d, q)}
        tensors = {f"midlayer.self_attn.{part}_proj.weight": weight(*shape) for part, shape in sizes.items()}
        for part in ("gate", "up", "down"):
            shape = (model["intermediate_size"], d)
            tensors[f"midlayer.mlp.{part}_proj.weight"] = weight(*(shape[::-1] if part == "down" else shape))
        for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
            tensors[f"{norm}.weight"] = np.ones(d, np.float16)
        tensors |= {"fc.weight": weight(d, 3 * d), "lm_head.weight": weight(_GUESSED, d)}
        tensors["d2t"] = np.arange(_GUESSED) * (vocab // _GUESSED) - np.arange(_GUESSED)
    with atomic_directory(folder) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    return folder


def main() -> None:
    """Parse the command line and write one head."""
    parser = command_line(__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    make_draft_head(options.kind, options.shape, options.folder)


if __name__ == "__main__":
    run_program(main)
