"""Stored responses of `/v1/responses`: to get again, with their input, and to delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from mlcpipe.server.bodies import MAX_ITEMS, key_of
from mlcpipe.server.errors import ApiError
from mlcpipe.server.responses import store_of

router = APIRouter()
_PATH = "/v1/responses/{name}"


@router.get(_PATH)
async def get(request: Request, name: str, stream: bool = False) -> dict[str, Any]:
    """A response. Raises ApiError for one that is not stored."""
    if stream:
        raise ApiError(400, "stream: a stored response comes whole; leave it out", param="stream")
    return store_of(request).get(key_of(request), name).response


@router.delete(_PATH)
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Forget a response: those that follow it can be continued no more. Raises ApiError."""
    store_of(request).delete(key_of(request), name)
    return {"id": name, "object": "response", "deleted": True}


@router.get(f"{_PATH}/input_items")
async def input_items(
    request: Request,
    name: str,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> dict[str, Any]:
    """The items before a response, its history among them, page by page. Raises ApiError."""
    owner, store = key_of(request), store_of(request)
    found = store.get(owner, name)
    before, _ = store.history(owner, found.previous, MAX_ITEMS)
    items = [*before, *found.items]
    items = items if order == "asc" else items[::-1]
    if after is not None:
        places = [index for index, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise ApiError(400, f"after: there is no item {after[:100]!r}", param="after")
        items = items[places[-1] + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0].get("id"), "last_id": page[-1].get("id")} if page else {}
    return {"object": "list", "data": page, "has_more": len(items) > limit, "first_id": None, "last_id": None, **ends}
