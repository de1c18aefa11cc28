"""`/v1/conversations`, as in OpenAI's API reference: conversations that responses continue, and their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import Field

from mlcpipe.server.bodies import MAX_ITEMS, Body, body_schema, key_of, parsed
from mlcpipe.server.conversation_store import ConversationStore, items_bytes, kept_items
from mlcpipe.server.errors import ApiError
from mlcpipe.server.leases import pool_of

router = APIRouter()
_ALL, _ONE = "/v1/conversations", "/v1/conversations/{name}"
_ITEMS, _ITEM = "/v1/conversations/{name}/items", "/v1/conversations/{name}/items/{item}"
Limit = Annotated[int, Query(ge=1, le=100)]


class CreateBody(Body):
    """The body of a new conversation."""

    items: list[dict[str, Any]] | None = Field(None, max_length=MAX_ITEMS)
    metadata: dict[str, Any] | None = None


class UpdateBody(Body):
    """The body of a change."""

    metadata: dict[str, Any]


class ItemsBody(Body):
    """The body of more items."""

    items: list[dict[str, Any]] = Field(max_length=MAX_ITEMS)


@router.post(_ALL, openapi_extra=body_schema(CreateBody))
async def create(request: Request, body: Annotated[CreateBody, Depends(parsed(CreateBody))]) -> dict[str, Any]:
    """A new conversation."""
    metadata = body.metadata or {}
    items, nbytes = await _kept(request, body.items or [], body.nbytes)
    metadata_bytes = await pool_of(request).aside(lambda: items_bytes([metadata]), body.nbytes)
    return conversations_of(request).create(key_of(request), metadata, metadata_bytes, items, nbytes).described


@router.get(_ONE)
async def get(request: Request, name: str) -> dict[str, Any]:
    """A conversation without its items. Raises ApiError."""
    return conversations_of(request).get(key_of(request), name).described


@router.post(_ONE, openapi_extra=body_schema(UpdateBody))
async def update(
    request: Request, name: str, body: Annotated[UpdateBody, Depends(parsed(UpdateBody))]
) -> dict[str, Any]:
    """Other metadata. Raises ApiError."""
    nbytes = await pool_of(request).aside(lambda: items_bytes([body.metadata]), body.nbytes)
    return conversations_of(request).describe(key_of(request), name, body.metadata, nbytes).described


@router.delete(_ONE)
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Forget a conversation with its items. Raises ApiError."""
    conversations_of(request).delete(key_of(request), name)
    return {"id": name, "object": "conversation.deleted", "deleted": True}


@router.post(_ITEMS, openapi_extra=body_schema(ItemsBody))
async def add(request: Request, name: str, body: Annotated[ItemsBody, Depends(parsed(ItemsBody))]) -> dict[str, Any]:
    """Add items at the end. Raises ApiError."""
    conversations_of(request).get(key_of(request), name)
    items, nbytes = await _kept(request, body.items, body.nbytes)
    conversations_of(request).append(key_of(request), name, items, nbytes)
    return page_of(items, len(items) or 1)


@router.get(_ITEMS)
async def items(
    request: Request, name: str, limit: Limit = 20, order: Literal["asc", "desc"] = "desc", after: str | None = None
) -> dict[str, Any]:
    """Its items, page by page. Raises ApiError."""
    found = conversations_of(request).get(key_of(request), name).items
    return page_of(found if order == "asc" else found[::-1], limit, after)


@router.get(_ITEM)
async def item(request: Request, name: str, item: str) -> dict[str, Any]:
    """One item. Raises ApiError."""
    return conversations_of(request).item(key_of(request), name, item)


@router.delete(_ITEM)
async def delete_item(request: Request, name: str, item: str) -> dict[str, Any]:
    """Forget an item. Raises ApiError."""
    return conversations_of(request).without(key_of(request), name, item).described


def conversations_of(request: Request) -> ConversationStore:
    """The server's conversations."""
    store: ConversationStore = request.app.state.conversations
    return store


def page_of(items: Sequence[dict[str, Any]], limit: int, after: str | None = None) -> dict[str, Any]:
    """A page of a list of items, that after the item of this id. Raises ApiError."""
    if after is not None:
        places = [index for index, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise ApiError(400, f"after: there is no item {after[:100]!r}", param="after")
        items = items[places[-1] + 1 :]
    page = list(items[:limit])
    ends = {"first_id": page[0].get("id"), "last_id": page[-1].get("id")} if page else {}
    return {"object": "list", "data": page, "has_more": len(items) > limit, "first_id": None, "last_id": None, **ends}


async def _kept(request: Request, given: list[dict[str, Any]], nbytes: int) -> tuple[list[dict[str, Any]], int]:
    """Items as they are kept, and their bytes of memory. Raises ApiError."""

    def made() -> tuple[list[dict[str, Any]], int]:
        items = kept_items(given)
        return items, items_bytes(items)

    found: tuple[list[dict[str, Any]], int] = await pool_of(request).aside(made, nbytes)
    return found
