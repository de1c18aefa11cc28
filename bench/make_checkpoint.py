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
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from bench.program import command_line, run_program
from mlcpipe.checkpoint.safetensors_reader import TensorInfo
from mlcpipe.checkpoint.safetensors_writer import SafetensorsWriter
from mlcpipe.models import build_model
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.weights.table import weight_table

# A file for each shape: a published config.json, some with fewer layers, without what no speed depends on. Llama 3.2 1B
# is without its RoPE scaling, which llama.cpp keeps in a tensor and mlcpipe in a table.
_SHAPES = Path(__file__).parent / "shapes"
SHAPES = sorted(path.stem for path in _SHAPES.glob("*.json"))
_SEED = 20260101
_SPREAD = 0.02  # initializer_range of both models


def make_checkpoint(name: str, folder: Path, *, tokenizer: bool = False) -> Path:
    """Write config.json and model.safetensors (float16) of the shape `name`, or a config.json, into a new `folder`."""
    config = config_of(name)
    with atomic_directory(folder) as partial:
        if tokenizer:
            _write_tokenizer(config["vocab_size"], partial)
        (partial / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        weights = partial / "model.safetensors"
        infos = [TensorInfo(one, shape, "float16", weights, 0, 0) for one, shape in _tensors(config)]
        draw = np.random.default_rng(_SEED)
        with weights.open("wb") as file:
            writer = SafetensorsWriter(file, infos)
            for info in infos:
                values = np.ones(info.shape, np.float16)
                if len(info.shape) > 1 or info.name.endswith("bias"):
                    values = (draw.standard_normal(info.shape, dtype=np.float32) * np.float32(_SPREAD)).astype(
                        np.float16
                    )
                writer.add(info.name, info.dtype, info.shape, values.data)
            writer.finish()
    return folder


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a shape, or of a config.json."""
    path = _SHAPES / f"{name}.json" if name in SHAPES else Path(name)
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that the family's model reads."""
    model = build_model(config)
    if model.own_head is not None:
        model.add_draft_head(model.own_head)
    for weight in weight_table(model.named_parameters()):
        if weight.rows is not None:  # of another one
            continue
        for group in weight.sources:
            rows, *rest = weight.shape if weight.experts is None else weight.shape[1:]
            for source in group:
                shape = (rows // len(group), *rest)
                name = model.names.candidates(source)[0]
                yield name, shape[::-1] if name.removesuffix(".weight").endswith(model.names.turned or "?") else shape


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
    parser.add_argument("shape", help=f"{', '.join(SHAPES)}, or a config.json")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", action="store_true", help="a token for each letter")
    options = parser.parse_args()
    make_checkpoint(options.shape, options.folder, tokenizer=options.tokenizer)


if __name__ == "__main__":
    run_program(main)
