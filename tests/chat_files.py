"""Files of saved chats, of the random llama that `tests/conftest.py` makes: whole, and with wrong numbers in them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from pathlib import Path

import numpy as np

from mlcpipe.bundle import Manifest

CHAT = {"messages": [{"role": "user", "content": "¿Qué? 👋"}]}
# Offsets in the header and how their numbers are packed.
FIELDS = {
    "version": (8, "<I"), "page_tokens": (12, "<I"), "layers": (16, "<I"), "kv_heads": (20, "<I"),
    "page_bytes": (24, "<I"), "head_dim": (28, "<I"), "tokens": (32, "<Q"), "prompt_tokens": (40, "<Q"),
    "chat_bytes": (48, "<Q"), "kv_dtype": (56, "<8s"), "model": (64, "<64s"),
}  # fmt: skip
HEADER, DIGEST = 128, 64


def sealed(content: bytes) -> bytes:
    """A file with the hash of its content."""
    return content + hashlib.sha256(content).hexdigest().encode()


def changed(data: bytes, field: str, value: object) -> bytes:
    """A file with another number in its header, and the hash of that."""
    content = bytearray(data[:-DIGEST])
    offset, form = FIELDS[field]
    struct.pack_into(form, content, offset, value)
    return sealed(bytes(content))


def hollow(path: Path, page_bytes: int) -> None:
    """Make a file of 48 tokens, two layers and such pages state many larger ones: 48 GiB, of which the disk has none."""
    layers, grown = 1 << 16, 1 << 18
    data = changed(changed(path.read_bytes(), "layers", layers), "page_bytes", grown)
    begin = len(data) - DIGEST - 3 * 2 * page_bytes
    path.write_bytes(data[:begin])
    os.truncate(path, begin + 3 * layers * grown + DIGEST)


def by_hand(manifest: Manifest, tokens: int = 32, chat: object = CHAT) -> bytes:
    """`made_file` for a bundle."""
    model = manifest.model
    identity = hashlib.sha256(f"{manifest.checkpoint_hash} {manifest.quantization}".encode()).hexdigest()
    numbers = (16, model.num_layers, model.num_key_value_heads, manifest.page_bytes, model.head_dim)
    return made_file(numbers, model.kv_dtype, identity, tokens, chat)


def made_file(
    numbers: tuple[int, int, int, int, int], kv_dtype: str, model: str, tokens: int = 32, chat: object = CHAT
) -> bytes:
    """A file of version 1 by the words of `mlcpipe/runtime/chat_file.py`, with ids from 100 on and any keys and values.

    `numbers` are tokens of a page, layers, KV heads, bytes of a page, and head_dim.
    """
    text = json.dumps(chat, ensure_ascii=False).encode()
    sizes = (tokens, tokens - 2, len(text))
    content = struct.pack("<8sIIIIIIQQQ8s64s", b"mlcchat\x01", 1, *numbers, *sizes, kv_dtype.encode(), model.encode())
    content += np.arange(100, 100 + tokens, dtype="<i4").tobytes() + text
    content += bytes(-len(content) % 64)
    return sealed(content + random.Random(5).randbytes(-(-tokens // 16) * numbers[1] * numbers[3]))


# Of a file of 48 tokens: field, value, words of the refusal.
HEADERS: dict[str, tuple[str, object, str]] = {
    "another version": ("version", 2, "another version of mlcpipe.*expected version 1; found 2"),
    "no tokens in a page": ("page_tokens", 0, "the length that its header states"),
    "larger pages": ("page_tokens", 17, "another page_tokens of the KV cache.*expected 16; found 17"),
    "more layers": ("layers", 3, "the length that its header states"),
    "all layers": ("layers", 2**32 - 1, "the length that its header states"),
    "heads": ("kv_heads", 4, "another kv_heads of the KV cache.*expected 2; found 4"),
    "bytes of a page": ("page_bytes", 2**32 - 1, "the length that its header states"),
    "head_dim": ("head_dim", 32, "another head_dim of the KV cache.*expected 16; found 32"),
    "more tokens": ("tokens", 49, "the length that its header states"),
    "all tokens": ("tokens", 2**64 - 1, "the length that its header states"),
    "no prompt": ("prompt_tokens", 0, "a prompt of 1 to 256 tokens; found 0"),
    "a long prompt": ("prompt_tokens", 257, "a prompt of 1 to 256 tokens; found 257"),
    "a long chat": ("chat_bytes", 2**64 - 1, "the length that its header states"),
    "KV dtype": ("kv_dtype", b"q8", "another kv_dtype of the KV cache.*found q8"),
    "controls": ("kv_dtype", b"q8\n\x1b[2J\xff", r"another kv_dtype of the KV cache.*found q8\?\?\[2J\?;"),
    "model": ("model", b"0" * 64, "saved with another model.*load it with the model"),
}
