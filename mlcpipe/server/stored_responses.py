"""Stored responses of `/v1/responses`: to get again, with their input, and to delete."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from mlcpipe.server.bodies import MAX_ITEMS, key_of
from mlcpipe.server.errors import ApiError
from mlcpipe.server.owned_store import Items
from mlcpipe.server.response_store import ResponseStore
from mlcpipe.server.responses import runs_of, store_of
from mlcpipe.server.sse import EventStream, event
from mlcpipe.server.stored_conversations import page_of

router = APIRouter()
_PATH = "/v1/responses/{name}"


@router.get(_PATH, response_model=None)
async def get(
    request: Request, name: str, stream: bool = False, starting_after: Annotated[int, Query(ge=-1)] = -1
) -> EventStream | dict[str, Any]:
    """A response as it is now; of one that streams in the background also the events after the one of a number.
    Raises ApiError for one that is not stored.
    """
    owner, store = key_of(request), store_of(request)
    run = runs_of(request).find(owner, name)
    if stream:
        if run is None or not run.streams:
            message = "stream: expected a response that was begun with stream in the background; leave it out"
            raise ApiError(400, message, param="stream")
        return EventStream(run.follow(starting_after), lambda: None, lambda error: event(error.body("")))
    if run is not None and (not run.ended or not await store.ask(lambda each: each.has(owner, name))):
        return run.response  # it was too large for the store
    return (await store.ask(lambda each: each.get(owner, name))).response


@router.post(f"{_PATH}/cancel")
async def cancel(request: Request, name: str) -> dict[str, Any]:
    """End a response in the background; one that has ended stays as it is. Raises ApiError."""
    owner = key_of(request)
    run = runs_of(request).find(owner, name)
    if run is not None:
        await run.cancel()
        return run.response
    response = (await store_of(request).ask(lambda store: store.get(owner, name))).response
    if not response["background"]:
        raise ApiError(400, "the response was not begun in the background; close its connection to cancel it")
    return response


@router.delete(_PATH)
async def delete(request: Request, name: str) -> dict[str, Any]:
    """Forget a response: those that follow it can be continued no more. Raises ApiError."""
    owner, run = key_of(request), runs_of(request).find(key_of(request), name)
    if run is not None:
        await run.cancel()
        runs_of(request).forget(owner, name)

    def forget(store: ResponseStore) -> None:
        if run is None or store.has(owner, name):
            store.delete(owner, name)

    await store_of(request).ask(forget)
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
    owner = key_of(request)

    def read(store: ResponseStore) -> Items:
        found = store.get(owner, name)
        return [*store.history(owner, found.previous, MAX_ITEMS)[0], *found.items]

    items = await store_of(request).ask(read)
    return page_of(items if order == "asc" else items[::-1], limit, after)
