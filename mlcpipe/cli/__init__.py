"""The command line: a file or a folder for each verb. Heavy packages are imported by the verb that needs them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlcpipe.cli.bench.command import bench_command
from mlcpipe.cli.cached import list_command, pull_command, rm_command
from mlcpipe.cli.chat.command import chat_command
from mlcpipe.cli.compile import compile_command
from mlcpipe.cli.convert import convert_command
from mlcpipe.cli.doctor import doctor_command
from mlcpipe.cli.embed import embed_command
from mlcpipe.cli.inspect import inspect_command
from mlcpipe.cli.package import package_command
from mlcpipe.cli.prune import prune_command
from mlcpipe.cli.quality import quality_command
from mlcpipe.cli.serve import serve_command
from mlcpipe.cli.sign import sign_command, trust_command
from mlcpipe.cli.transcribe import transcribe_command
from mlcpipe.cli.tune.command import tune_command
from mlcpipe.errors import CheckpointWarning, ForeignBundleWarning, MlcpipeError, UsageError, no_memory
from mlcpipe.support.env import env, misspelt, name_a_home


class _Command(TyperCommand):
    """A verb whose help names no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class _App(typer.Typer):
    def command(self, *names: Any, **options: Any) -> Any:
        return super().command(*names, **{"cls": _Command, **options})


app = _App(
    name="mlcpipe",
    help="Compile a language model for one device, and run it there.\n\n"
    "`mlcpipe chat` talks to the small model that comes along, `mlcpipe chat hf://org/name` to another.",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("chat")(chat_command)
app.command("serve")(serve_command)
app.command("embed")(embed_command)
app.command("transcribe")(transcribe_command)
app.command("list")(list_command)
app.command("pull")(pull_command)
app.command("rm")(rm_command)
app.command("compile")(compile_command)
app.command("convert")(convert_command)
app.command("prune")(prune_command)
app.command("package")(package_command)
app.command("inspect")(inspect_command)
app.command("sign")(sign_command)
app.command("trust")(trust_command)
app.command("quality")(quality_command)
app.command("bench")(bench_command)
app.command("tune")(tune_command)
app.command("doctor")(doctor_command)

# The base of the errors that typer raises about arguments: the outermost class that can describe itself.
_ArgumentError: type[typer.BadParameter] = next(
    base for base in reversed(typer.BadParameter.__mro__) if hasattr(base, "format_message")
)
# Verbs of Ollama, llama.cpp, git and shells.
_ELSEWHERE = {"run": "chat", "cli": "chat", "generate": "chat", "ps": "list", "ls": "list", "download": "pull",
              "get": "pull", "delete": "rm", "remove": "rm", "show": "inspect", "info": "inspect", "start": "serve",
              "server": "serve", "quantize": "compile", "build": "compile", "create": "compile"}  # fmt: skip
_BUG = 70  # EX_SOFTWARE of sysexits.h
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_SHOWN = 120  # characters of a path in a message
_BROKEN_PIPE = 1  # as typer, which catches some itself, and Python's documentation of SIGPIPE


def _print_versions(wanted: bool) -> None:
    if wanted:
        from mlcpipe.host.versions import versions
        from mlcpipe.version import commit

        shown = versions()
        if built_from := commit():
            shown["mlcpipe"] = f"{shown['mlcpipe']} ({built_from})"
        sys.stdout.write("".join(f"{name} {value or 'absent'}\n" for name, value in shown.items()))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions and exit.", is_eager=True, callback=_print_versions),
    ] = False,
) -> None:
    """Options before the verb."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0; 2 for a mistake of the user or a refusal of the system, with one line on stderr; 3 for a bundle beyond --require;
    130 after Ctrl-C; 70 for a bug of mlcpipe. With MLCPIPE_DEBUG=1 the traceback comes before the line.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal in another encoding shows "?" for missing characters
    if arguments is None:  # the program only: a caller of `run` may need torch
        sys.meta_path.insert(0, _NoTorch)
        name_a_home()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except _ArgumentError as error:
        _report(f"{_explained(error.format_message())}; `{_command_path(error)} --help` explains")
        return 2
    except MlcpipeError as error:
        _report(str(error))
        return error.exit_code
    except OSError as error:
        _report(str(_refusal(error)))
        return 2
    except Exception as error:
        if (ours := no_memory(error)) is not None:
            _report(str(ours))
            return ours.exit_code
        if "KeyboardInterrupt" in str(error):  # during pydantic's import Ctrl-C ends up in another error's message
            return _INTERRUPTED
        _report(f"unexpected {type(error).__name__}: {error}; this is a bug, MLCPIPE_DEBUG=1 shows where")
        return _BUG
    finally:
        _flush()


class _NoTorch:
    """Make TVM FFI's `import torch` fail: it takes 1.2 of 1.7 s at the start and 190 MB, and no command needs it.

    None in `sys.modules` would do that too, but SciPy takes any entry there for torch.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "torch":
            raise ModuleNotFoundError("mlcpipe leaves torch out", name=name)


