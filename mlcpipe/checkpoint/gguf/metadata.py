"""The key-value part of a GGUF file: a bounded reader, and typed access to what it read.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): keys and strings are a u64 length and UTF-8;
a value is a u32 type and its bytes; an array is a u32 type of its items, a u64 count and the items.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import CheckpointError, ConfigError
from mlcpipe.support.json_files import shown

MAX_HEADER_BYTES = 256 << 20  # metadata and tensor list; 256,000 tokens and their merges take 15 MB
MAX_PAIRS = 10_000
MAX_KEY_BYTES = 256
MAX_STRING_BYTES = 1 << 20  # a chat template; a token is far shorter
MAX_STRINGS = 1 << 22  # of all arrays together: 2 million merges and as many tokens
FIRST_READ_BYTES = 1 << 20
Value = bool | int | float | str | NDArray[Any] | list[str]

_STRING, _ARRAY = 8, 9
_INTEGERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 10: "<u8", 11: "<i8"}
_NUMBERS = {**_INTEGERS, 6: "<f4", 7: "|b1", 12: "<f8"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class HeaderReader:
    """Reads the start of a file of `size` bytes, at most MAX_HEADER_BYTES, in reads of doubling length."""

    def __init__(self, file: io.RawIOBase, size: int, where: str) -> None:
        self._file, self._size, self.where = file, size, where
        self._data = b""
        self._strings_left = MAX_STRINGS
        self.at = 0

    def error(self, what: str, expected: object = None, found: object = None) -> CheckpointError:
        """A CheckpointError about this file."""
        return CheckpointError(
            what, where=self.where, expected=expected, found=found, next_step="download the file again"
        )

    def u32(self) -> int:
        """The next u32."""
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        """The next u64."""
        return int(_U64.unpack(self.take(8))[0])

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises CheckpointError if the file or the limit ends before."""
        self._load(count)
        self.at += count
        return self._data[self.at - count : self.at]

    def text(self, limit: int = MAX_STRING_BYTES) -> str:
        """The next string, at most `limit` bytes."""
        length = self.u64()
        if length > limit:
            raise self.error("a string of the GGUF header is too long", f"at most {limit} bytes", length)
        return self._decoded([self.take(length)])[0]

    def name(self, limit: int) -> str:
        """The next string, which must be printable and not empty."""
        name = self.text(limit)
        if not name or not name.isprintable():
            raise self.error("bad name in the GGUF header", "printable characters", shown(name))
        return name

    def value(self) -> Value:
        """The next value with its type."""
        kind = self.u32()
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        number = self._numbers(kind, 1)[0]
        # The shortest decimal of a float32: what config.json had.
        return float(str(number)) if number.dtype == np.float32 else number.item()

    def _array(self) -> Value:
        kind, count = self.u32(), self.u64()
        if kind == _ARRAY:
            raise self.error("nested arrays in the GGUF header", "arrays of numbers or strings")
        return self._strings(count) if kind == _STRING else self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        if kind not in _NUMBERS:
            raise self.error("unknown type of a value in the GGUF header", f"0 to {max(_NUMBERS)}", kind)
        dtype = np.dtype(_NUMBERS[kind])
        raw = self.take(count * dtype.itemsize)
        if dtype.kind == "b" and count and max(raw) > 1:
            raise self.error("bad boolean in the GGUF header", "0 or 1", max(raw))
        return np.frombuffer(raw, dtype)

    def _strings(self, count: int) -> list[str]:
        if count > self._strings_left:
            raise self.error("too many strings in the GGUF header", f"at most {self._strings_left} more", count)
        self._check_room(8 * count)
        self._strings_left -= count
        raw, unpack = [], _U64.unpack_from
        data, at, end = self._data, self.at, len(self._data)
        for _ in range(count):
            length = unpack(data, at)[0] if at + 8 <= end else MAX_STRING_BYTES + 1
            if at + 8 + length > end:  # the rare case: more of the file is needed, or the length is wrong
                self.at = at
                raw.append(self.take(self._checked(self.u64())))
                data, at, end = self._data, self.at, len(self._data)
            else:
                at += 8 + length
                raw.append(data[at - length : at])
        self.at = at
        return self._decoded(raw)

    def _checked(self, length: int) -> int:
        if length > MAX_STRING_BYTES:
            raise self.error("a string of the GGUF header is too long", f"at most {MAX_STRING_BYTES} bytes", length)
        return length

    def _decoded(self, raw: list[bytes]) -> list[str]:
        try:
            return [text.decode() for text in raw]
        except UnicodeDecodeError as error:
            raise self.error("a string of the GGUF header is not UTF-8", found=shown(error.object)) from error

    def _check_room(self, count: int) -> None:
        """Raise CheckpointError unless the file has `count` more bytes."""
        if self.at + count > self._size:
            raise self.error("truncated GGUF file", f"{self.at + count} bytes or more", self._size)

    def _load(self, count: int) -> None:
        """Make `count` bytes from `at` on available."""
        end = self.at + count
        if end <= len(self._data):
            return
        self._check_room(count)
        if end > MAX_HEADER_BYTES:
            raise self.error("GGUF header too long", f"at most {MAX_HEADER_BYTES} bytes", f"{end} bytes or more")
        want = min(max(end, FIRST_READ_BYTES, 2 * len(self._data)), self._size, MAX_HEADER_BYTES)
        self._data += self._file.read(want - len(self._data)) or b""
        if end > len(self._data):
            raise self.error("truncated GGUF file", f"{end} bytes or more", f"{len(self._data)}")


class Metadata:
    """Typed access to the pairs of a file; every failure is a ConfigError that names the key."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self.values, self.where = values, where

    def error(self, key: str, expected: object, found: object = None) -> ConfigError:
        """A ConfigError about one key."""
        return ConfigError(f"key {key}", where=self.where, expected=expected, found=found)

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer."""
        value = self.values.get(key, default)
        if type(value) is not int or value < 0:
            raise self.error(key, "a non-negative integer", self._shown(key))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not np.isfinite(value):  # type: ignore[arg-type]
            raise self.error(key, "a number", self._shown(key))
        return float(value)  # type: ignore[arg-type]

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", self._shown(key))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", self._shown(key))
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.error(key, "an array of strings", self._shown(key))
        return value

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """An array of `count` numbers."""
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise self.error(key, f"an array of {count} numbers", self._shown(key))
        return value

    def _shown(self, key: str) -> str:
        value = self.values.get(key)
        return f"an array of {len(value)}" if isinstance(value, (list, np.ndarray)) else shown(value)
