"""Conversations that clients keep on the server: in memory, as many as fit, those used last."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlcpipe.server.bodies import MAX_ITEMS
from mlcpipe.server.errors import ApiError
from mlcpipe.server.json_values import values_of
from mlcpipe.server.owned_store import Items, OwnedStore, memory_of
from mlcpipe.server.response_items import items_of

MAX_CONVERSATIONS = 1024
MAX_BYTES = 64 << 20  # of memory, of all
_FIELDS = ("id", "created_at", "metadata")


@dataclass(frozen=True)
class StoredConversation:
    """A conversation with its items; `nbytes` of memory, of which its metadata has `metadata_bytes`."""

    id: str
    created_at: int
    metadata: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    nbytes: int
    metadata_bytes: int

    @property
    def described(self) -> dict[str, Any]:
        """As the API has it."""
        return {"object": "conversation", **{name: getattr(self, name) for name in _FIELDS}}


class ConversationStore(OwnedStore[StoredConversation]):
    """Conversations by owner and id, see `OwnedStore`."""

    kind, lost = "conversation", "it was deleted, or left for newer ones"

    def __init__(self, most: int = MAX_CONVERSATIONS, most_bytes: int = MAX_BYTES) -> None:
        super().__init__(most, most_bytes)

    def create(
        self, owner: str, metadata: dict[str, Any], metadata_bytes: int, items: Items, nbytes: int
    ) -> StoredConversation:
        """A new one, of metadata with `metadata_bytes` of memory and items with `nbytes`. Raises ApiError for one that
        is too large.
        """
        name, nbytes = f"conv_{secrets.token_hex(16)}", nbytes + metadata_bytes
        made = StoredConversation(name, int(time.time()), metadata, tuple(items), nbytes, metadata_bytes)
        self._put(owner, made)
        return made

    def describe(self, owner: str, name: str, metadata: dict[str, Any], metadata_bytes: int) -> StoredConversation:
        """With other metadata. Raises ApiError."""
        old = self.get(owner, name)
        nbytes = old.nbytes - old.metadata_bytes + metadata_bytes
        made = replace(old, metadata=metadata, metadata_bytes=metadata_bytes, nbytes=nbytes)
        self._put(owner, made)
        return made

    def check_room(self, owner: str, name: str, count: int, nbytes: int, param: str | None = None) -> None:
        """Raises ApiError where so many more items, of `nbytes` of memory, have no place in a conversation."""
        found = self.get(owner, name, param)
        if len(found.items) + count > MAX_ITEMS:
            message = f"the conversation would have more than {MAX_ITEMS} items; begin another one"
            raise ApiError(400, message, param=param)
        if found.nbytes + nbytes > self.most_bytes:
            raise _too_large(found.nbytes + nbytes, self.most_bytes)

    def append(self, owner: str, name: str, items: Items, nbytes: int) -> None:
        """Add items with `nbytes` of memory at the end. Raises ApiError as `check_room`."""
        self.check_room(owner, name, len(items), nbytes)
        old = self.get(owner, name)
        self._put(owner, replace(old, items=(*old.items, *items), nbytes=old.nbytes + nbytes))

    def without(self, owner: str, name: str, item: str) -> StoredConversation:
        """Without an item. Raises ApiError for one that is not there."""
        old = self.get(owner, name)
        gone = self.item(owner, name, item)
        kept = list(old.items)
        kept.remove(gone)  # the first that is equal, as `item` finds it
        made = replace(old, items=tuple(kept), nbytes=old.nbytes - items_bytes([gone]))
        self._put(owner, made)
        return made

    def item(self, owner: str, name: str, item: str) -> dict[str, Any]:
        """An item by its id. Raises ApiError for one that is not there."""
        found = next((one for one in self.get(owner, name).items if one.get("id") == item), None)
        if found is None:
            raise ApiError(404, f"the conversation has no item {item[:100]!r}", code="item_not_found")
        return found

    def _put(self, owner: str, one: StoredConversation) -> None:
        if not self.put(owner, one.id, one):
            raise _too_large(one.nbytes, self.most_bytes)


def items_bytes(items: Sequence[dict[str, Any]]) -> int:
    """Bytes of memory of items or metadata, about, each on its own, so that one can be taken away again.

    Raises ApiError for infinite numbers.
    """
    return sum(memory_of(len(json.dumps(one)), 1, values_of(one)) for one in items)


def kept_items(given: Items) -> Items:
    """Items as they are kept: each with an id and a status, messages with their content in parts. Raises ApiError."""
    if len(given) > MAX_ITEMS:
        raise ApiError(400, f"items: expected at most {MAX_ITEMS}", param="items")
    made = []
    for index, item in enumerate(items_of(given)):
        if item["type"] in (None, "item_reference"):
            message = f"items[{index}]: expected the item itself, with its type"
            raise ApiError(400, message, param=f"items[{index}]")
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": kind, "text": item["content"]}]}
            if kind == "output_text":
                item["content"][0]["annotations"] = []
        made.append({"status": "completed", **item})
    return made


def _too_large(nbytes: int, most: int) -> ApiError:
    message = f"the conversation would take {nbytes} bytes of memory; expected at most {most}; begin another one"
    return ApiError(400, message, code="conversation_too_large")
