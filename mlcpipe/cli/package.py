"""`mlcpipe package`: a bundle as something that people can open."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.options import OverwriteOption, bundle_folder
from mlcpipe.cli.terminal import say, stderr_console, stdout_console
from mlcpipe.host.finding import byte_size


class App(str, Enum):
    """What a bundle is packaged as."""

    web = "web"


def package_command(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            help="A bundle; or several of one model, for GPUs with different features.",
            parser=bundle_folder,
            metavar="bundles",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="A new folder for the site.")],
    app: Annotated[App, typer.Option(help="What to make: a static web site.")] = App.web,
    title: Annotated[
        str | None, typer.Option(help="The model's name on the page (default: the bundle's folder).")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Make a static web site: a chat page with the model, which runs in the visitor's browser.

    Any host of static files will do, over https. To try the page on this computer: `mlcpipe chat --web`.

    Examples:

    `mlcpipe compile ./Qwen3-0.6B --target webgpu -o qwen3-web`

    `mlcpipe package qwen3-web --app web -o site`
    """
    from mlcpipe.web import assemble_site, check_bundles, page_folder, write_site

    console = stderr_console()
    check_bundles(bundles)
    page = page_folder(lambda line: say(console, line, style="dim"))
    site = assemble_site(page, bundles, title=title or bundles[0].resolve().name)
    write_site(site, output, overwrite=overwrite)
    size = byte_size(site.bytes)
    say(stdout_console(), f"{output}: {len(site.files)} files, {size}\nPut the folder on any static host with https.")
