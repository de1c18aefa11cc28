"""Responses that clients continue or get again: in memory, as many as fit, those used last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mlcpipe.server.errors import ApiError
from mlcpipe.server.owned_store import Items, OwnedStore, memory_of

MAX_RESPONSES = 4096
MAX_BYTES = 128 << 20  # of memory, of all
_T = TypeVar("_T")


@dataclass(frozen=True)
class Stored:
    """A response with its own input; what came before it is the response `previous`."""

    response: dict[str, Any]
    items: Items
    previous: str | None
    json_bytes: int
    nbytes: int  # of memory


class ResponseStore(OwnedStore[Stored]):
    """Responses by owner and id, see `OwnedStore`; `ask` is the way to it from the event loop."""

    kind, lost = "response", "it was not stored, was deleted, or left for newer ones"

    def __init__(self, most: int = MAX_RESPONSES, most_bytes: int = MAX_BYTES) -> None:
        super().__init__(most, most_bytes)
        self._places: dict[tuple[str, str], str] = {}  # of each owner's items, by id, the response that has it

    async def ask(self, work: Callable[[ResponseStore], _T]) -> _T:
        """The result of `work` with the store, of which nothing else is seen or done meanwhile. Raises ApiError."""
        return work(self)

    def close(self) -> None:
        """Last call."""

    def add(self, owner: str, response: dict[str, Any], items: Items, json_bytes: int, values: int = 0) -> bool:
        """Keep a response of `json_bytes` as JSON with so many `values`, about; others leave. False for one that is too
        large, which is not kept.
        """
        nbytes = memory_of(json_bytes, 1 + len(items), values)
        stored = Stored(response, items, response["previous_response_id"], json_bytes, nbytes)
        return self.put(owner, response["id"], stored) and self.has(owner, response["id"])

    def put(self, owner: str, name: str, value: Stored) -> bool:
        """As `OwnedStore`, with the places of its items."""
        kept = super().put(owner, name, value)
        if self.has(owner, name):
            self._places |= dict.fromkeys(((owner, one) for one in ids_of(value)), name)
        return kept

    def has(self, owner: str, name: str) -> bool:
        """Whether a response is kept; it is not used now."""
        return (owner, name) in self._kept

    def _place_of(self, owner: str, item: str) -> str | None:
        return self._places.get((owner, item))

    def _drop(self, place: tuple[str, str]) -> None:
        for one in ids_of(self._kept[place]):
            if self._places.get((place[0], one)) == place[1]:
                del self._places[place[0], one]
        super()._drop(place)

    def resolved(self, owner: str, given: Items, most_bytes: int, param: str = "input") -> tuple[Items, int]:
        """Items with those that they refer to in their places, and about how many bytes of JSON these are.

        Raises ApiError for one that is not kept or comes twice, and where the responses that have them are larger
        together.
        """
        found, nbytes = list[dict[str, Any]](), 0
        items: dict[str, dict[str, dict[str, Any]]] = {}  # of each response, by id
        seen: set[str] = set()
        for index, item in enumerate(given):
            if not refers(item):
                found.append(item)
                continue
            one, where = item.get("id"), f"{param}[{index}]"
            name = self._place_of(owner, one) if isinstance(one, str) else None
            if name is None or not isinstance(one, str):
                message = f"{where}: there is no item {str(one)[:100]!r}; send the item itself"
                raise ApiError(404, message, code="item_not_found", param=where)
            if one in seen:
                raise ApiError(400, f"{where}: the item {one[:100]!r} is there already; refer to it once", param=where)
            seen.add(one)
            if name not in items:
                stored = self.get(owner, name)
                nbytes += stored.json_bytes
                if nbytes > most_bytes:
                    message = f"{where}: the items are too large together; send them themselves"
                    raise ApiError(400, message, param=where)
                items[name] = {each["id"]: each for each in reversed(_items(stored)) if isinstance(each.get("id"), str)}
            found.append(items[name][one])
        return found, nbytes

    def history(self, owner: str, name: str | None, most: int, param: str | None = None) -> tuple[Items, int]:
        """All items, input and output, up to the end of a response, and their bytes as JSON; None has none.

        Raises ApiError where one of its responses is not kept, and for more than `most` items.
        """
        parts: list[Sequence[dict[str, Any]]] = []
        count = nbytes = 0
        while name is not None:
            found = self.get(owner, name, param)
            parts.append(_items(found))
            name, count, nbytes = found.previous, count + len(parts[-1]), nbytes + found.json_bytes
            if count > most:
                raise ApiError(400, f"the conversation has more than {most} items; begin another one", param=param)
        return [item for part in reversed(parts) for item in part], nbytes


def refers(item: dict[str, Any]) -> bool:
    """Whether this stands for an item of a stored response."""
    return item.get("type") == "item_reference" or set(item) == {"id"}


def _items(stored: Stored) -> Items:
    return [*stored.items, *stored.response["output"]]


def ids_of(stored: Stored) -> list[str]:
    """Of its items, input and output."""
    return [one for each in _items(stored) if isinstance(one := each.get("id"), str)]
