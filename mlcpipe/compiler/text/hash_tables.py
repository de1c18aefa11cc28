"""Open addressing with linear probing, for `Find` of `mlcpipe/native/runtime/text/tokenizer_tables.h`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mlcpipe.errors import TokenizerError

EMPTY = 0xFFFFFFFF
MAX_PROBES = 128  # as in tokenizer_tables.h
_FNV_START, _FNV_PRIME = np.uint32(2166136261), np.uint32(16777619)


def hash_numbers(*columns: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A hash of each row of numbers."""
    mixed = np.zeros(len(columns[0]), np.uint32)
    with np.errstate(over="ignore"):
        for column in columns:
            mixed = (mixed ^ column) * np.uint32(0x9E3779B1)
            mixed ^= mixed >> np.uint32(15)
    return mixed


def hash_texts(texts: Sequence[bytes]) -> NDArray[np.uint32]:
    """FNV-1a of each text, with its high bits mixed into the low ones."""
    data = np.frombuffer(b"".join(texts), np.uint8)
    lengths = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    mixed = np.full(len(texts), _FNV_START, np.uint32)
    at, left = 0, np.arange(len(texts))
    with np.errstate(over="ignore"):
        while len(left := left[lengths[left] > at]):
            mixed[left] = (mixed[left] ^ data[starts[left] + at]) * _FNV_PRIME
            at += 1
    mixed ^= mixed >> np.uint32(15)
    return mixed


def slots(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The index of an entry in each slot, or EMPTY; the number of slots is a power of two.

    An entry with a hash lies at most MAX_PROBES after the slot of its hash, with no empty one between.
    """
    size = 1 << max(4, (len(hashes) * 3 // 2).bit_length())
    while True:
        table = np.full(size, EMPTY, np.uint32)
        left = np.arange(len(hashes), dtype=np.uint32)
        for probe in range(MAX_PROBES):
            at = (hashes[left] + np.uint32(probe)) & np.uint32(size - 1)
            free = table[at] == EMPTY
            table[at[free]] = left[free]
            left = left[table[at] != left]
            if not len(left):
                return table
        size *= 2
        if size > 1 << 26:
            raise TokenizerError("the vocabulary does not fit a hash table", found=len(hashes))
