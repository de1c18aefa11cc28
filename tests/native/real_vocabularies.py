"""The vocabularies that llama.cpp keeps for its tests, with the pipelines that their models publish."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

from tokenizers import Tokenizer

from mlcpipe.checkpoint.gguf.header import read_header
from mlcpipe.checkpoint.gguf.metadata import Metadata
from mlcpipe.checkpoint.gguf.vocabulary import TOKENIZER, tokenizer_files
from tests.unit.text.real_templates import package

NAMES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "gpt-neox"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
# Files of before `tokenizer.ggml.pre`, with what their models publish.
_PRE = {"aquila": "gpt-2", "gpt-neox": "mpt"}


def vocabulary(name: str, folder: Path) -> tuple[Tokenizer, list[tuple[str, list[int]]]]:
    """The library's tokenizer, and texts with the ids that llama.cpp gives where the package has them."""
    with tarfile.open(package()) as archive:
        for member in archive:
            if re.search(rf"/models/ggml-vocab-{re.escape(name)}\.gguf(\.inp|\.out)?$", member.name):
                member.name = Path(member.name).name
                archive.extract(member, folder, filter="data")
    file = folder / f"ggml-vocab-{name}.gguf"
    metadata = read_header(file).metadata
    if name in _PRE:
        metadata = Metadata({**metadata.values, "tokenizer.ggml.pre": _PRE[name]}, metadata.where)
    library = Tokenizer.from_str(tokenizer_files(metadata)[TOKENIZER])
    if not file.with_suffix(".gguf.inp").exists():
        return library, []
    texts = file.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = file.with_suffix(".gguf.out").read_text(encoding="utf-8").split("\n")
    return library, [(text, [*map(int, line.split())]) for text, line in zip(texts, ids, strict=False)]
