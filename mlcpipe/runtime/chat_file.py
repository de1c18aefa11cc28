"""A conversation in a file: its tokens, the states after them, and data of the caller.

    header, 192 bytes | tokens, i32[n] | chat | zeros up to a multiple of 64 | states | sha256 of all before, 64 digits

The header, little-endian:

    0    magic "mlcchat" and 1      24  u64  tokens of the last prompt      112 states, 64 hexadecimal digits
    8    u32  version: 2            32  u64  bytes of the chat              176 KV dtype, 8 bytes with zeros: q8
    12   u32  tokens of a page: 16  40  u64  bytes of the states            184 zeros
    16   u64  tokens n              48  model, 64 hexadecimal digits

The model is the SHA-256 of "<checkpoint_hash> <quantization>" of the manifest, so another target of the same weights
may read the file; `bundle/states.py` has that of the states. The chat is a JSON object, or nothing. The states are in
the order of the manifest: pages that a later token attends to, with zeros in unused places of the last one; the bytes
of a slot; nothing if there are no tokens. RoPE with a dynamic length follows the tokens of the last
prompt. `mlcpipe/native/runtime/chat_file.cc` reads and writes the same.
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

from mlcpipe.bundle import Manifest
from mlcpipe.bundle.states import State, first_page, states_hash
from mlcpipe.errors import UsageError
from mlcpipe.support.atomic import atomic_file
from mlcpipe.support.files import file_size
from mlcpipe.support.json_files import parse_json_object, shown_path
from tir_schedules.step_layout import PAGE

MAGIC = b"mlcchat\x01"
VERSION = 2
MAX_CHAT_BYTES = 16 << 20
_HEADER = struct.Struct("<8s2I4Q64s64s8s8x")
_ALIGNMENT, _DIGEST_BYTES = 64, 64
_WHAT = "saved chat"


class _Header(NamedTuple):
    magic: bytes
    version: int
    page_tokens: int
    tokens: int
    prompt_tokens: int
    chat_bytes: int
    state_bytes: int
    model: bytes
    states: bytes
    kv_dtype: bytes

    @property
    def states_begin(self) -> int:
        """Where the states begin in the file."""
        end = _HEADER.size + 4 * self.tokens + self.chat_bytes
        return end + -end % _ALIGNMENT

    @property
    def file_bytes(self) -> int:
        """The length of the file."""
        return self.states_begin + self.state_bytes + _DIGEST_BYTES


@dataclass(frozen=True)
class SavedChat:
    """The content of a file; `states` are the mapped units int8[n, unit_bytes] of each."""

    tokens: list[int]
    prompt_tokens: int
    chat: dict[str, Any] | None
    states: list[NDArray[np.int8]]

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        return sum(units.nbytes for units in self.states)


def saved_units(state: State, tokens: int) -> int:
    """Number of units of a state in a file of `tokens` tokens."""
    if state.kind == "slot":
        return int(tokens > 0)
    return -(-tokens // PAGE) - first_page(state.window, tokens) if tokens else 0


def is_chat_file(path: Path) -> bool:
    """Whether a file starts like those of `write_chat`. Raises UsageError for one that cannot be read."""
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
    states: Iterable[NDArray[np.int8]],
    chat: Mapping[str, Any] | None,
    mode: int = 0o666,
) -> None:
    """Write a file as a whole or not at all; `states` are the units int8[n, unit_bytes] of each; `mode` is `open(2)`'s.

    Raises UsageError where `path` has another kind of file or cannot be written, and for a chat that is no JSON;
    ResourceError where the disk has no room.
    """
    text = _json(chat)
    if path.exists() and not is_chat_file(path):
        raise UsageError("a chat does not overwrite other files", where=path, next_step="give another name")
    header = _header_of(manifest, len(tokens))._replace(prompt_tokens=prompt_tokens, chat_bytes=len(text))
    begin = _HEADER.pack(*header) + np.array(tokens, "<i4").tobytes() + text
    parts: Iterable[Any] = itertools.chain([begin.ljust(header.states_begin, b"\0")], states)
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
    """Map a file and check all of it, reading it once. Raises UsageError that states the fault.

    Its length is checked against the model and the context before the content is read.
    """
    size = file_size(path, UsageError, _WHAT)
    if size < _HEADER.size + _DIGEST_BYTES or not is_chat_file(path):
        raise UsageError(f"not a {_WHAT}", where=path, expected="a file that /save or Engine.save wrote")
    with path.open("rb") as file:
        header = _Header._make(_HEADER.unpack(file.read(_HEADER.size)))
        _check_header(path, header, size)
        _check_tokens(path, header, context_length)
        _check_model(path, header, _header_of(manifest, header.tokens))
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
    states, at = [], header.states_begin
    for state in manifest.states:
        count = saved_units(state, header.tokens)
        states.append(data[at : at + count * state.unit_bytes].reshape(count, state.unit_bytes))
        at += count * state.unit_bytes
    chat = (
        parse_json_object(text, where=shown_path(path), error=UsageError, max_values=MAX_CHAT_BYTES) if text else None
    )
    return SavedChat(ids.tolist(), header.prompt_tokens, chat, states)


def clear_unused(state: State, units: NDArray[np.int8], tokens: int) -> None:
    """Fill the unused places of the last of the pages int8[n, unit_bytes] of `tokens` tokens with zeros."""
    if state.kind == "slot" or not (used := tokens % PAGE):
        return
    begin, copies = 0, units[-1].reshape(state.copies, -1)
    for part in state.parts:
        assert part.token_axis is not None
        data = copies[:, begin : begin + part.nbytes].reshape(state.copies, *part.shape, -1)  # last an item's bytes
        np.moveaxis(data, 1 + part.token_axis, 0)[used:] = 0
        begin += part.nbytes


def _header_of(manifest: Manifest, tokens: int) -> _Header:
    """The header of a file of a bundle, without the prompt and the chat."""
    model, states = manifest.model, manifest.states
    identity = hashlib.sha256(f"{manifest.checkpoint_hash} {manifest.quantization}".encode()).hexdigest()
    nbytes = sum(saved_units(state, tokens) * state.unit_bytes for state in states)
    return _Header(
        MAGIC, VERSION, PAGE, tokens, 0, 0, nbytes, identity.encode(), states_hash(states).encode(),
        model.kv_dtype.encode().ljust(8, b"\0"),
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
    """Check the version and the length of the file."""
    if header.version != VERSION:
        raise UsageError(
            f"a {_WHAT} of another version of mlcpipe", where=path, expected=f"version {VERSION}", found=header.version
        )
    if header.page_tokens != PAGE or header.chat_bytes > MAX_CHAT_BYTES or header.file_bytes != size:
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
    """Check that the model and its states are those of the bundle."""
    if header.model != ours.model:
        raise UsageError(
            "the chat was saved with another model",
            where=path,
            expected="the checkpoint and quantization of this one",
            next_step="load it with the model that it was saved with",
        )
    for field, what in (("kv_dtype", "dtype of the KV cache"), ("states", "layout of its states")):
        one, other = getattr(ours, field), getattr(header, field)
        if one != other:
            raise UsageError(
                f"the chat was saved with another {what}",
                where=path,
                expected=_printable(one.rstrip(b"\0")),
                found=_printable(other.rstrip(b"\0")),
                next_step="load it with the bundle that it was saved with",
            )
    if header.state_bytes != ours.state_bytes:
        raise _damaged(path, f"{ours.state_bytes} bytes of states", header.state_bytes)


def _printable(name: bytes) -> str:
    """As text, with a question mark for every byte that is not printable."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in name)


def _damaged(path: Path, expected: str, found: object) -> UsageError:
    return UsageError(
        f"the {_WHAT} is damaged", where=path, expected=expected, found=found, next_step="save the chat again"
    )
