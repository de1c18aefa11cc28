"""Tables that stay in the mapped file of a GPU's bundle: the host gathers the rows of a forward's tokens.

Gemma 4 E2B has 262,144 rows of 8,960 numbers: 1.3 GB in 4 bits, of which a token reads 5 KB.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm_ffi
from numpy.typing import NDArray

from mlcpipe.devices.base import Reused
from mlcpipe.runtime.loading import LoadedBundle


class TokenTables:
    """The weights of forwards, which are the bundle's where it has no such table."""

    def __init__(self, bundle: LoadedBundle) -> None:
        self._bundle, self._device = bundle, bundle.device
        places = {info.name: index for index, info in enumerate(bundle.manifest.params)}
        self._tables = [(places[name], table) for name, table in bundle.tables.items()]
        self._reused = [Reused(self._device, table.dtype.name) for _, table in self._tables]
        self._rows: tuple[Any, ...] = ()
        self._params = bundle.params

    @property
    def whole(self) -> Any:
        """The weights for a forward that takes no tokens."""
        return self._bundle.params

    def prompts(self, tokens: NDArray[np.int32]) -> Any:
        """The weights for a forward of tokens i32[n]."""
        return self._with([self._device.tensor(_rows(table, tokens)) for _, table in self._tables])

    def decode(self, tokens: NDArray[np.int32]) -> tuple[Any, tuple[Any, ...]]:
        """The weights for a forward of tokens i32[b], valid until the next call, and those of them that steps replace.

        They are the same objects while b is the same.
        """
        rows = tuple(reused.put(_rows(table, tokens)) for reused, (_, table) in zip(self._reused, self._tables))
        if any(one is not before for one, before in zip(rows, self._rows or (None,) * len(rows))):
            self._rows = ()  # in case Ctrl-C interrupts the following line
            self._params = self._with(rows)
            self._rows = rows
        return self._params, rows

    def _with(self, rows: Any) -> Any:
        if not self._tables:
            return self._bundle.params
        params = list(self._bundle.params)
        for (index, _), one in zip(self._tables, rows):
            params[index] = one
        return tvm_ffi.convert(params)


def _rows(table: NDArray[Any], tokens: NDArray[np.int32]) -> NDArray[Any]:
    """Rows [m, X] of a table [n, X]; row 0 for tokens beyond it."""
    rows: NDArray[Any] = table[np.where(tokens < len(table), tokens, 0)]
    return rows
