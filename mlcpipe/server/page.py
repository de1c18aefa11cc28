"""The page at `/`: the chat page of `apps/chat-web`, talking to this server; plain figures if it is not built."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from mlcpipe.support.resources import chat_page_path

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
_INLINE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def built_page() -> Path | None:
    """The folder of the built page, None if it is not built."""
    folder = chat_page_path()
    built = folder / "dist" if (folder / "package.json").is_file() else folder
    return built if (built / "index.html").is_file() else None


def page_router(folder: Path | None) -> APIRouter:
    """A route for `/` and one for each file of the built page; without its service worker, it needs the network."""
    router = APIRouter()
    for path in sorted(folder.rglob("*.*")) if folder is not None else ():
        name = path.relative_to(folder or "").as_posix()
        if path.suffix in _TYPES and name not in ("sw.js", "index.html"):
            router.add_api_route(f"/{name}", _sender(path, keep=name.startswith("assets/")), include_in_schema=False)
    router.add_api_route("/", _plain if folder is None else _index(folder / "index.html"), include_in_schema=False)
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


def _plain() -> HTMLResponse:
    text = resources.files("mlcpipe.server").joinpath("page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={**_HEADERS, "content-security-policy": f"{_INLINE}; {_POLICY}"})
