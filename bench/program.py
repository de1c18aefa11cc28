"""Shared by the programs of this folder: their command line and exit."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from mlcpipe.errors import MlcpipeError


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the first line of a module's docstring."""
    return argparse.ArgumentParser(description=doc.partition("\n")[0] if doc else "")


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """End the process with what `main` returns; of an error print its line, and take its exit code."""
    try:
        sys.exit(main())
    except MlcpipeError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
