"""The page at `/`: the chat page of `apps/chat-web`, talking to this server.

`page_files` has what `make page` builds but the worker, which is 6 MB of WebLLM and runs no model of a server, and the
service worker: 290 KB. A test compares it with the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

PAGE = Path(__file__).with_name("page_files")
_TYPES = {  # the system's table differs
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".md": "text/plain",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
# The built page has its own policy; these parts need a header.
_POLICY = "frame-ancestors 'none'"


def page_router(folder: Path) -> APIRouter:
    """A route for `/` and one for each file of the page."""
    router = APIRouter()
    for path in sorted(folder.rglob("*.*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix in _TYPES and name != "index.html":
            router.add_api_route(f"/{name}", _sender(path, keep=name.startswith("assets/")), include_in_schema=False)
    router.add_api_route("/", _index(folder / "index.html"), include_in_schema=False)
    return router


def _sender(path: Path, *, keep: bool) -> Callable[[], Response]:
    """Names in assets/ carry a hash of the content."""
    headers = {**_HEADERS, "cache-control": "public, max-age=31536000, immutable" if keep else "no-cache"}

    def send() -> Response:
        return Response(path.read_bytes(), headers=headers, media_type=_TYPES[path.suffix])

    return send


def _index(path: Path) -> Callable[[], Response]:
    """The attribute tells the page that a server answers, not a model in the browser."""

    def send() -> Response:
        text = path.read_text(encoding="utf-8").replace("<html", "<html data-server", 1)
        return HTMLResponse(text, headers={**_HEADERS, "content-security-policy": _POLICY, "cache-control": "no-cache"})

    return send
