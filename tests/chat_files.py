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
from mlcpipe.bundle.states import states_hash

CHAT = {"messages": [{"role": "user", "content": "¿Qué? 👋"}]}
# Offsets in the header and how their numbers are packed.
FIELDS = {
    "version": (8, "<I"), "page_tokens": (12, "<I"), "tokens": (16, "<Q"), "prompt_tokens": (24, "<Q"),
    "chat_bytes": (32, "<Q"), "state_bytes": (40, "<Q"), "model": (48, "<64s"), "states": (112, "<64s"),
    "kv_dtype": (176, "<8s"),
}  # fmt: skip
HEADER, DIGEST = 192, 64


def sealed(content: bytes) -> bytes:
    """A file with the hash of its content."""
    return content + hashlib.sha256(content).hexdigest().encode()


def changed(data: bytes, field: str, value: object) -> bytes:
    """A file with another number in its header, and the hash of that."""
    content = bytearray(data[:-DIGEST])
    offset, form = FIELDS[field]
    struct.pack_into(form, content, offset, value)
    return sealed(bytes(content))


def hollow(path: Path, state_bytes: int) -> None:
    """Make a file with so many bytes of states state many more: 48 GiB, of which the disk has none."""
    data = changed(path.read_bytes(), "state_bytes", 48 << 30)
    begin = len(data) - DIGEST - state_bytes
    path.write_bytes(data[:begin])
    os.truncate(path, begin + (48 << 30) + DIGEST)


def by_hand(manifest: Manifest, tokens: int = 32, chat: object = CHAT) -> bytes:
    """`made_file` for a bundle."""
    identity = hashlib.sha256(f"{manifest.checkpoint_hash} {manifest.quantization}".encode()).hexdigest()
    nbytes = -(-tokens // 16) * sum(state.unit_bytes for state in manifest.states)
    return made_file(nbytes, states_hash(manifest.states), manifest.model.kv_dtype, identity, tokens, chat)


def made_file(state_bytes: int, states: str, kv_dtype: str, model: str, tokens: int = 32, chat: object = CHAT) -> bytes:
    """A file of version 2 by the words of `mlcpipe/runtime/chat_file.py`, with ids from 100 on and any states."""
    text = json.dumps(chat, ensure_ascii=False).encode()
    numbers = (b"mlcchat\x01", 2, 16, tokens, tokens - 2, len(text), state_bytes)
    content = struct.pack("<8s2I4Q64s64s8s8x", *numbers, model.encode(), states.encode(), kv_dtype.encode())
    content += np.arange(100, 100 + tokens, dtype="<i4").tobytes() + text
    content += bytes(-len(content) % 64)
    return sealed(content + random.Random(5).randbytes(state_bytes))


# Of a file of 48 tokens: field, value, words of the refusal.
HEADERS: dict[str, tuple[str, object, str]] = {
    "version 1": ("version", 1, "another version of mlcpipe.*expected version 2; found 1"),
    "no tokens in a page": ("page_tokens", 0, "the length that its header states"),
    "larger pages": ("page_tokens", 17, "the length that its header states"),
    "fewer bytes of states": ("state_bytes", 1, "the length that its header states"),
    "all bytes of states": ("state_bytes", 2**64 - 1, "the length that its header states"),
    "states": ("states", b"1" * 64, "another layout of its states.*found 1111"),
    "more tokens": ("tokens", 49, "is damaged"),
    "all tokens": ("tokens", 2**64 - 1, "the length that its header states"),
    "no prompt": ("prompt_tokens", 0, "a prompt of 1 to 256 tokens; found 0"),
    "a long prompt": ("prompt_tokens", 257, "a prompt of 1 to 256 tokens; found 257"),
    "a long chat": ("chat_bytes", 2**64 - 1, "the length that its header states"),
    "KV dtype": ("kv_dtype", b"q8", "another dtype of the KV cache.*found q8"),
    "controls": ("kv_dtype", b"q8\n\x1b[2J\xff", r"another dtype of the KV cache.*found q8\?\?\[2J\?;"),
    "model": ("model", b"0" * 64, "saved with another model.*load it with the model"),
}
