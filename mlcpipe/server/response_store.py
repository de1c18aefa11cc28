"""Responses that clients continue or get again: in memory, as many as fit, those used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlcpipe.server.errors import ApiError

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20  # of all, as JSON
_MEMORY = 4  # times its JSON that a response takes, about
Items = list[dict[str, Any]]


@dataclass(frozen=True)
class Stored:
    """A response with its own input; what came before it is the response `previous`."""

    response: dict[str, Any]
    items: Items
    previous: str | None
    nbytes: int


class ResponseStore:
    """Responses by owner and id. All methods run in the event loop."""

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes // _MEMORY
        self._kept: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._nbytes = 0

    def add(self, owner: str, response: dict[str, Any], items: Items, nbytes: int) -> None:
        """Keep a response of `nbytes` as JSON, about; the ones used longest ago leave. One that is too large alone is
        not kept.
        """
        if nbytes > self._most_bytes:
            return
        self._kept[owner, response["id"]] = Stored(response, items, response["previous_response_id"], nbytes)
        self._nbytes += nbytes
        while len(self._kept) > self._most or self._nbytes > self._most_bytes:
            _, left = self._kept.popitem(last=False)
            self._nbytes -= left.nbytes

    def get(self, owner: str, name: str, param: str | None = None) -> Stored:
        """Raises ApiError for one that is not kept."""
        found = self._kept.get((owner, name))
        if found is None:
            message = f"there is no response {name[:100]!r}: it was not stored, was deleted, or left for newer ones"
            raise ApiError(404, message, code="response_not_found", param=param)
        self._kept.move_to_end((owner, name))
        return found

    def delete(self, owner: str, name: str) -> None:
        """Forget a response. Raises ApiError for one that is not kept."""
        self._nbytes -= self.get(owner, name).nbytes
        del self._kept[owner, name]

    def history(self, owner: str, name: str | None, most: int, param: str | None = None) -> tuple[Items, int]:
        """All items, input and output, up to the end of a response, and their bytes as JSON; None has none.

        Raises ApiError where one of its responses is not kept, and for more than `most` items.
        """
        parts: list[Sequence[dict[str, Any]]] = []
        count = nbytes = 0
        while name is not None:
            found = self.get(owner, name, param)
            parts.append([*found.items, *found.response["output"]])
            name, count, nbytes = found.previous, count + len(parts[-1]), nbytes + found.nbytes
            if count > most:
                raise ApiError(400, f"the conversation has more than {most} items; begin another one", param=param)
        return [item for part in reversed(parts) for item in part], nbytes
