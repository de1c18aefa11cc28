"""`mlcpipe chat --web`: the chat in a browser, served from this computer."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.bundles import AUTO, Wanted, is_bundle, prepare_bundle
from mlcpipe.cli.console import say, stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.progress import console_progress

if TYPE_CHECKING:
    from rich.console import Console

WEB_TARGET = "webgpu"


def chat_in_browser(wanted: Wanted, *, port: int | None, show: bool, given: Mapping[str, object]) -> None:
    """Compile for WebGPU if need be, serve the page with the model, and open it; until Ctrl-C.

    Args:
        wanted: the model; its target is webgpu unless the user names another for browsers.
        port: of 127.0.0.1; None is the usual one.
        show: whether to open a browser.
        given: options of the chat in the terminal, as the user wrote them, with their values.

    Raises:
        UsageError: an option that has no effect here, or the port is taken.
    """
    for option, value in given.items():
        if value is not None and value is not False and value != "":
            raise UsageError(f"{option} has no effect with --web", next_step="set it on the page")
    _check_for_browsers(wanted)
    from mlcpipe.web import SiteServer, assemble_site, page_folder
    from mlcpipe.web.server import DEFAULT_PORT

    console = stderr_console()
    page = page_folder(lambda line: say(console, line, style="dim"))
    bundle = _bundle(wanted, console)
    title = wanted.title if wanted.model is None else Path(wanted.model.rpartition("@")[0] or wanted.model).name
    # The files come from this disk: there is nothing to ask about.
    site = assemble_site(page, [bundle], title=title[:1].upper() + title[1:], autostart=True)
    with SiteServer(site, DEFAULT_PORT if port is None else port) as server:
        say(console, f"{server.url}  (Ctrl-C ends it)")
        if show and not webbrowser.open(server.url):
            say(console, "no browser could be opened: open the address in one with WebGPU")
        server.serve_forever()


def _check_for_browsers(wanted: Wanted) -> None:
    """Refuse what cannot run in a browser before the page is built or a model compiled."""
    if wanted.target is not None:
        from mlcpipe.targets import load_target

        if load_target(wanted.target).link != "wasm":
            raise UsageError("--target with --web", expected=f"{WEB_TARGET}, or one like it", found=wanted.target)
    if wanted.model is not None and is_bundle(Path(wanted.model).expanduser()):
        from mlcpipe.web import check_bundles

        check_bundles([Path(wanted.model).expanduser()])


def _bundle(wanted: Wanted, console: Console) -> Path:
    given = Path(wanted.model).expanduser() if wanted.model is not None else None
    if given is None or not is_bundle(given):
        wanted = replace(wanted, target=wanted.target or WEB_TARGET, quantization=wanted.quantization or AUTO)
    elif wanted.target is None and wanted.quantization is None:
        return given  # whatever TVM is installed here: the library has its own
    # The library comes from this disk: its size matters less than a minute of linking.
    return prepare_bundle(wanted, console_progress(console), quick=True)
