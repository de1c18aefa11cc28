"""Writes a checkpoint as GGUF with every matrix in Q4_0 or Q8_0, the embedding and the output included.

    python -m bench.make_gguf CHECKPOINT FILE.gguf [--bits 8]

With 16 bits the matrices are float16, to be quantized by llama.cpp. Q4_0 stores 32 weights in 16 bytes of codes and a
float16 scale, as q4f16_1 does: 4.5 bits per weight on both sides; Q8_0 and q8f16_1 have 8.5. The vocabulary is that of
tokenizer.json where the checkpoint has one of byte-level BPE that merges anything, with GPT-2's splits; else it is made
up (llama-bench feeds token ids), and the file is good for measuring speed alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.program import command_line, run_program
from mlcpipe.checkpoint import Checkpoint, open_checkpoint
from mlcpipe.errors import ConfigError

_TYPES = {
    4: (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    8: (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
_BYTE_TOKENS = 256


def make_gguf(checkpoint: Path, path: Path, *, bits: int = 4) -> Path:
    """Write `checkpoint` (llama or qwen2) to `path`, which appears whole or not at all. Raises ConfigError."""
    kind_of_weights, kind_of_file = _TYPES[bits]
    source = open_checkpoint(checkpoint)
    config = source.config
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ConfigError("model_type", where=checkpoint, expected=" or ".join(ARCHITECTURES), found=repr(kind))
    architecture = ARCHITECTURES[kind]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[architecture])
    _add_shape(writer, config, checkpoint)
    writer.add_file_type(kind_of_file)
    tokenizer = source.folder / "tokenizer.json"
    read = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.is_file() else {}
    if read.get("model", {}).get("merges"):
        _add_own_vocabulary(writer, tokenizer, read)
    else:
        add_vocabulary(writer, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _tensors(source):
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise ConfigError(f"the tensor {name}", where=checkpoint, expected=f"a tensor of {kind}")
        if values.ndim == 2:
            writer.add_tensor(renamed, gguf.quants.quantize(values, kind_of_weights), raw_dtype=kind_of_weights)
        else:
            writer.add_tensor(renamed, values)
    write_out(writer)
    os.replace(partial, path)
    return path


def write_out(writer: gguf.GGUFWriter) -> None:
    """Write the file of a writer that has all of it, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bytes_per_token(path: Path) -> int:
    """Bytes of weights that a decode step reads: all, but one row of an embedding that is not also the output."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    untied = "output.weight" in sizes
    return sum(sizes.values()) - (sizes["token_embd.weight"] if untied else 0)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any], where: Path) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ConfigError("RoPE scaling", where=where, expected="none", found=rope.get("rope_type", rope.get("type")))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """A SentencePiece table of `size` tokens: llama.cpp loads no model without one."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(_BYTE_TOKENS))]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * _BYTE_TOKENS]
    more = size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"t{i}" for i in range(more)])
    writer.add_token_types(types + [kinds.NORMAL] * more)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _add_own_vocabulary(writer: gguf.GGUFWriter, path: Path, read: dict[str, Any]) -> None:
    """What was read from a tokenizer.json. Raises ConfigError for other than byte-level BPE with GPT-2's splits."""
    model, splits = read["model"], read["pre_tokenizer"]
    if model["type"] != "BPE" or splits["type"] != "ByteLevel" or not splits["use_regex"]:
        raise ConfigError("tokenizer", where=path, expected="byte-level BPE with GPT-2's splits", found=splits["type"])
    special = {token["content"] for token in read["added_tokens"] if token["special"]}
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.CONTROL if token in special else kinds.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_add_bos_token(False)


def _tensors(source: Checkpoint) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor in float32, with queries and keys in the order of GGUF's `llama`; a tied lm_head is left out."""
    config = source.config
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads", heads["q_proj"])
    for name in source.tensors:
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        values = source.read(name)
        projection = name.split(".")[-2]
        if config["model_type"] == "llama" and projection in heads:
            values = _interleaved(values, heads[projection])
        yield name, values


def _interleaved(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """f32[heads * n, d], reordered in each head: llama.cpp rotates neighbours where Llama pairs the halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def main() -> None:
    """Parse the command line and write one file."""
    parser = command_line(__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--bits", type=int, choices=sorted(_TYPES), default=4)
    options = parser.parse_args()
    make_gguf(options.checkpoint, options.file, bits=options.bits)


if __name__ == "__main__":
    run_program(main)