def _run(arguments: list[str] | None) -> int:
    if sys.stdout is None:
        raise UsageError("there is nowhere to write to", expected="an open stdout", found="a closed one")
    for name, meant in misspelt():
        _say_note(f"the environment variable {name} has no effect; {meant} is one")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_note, warnings.showwarning)
            # without a verb: the help, and no error
            code = app(arguments or sys.argv[1:] or ["--help"], prog_name="mlcpipe", standalone_mode=False)
        sys.stdout.flush()
    except typer.Abort:
        return _INTERRUPTED
    return code if isinstance(code, int) else 0


def _note(show: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Our warnings in one line: a foreign bundle's code, ignored settings; others as Python shows them."""
    if not issubclass(category, (CheckpointWarning, ForeignBundleWarning)):
        return show(message, category, *where, **more)
    _say_note(message)


def _say_note(message: object) -> None:
    from mlcpipe.cli.terminal import say, stderr_console

    say(stderr_console(), f"note: {message}")


def _report(line: str) -> None:
    """One line on stderr, about the exception that is being handled."""
    from mlcpipe.cli.terminal import sanitize

    text = " ".join(sanitize(line).split())
    if sys.stderr is None:
        return
    with contextlib.suppress(OSError):
        if _debug():
            traceback.print_exc()
        sys.stderr.write(f"error: {text}\n")


def _refusal(error: OSError) -> MlcpipeError:
    """The user's error for a refusal of the system: an unreadable folder, a full disk, a long name."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    if name and _of_cache(name):
        return UsageError(
            "the cache cannot be used", where=repr(shown), expected="a folder that you may write to",
            found=error.strerror, next_step="set MLCPIPE_CACHE to another folder",
        )  # fmt: skip
    steps = {errno.ENAMETOOLONG: "a question goes to --prompt", errno.EACCES: "check the permissions",
             errno.ENOSPC: "free space, or write to another disk"}  # fmt: skip
    return UsageError(
        f"cannot read or write {repr(shown) if name else 'a file or stream'}",
        found=error.strerror or str(error) or type(error).__name__,
        next_step=steps.get(error.errno or 0),
    )


def _of_cache(name: str) -> bool:
    """Whether a path is the cache, in it, or a folder above it that cannot be made."""
    with contextlib.suppress(MlcpipeError):
        path, cache = Path(name), env().cache
        return cache is not None and (path.is_relative_to(cache) or (cache.is_relative_to(path) and not path.is_dir()))
    return False


def _explained(message: str) -> str:
    """What is wrong with arguments; for verbs of other programs the one here."""
    match = re.match(r"(No such command '(\w+)')", message)
    if match and (verb := _ELSEWHERE.get(match[2])):
        return f"{match[1]}. Did you mean '{verb}'?"
    return message.rstrip(".")


def _command_path(error: object) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else "mlcpipe"


def _debug() -> bool:
    try:
        return env().debug >= 1
    except MlcpipeError:
        return False


def _flush() -> None:
    """Write pending output, or drop it if that fails: the interpreter would complain at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
