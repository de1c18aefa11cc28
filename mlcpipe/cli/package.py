"""`mlcpipe package`: a bundle as a web site, program, app or library."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.options import OverwriteOption, bundle_folder
from mlcpipe.cli.terminal import say, stderr_console, stdout_console
from mlcpipe.errors import UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.support.progress import console_progress


class App(str, Enum):
    """The form of a package."""

    web = "web"
    cli = "cli"
    weights = "weights"
    native = "native"
    ios = "ios"
    android = "android"


def package_command(
    bundles: Annotated[
        list[Path],
        typer.Argument(
            help="A bundle; or several: of one model for GPUs with different features, or models of one program.",
            parser=bundle_folder,
            metavar="bundles",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The new folder, or the file.")],
    app: Annotated[
        App,
        typer.Option(
            metavar="<form>",
            help="What to make: web, a static web site; cli, a program for a board; weights, data; native, ios or "
            "android, a folder for CMake, Xcode or Gradle.",
        ),
    ] = App.web,
    title: Annotated[
        str | None, typer.Option(help="The model's name on the page (default: the bundle's folder).")
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Whether the program carries the model in its own file.")
    ] = True,
    overwrite: OverwriteOption = False,
) -> None:
    """Make a web site, a program for a board, an app for phones or a library of a bundle.

    With `--app web` make a static web site: a chat page with the model, which runs in the visitor's browser. Any host
    of static files will do, over https.

    With `--app cli` make a program of one file that chats on a Linux machine without Python. The bundle is one for
    arm64-linux, riscv64-linux or x86_64-linux. With `--app weights` make one file of weights, tokenizer and template,
    without code. With `--app native` make a folder for projects in C and C++: the runtime's sources with a
    CMakeLists.txt, and the code and data of each bundle. With `--app ios` make a Swift package and a chat app of a
    bundle for iOS. With `--app android` make a project for Android Studio, of bundles for android: a library for
    Kotlin, apps that chat, and the data of each model, which may also have a bundle for android-x86_64.

    Examples:

    `mlcpipe compile ./Qwen3-0.6B --target webgpu -o qwen3-web`

    `mlcpipe package qwen3-web --app web -o site`

    `mlcpipe compile ./Qwen3-0.6B --target arm64-linux -o qwen3-pi`

    `mlcpipe package qwen3-pi --app cli -o chat`

    `mlcpipe compile ./Qwen3-0.6B --target ios -o qwen3-ios`

    `mlcpipe package qwen3-ios --app ios -o QwenChat`
    """
    if app is not App.cli and not weights:
        raise UsageError("--no-weights has no effect", next_step="use it with --app cli")
    if app in (App.native, App.android):
        _write_project(app, bundles, output, overwrite=overwrite, title=title)
        return
    if app is App.ios:
        _write_swift_package(bundles, output, overwrite=overwrite, title=title)
        return
    if app is not App.web:
        _write_files(app, bundles, output, weights=weights, overwrite=overwrite, title=title)
        return
    from mlcpipe.web import assemble_site, check_bundles, page_folder, write_site

    console = stderr_console()
    check_bundles(bundles)
    page = page_folder(lambda line: say(console, line, style="dim"))
    site = assemble_site(page, bundles, title=title or bundles[0].resolve().name)
    write_site(site, output, overwrite=overwrite)
    size = byte_size(site.bytes)
    say(stdout_console(), f"{output}: {len(site.files)} files, {size}\nPut the folder on any static host with https.")
    say(stdout_console(), f"To try it on this computer: mlcpipe chat --web {bundles[0]}")


def _write_project(app: App, bundles: list[Path], output: Path, *, overwrite: bool, title: str | None) -> None:
    from mlcpipe.compiler.android_project import write_android_project
    from mlcpipe.compiler.sdk import write_sdk

    if title is not None:
        raise UsageError("--title has no effect", next_step="use it with --app web")
    with console_progress(stderr_console()) as progress:
        write = write_sdk if app is App.native else write_android_project
        write(bundles, output, progress, overwrite=overwrite)
    say(stdout_console(), f"{output}: README.md says how to build it")


def _write_swift_package(bundles: list[Path], output: Path, *, overwrite: bool, title: str | None) -> None:
    from mlcpipe.compiler.swift_package import write_swift_package

    if len(bundles) != 1 or title is not None:
        raise UsageError("--app ios", expected="one bundle and no --title", found=f"{len(bundles)} bundles")
    with console_progress(stderr_console()) as progress:
        write_swift_package(bundles[0], output, progress, overwrite=overwrite)
    say(stdout_console(), f"{output}: README.md says how to build it")


def _write_files(
    app: App, bundles: list[Path], output: Path, *, weights: bool, overwrite: bool, title: str | None
) -> None:
    from mlcpipe.compiler.container import write_container
    from mlcpipe.compiler.program import data_beside, write_chat_program

    if len(bundles) != 1 or title is not None:
        raise UsageError(f"--app {app.value}", expected="one bundle and no --title", found=f"{len(bundles)} bundles")
    for path in (output, *([] if weights else [data_beside(output)])):
        if path.exists() and not overwrite:
            raise UsageError("the file exists", where=path, next_step="choose another, or use --overwrite")
    with console_progress(stderr_console()) as progress:
        if app is App.cli:
            written = write_chat_program(bundles[0], output, progress, weights=weights)
        else:
            written = [write_container(bundles[0], output, progress)]
    for path in written:
        say(stdout_console(), f"{path}: {byte_size(path.stat().st_size)}")
