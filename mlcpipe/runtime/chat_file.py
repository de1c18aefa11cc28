"""A conversation in a file: its tokens, their keys and values, and what the caller wants back with them.

    header, 128 bytes | tokens, i32[n] | chat | zeros up to a multiple of 64 | pages | sha256 of all before, 64 digits

The header, little-endian:

    0    magic "mlcchat" and 1      24  u32  bytes of a page of a layer     56  KV dtype, 8 bytes with zeros: q8
    8    u32  version: 1            28  u32  head_dim                       64  model, 64 hexadecimal digits
    12   u32  tokens of a page: 16  32  u64  tokens n
    16   u32  layers                40  u64  tokens of the last prompt
    20   u32  KV heads              48  u64  bytes of the chat

The model is the SHA-256 of "<checkpoint_hash> <quantization>" of the manifest, so another target of the same weights
may read the file. The chat is a JSON object, or nothing. Pages are int8[layers, ceil(n / 16), bytes], each as
`tir_schedules/cpu/attention/pages.py` says; in the last one the places of no token are 0. RoPE with a dynamic length
follows the tokens of the last prompt. `mlcpipe/native/runtime/chat_file.cc` reads and writes the same.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlcpipe.atomic import atomic_file
from mlcpipe.bundle import Manifest
from mlcpipe.errors import UsageError
from mlcpipe.files import file_size
from mlcpipe.json_files import parse_json_object, shown_path
from tir_schedules.step_layout import ITEM_BITS

MAGIC = b"mlcchat\x01"
VERSION = 1
MAX_CHAT_BYTES = 16 << 20
_HEADER = struct.Struct("<8s6I3Q8s64s")
_ALIGNMENT, _DIGEST_BYTES = 64, 64
_WHAT = "saved chat"


class _Header(NamedTuple):
    magic: bytes
    version: int
    page_tokens: int
    layers: int
    kv_heads: int
    page_bytes: int
    head_dim: int
    tokens: int
    prompt_tokens: int
    chat_bytes: int
    kv_dtype: bytes
    model: bytes

    @property
    def pages_begin(self) -> int:
        """Where the pages begin in the file."""
        end = _HEADER.size + 4 * self.tokens + self.chat_bytes
        return end + -end % _ALIGNMENT

    @property
    def pages_shape(self) -> tuple[int, int, int]:
        """[layers, pages, bytes] of the pages."""
        return self.layers, -(-self.tokens // self.page_tokens), self.page_bytes

    @property
    def file_bytes(self) -> int:
        """The length of the file."""
        layers, pages, nbytes = self.pages_shape
        return self.pages_begin + layers * pages * nbytes + _DIGEST_BYTES


@dataclass(frozen=True)
class SavedChat:
    """What a file holds: `pages` are int8[layers, pages, bytes], mapped."""

    tokens: list[int]
    prompt_tokens: int
    chat: dict[str, Any] | None
    pages: NDArray[np.int8]


def is_chat_file(path: Path) -> bool:
    """Whether a file begins as those that `write_chat` writes. Raises UsageError for one that cannot be read."""
    file_size(path, UsageError, _WHAT)
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UsageError(f"cannot read the {_WHAT}", where=path, found=error.strerror) from error


def write_chat(
    path: Path,
    manifest: Manifest,
    tokens: Sequence[int],
    prompt_tokens: int,
    layers: Iterable[NDArray[np.int8]],
    chat: Mapping[str, Any] | None,
    mode: int = 0o666,
) -> None:
    """Write a file as a whole or not at all; `layers` are the pages int8[pages, bytes] of each; `mode` is `open(2)`'s.

    Raises UsageError where `path` has another kind of file or cannot be written, and for a chat that is no JSON;
    ResourceError where the disk has no room.
    """
    text = _json(chat)
    if path.exists() and not is_chat_file(path):
        raise UsageError("a chat does not overwrite other files", where=path, next_step="give another name")
    header = _header_of(manifest)._replace(tokens=len(tokens), prompt_tokens=prompt_tokens, chat_bytes=len(text))
    begin = _HEADER.pack(*header) + np.array(tokens, "<i4").tobytes() + text
    parts: Iterable[Any] = itertools.chain([begin.ljust(header.pages_begin, b"\0")], layers)
    digest = hashlib.sha256()
    try:
        with atomic_file(path, header.file_bytes, mode) as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.hexdigest().encode())
    except (OSError, ValueError) as error:  # a name with a zero
        raise UsageError("the chat cannot be saved", where=path, found=getattr(error, "strerror", error)) from error


def read_chat(path: Path, manifest: Manifest, context_length: int) -> SavedChat:
    """Map a file and check all of it, reading it once. Raises UsageError that says what is wrong with it.

    Its length is checked against the model and the context before the content is read.
    """
    size = file_size(path, UsageError, _WHAT)
    if size < _HEADER.size + _DIGEST_BYTES or not is_chat_file(path):
        raise UsageError(f"not a {_WHAT}", where=path, expected="a file that /save or Engine.save wrote")
    with path.open("rb") as file:
        header = _Header._make(_HEADER.unpack(file.read(_HEADER.size)))
        _check_header(path, header, size)
        _check_model(path, header, _header_of(manifest))
        _check_tokens(path, header, context_length)
        data = np.memmap(file, np.int8, mode="c")
    if hashlib.sha256(data[:-_DIGEST_BYTES].data).hexdigest().encode() != data[-_DIGEST_BYTES:].tobytes():
        raise _damaged(path, "the content that was written", "other bytes")
    ids = data[_HEADER.size :][: 4 * header.tokens].view("<i4")
    vocab, most = manifest.model.vocab_size, manifest.model.context_length
    if header.tokens and (ids.min() < 0 or ids.max() >= vocab):
        raise _damaged(path, f"token ids from 0 to {vocab - 1}", f"{ids.min()} to {ids.max()}")
    if not bool(header.tokens) <= header.prompt_tokens <= most:
        raise _damaged(path, f"a prompt of 1 to {most} tokens", header.prompt_tokens)
    text = data[_HEADER.size + 4 * header.tokens :][: header.chat_bytes].tobytes()
    pages = data[header.pages_begin : -_DIGEST_BYTES].reshape(header.pages_shape)
    chat = (
        parse_json_object(text, where=shown_path(path), error=UsageError, max_values=MAX_CHAT_BYTES) if text else None
    )
    return SavedChat(ids.tolist(), header.prompt_tokens, chat, pages)


def clear_unused(pages: NDArray[np.int8], tokens: int, manifest: Manifest) -> None:
    """Make the places of no token in the last of the pages int8[P, bytes] of `tokens` tokens 0."""
    model = manifest.model
    if not (used := tokens % model.page_size):
        return
    heads = pages[-1].reshape(model.num_key_value_heads, -1)
    bits = ITEM_BITS[model.kv_dtype]
    item, half = max(1, bits // 8), model.head_dim * model.page_size * bits // 8
    keys, values, scales = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
    keys.reshape(len(heads), -1, model.page_size, item)[:, :, used:] = 0
    values.reshape(len(heads), model.page_size, -1)[:, used:] = 0
    if scales.size:
        scales.reshape(len(heads), -1, model.page_size, 2)[:, :, used:] = 0


def _header_of(manifest: Manifest) -> _Header:
    """The header of an empty file for a bundle."""
    model = manifest.model
    identity = hashlib.sha256(f"{manifest.checkpoint_hash} {manifest.quantization}".encode()).hexdigest()
    return _Header(
        MAGIC, VERSION, model.page_size, model.num_layers, model.num_key_value_heads, manifest.page_bytes,
        model.head_dim, 0, 0, 0, model.kv_dtype.encode().ljust(8, b"\0"), identity.encode(),
    )  # fmt: skip


def _json(chat: Mapping[str, Any] | None) -> bytes:
    if chat is None:
        return b""
    try:
        text = json.dumps(chat, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError("the chat to save", expected="an object of JSON", found=error) from error
    if len(text) > MAX_CHAT_BYTES:
        raise UsageError("the chat to save", expected=f"at most {MAX_CHAT_BYTES} bytes", found=len(text))
    return text


def _check_header(path: Path, header: _Header, size: int) -> None:
    """The version, and the length of the whole file."""
    if header.version != VERSION:
        raise UsageError(
            f"a {_WHAT} of another version of mlcpipe", where=path, expected=f"version {VERSION}", found=header.version
        )
    if not header.page_tokens or header.chat_bytes > MAX_CHAT_BYTES or header.file_bytes != size:
        raise _damaged(path, "the length that its header states", f"{size} bytes")


def _check_tokens(path: Path, header: _Header, context_length: int) -> None:
    if header.tokens > context_length:
        raise UsageError(
            f"the {_WHAT} is longer than the context",
            where=path,
            expected=f"at most {context_length} tokens",
            found=header.tokens,
            next_step="load the model with a larger context",
        )


def _check_model(path: Path, header: _Header, ours: _Header) -> None:
    """The model, and how its keys and values are kept."""
    if header.model != ours.model:
        raise UsageError(
            "the chat was saved with another model",
            where=path,
            expected="the checkpoint and quantization of this one",
            next_step="load it with the model that it was saved with",
        )
    for field in ("kv_dtype", "page_tokens", "layers", "kv_heads", "page_bytes", "head_dim"):
        one, other = getattr(ours, field), getattr(header, field)
        if one != other:
            names = [_printable(v.rstrip(b"\0")) if isinstance(v, bytes) else v for v in (one, other)]
            raise UsageError(
                f"the chat was saved with another {field} of the KV cache",
                where=path,
                expected=names[0],
                found=names[1],
                next_step="load it with the bundle that it was saved with",
            )


def _printable(name: bytes) -> str:
    """With a question mark for everything that may not go into a line."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in name)


def _damaged(path: Path, expected: str, found: object) -> UsageError:
    return UsageError(
        f"the {_WHAT} is damaged", where=path, expected=expected, found=found, next_step="save the chat again"
    )
