"""Tokenizers that outlive their models: with 128,000 tokens reading one takes nine tenths of the time of a load."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from pathlib import Path

from mlcpipe.bundle import Manifest
from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
from mlcpipe.runtime.text.tokenizer import Tokenizer
from mlcpipe.runtime.text.tokenizer_files import FILE_NAMES

_FILES = frozenset(("config.json", "generation_config.json", *FILE_NAMES))
_Key = tuple[tuple[str, str], ...]


class KeptTokenizers:
    """The tokenizers that were used last, for any bundle with the same files.

    most        that are kept; the last one is kept in any case
    most_bytes  of their files together; what is read of them takes some ten times as much
    """

    def __init__(self, most: int = 4, most_bytes: int = 48 << 20) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[_Key, tuple[Tokenizer, int]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, bundle: Path, manifest: Manifest) -> Tokenizer:
        """The tokenizer of a bundle whose files agree with its manifest; its `most_chars` is the caller's to set.

        Raises TokenizerError for a bundle of a checkpoint that had none.
        """
        files = {name: info for name, info in manifest.files.items() if name in _FILES}
        key = tuple(sorted((name, info.sha256) for name, info in files.items()))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = open_tokenizer(bundle), sum(info.bytes for info in files.values())
            self._kept.move_to_end(key)
            while len(self._kept) > 1 and (len(self._kept) > self._most or self._bytes > self._most_bytes):
                self._kept.popitem(last=False)
            return copy.copy(self._kept[key][0])

    @property
    def _bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._kept.values())
