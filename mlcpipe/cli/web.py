"""`mlcpipe chat --web`: the chat in a browser, served from this computer."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe import devices
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.loading import bundle_of, prepare_bundle
from mlcpipe.support.defaults import AUTO, CHAT
from mlcpipe.support.progress import console_progress
from mlcpipe.support.resources import model_title

if TYPE_CHECKING:
    from rich.console import Console


def chat_in_browser(
    model: str | None,
    target: str | None,
    quantization: str | None,
    *,
    best: bool,
    port: int | None,
    show: bool,
    given: Mapping[str, object],
) -> None:
    """Compile for WebGPU if necessary, serve the page with the model, and open it; until Ctrl-C.

    Args:
        model: as `mlcpipe.load` takes it.
        target: a target for browsers; None is the usual one.
        quantization: None is `auto`.
        best: quantize as well as the bits allow.
        port: of 127.0.0.1; None is the usual one.
        show: whether to open a browser.
        given: options of the chat in the terminal, as the user wrote them, with their values.

    Raises:
        UsageError: an option that has no effect here, or a port that is taken.
    """
    for option, value in given.items():
        if value is not None and value is not False and value != "":
            raise UsageError(f"{option} has no effect with --web", next_step="set it on the page")
    _check_for_browsers(model, target)
    from mlcpipe.web import SiteServer, assemble_site, page_folder
    from mlcpipe.web.server import DEFAULT_PORT

    console = stderr_console()
    page = page_folder(lambda line: say(console, line, style="dim"))
    bundle = _bundle(model, target, quantization, best, console)
    title = model_title(model) if model is None else Path(model.rpartition("@")[0] or model).name
    # The files come from this disk, so the page need not ask before a download.
    site = assemble_site(page, [bundle], title=title[:1].upper() + title[1:], autostart=True)
    with SiteServer(site, DEFAULT_PORT if port is None else port) as server:
        say(console, f"{server.url}  (Ctrl-C stops the server)")
        if show and not webbrowser.open(server.url):
            say(console, "no browser could be opened: open the address in one with WebGPU")
        server.serve_forever()


def _check_for_browsers(model: str | None, target: str | None) -> None:
    """Refuse what cannot run in a browser before the page is built or a model compiled."""
    if target is not None:
        from mlcpipe.targets import load_target

        usual = devices.browser_target()
        if load_target(target).backend != load_target(usual).backend:
            raise UsageError("--target with --web", expected=f"{usual}, or one like it", found=target)
    if (bundle := bundle_of(model)) is not None:
        from mlcpipe.web import check_bundles

        check_bundles([bundle])


def _bundle(model: str | None, target: str | None, quantization: str | None, best: bool, console: Console) -> Path:
    given = bundle_of(model)
    if given is None:
        target, quantization = target or devices.browser_target(), quantization or AUTO
    elif target is None and quantization is None and not best:
        return given  # any TVM may be installed here: the library has its own
    with console_progress(console) as progress:
        # The library comes from this disk: its size matters less than a minute of linking.
        return prepare_bundle(
            model, quantization=quantization, best=best, target=target, quick=True, runs_here=False, task=CHAT,
            progress=progress,
        )  # fmt: skip
