"""The native runtime and a model as a Swift package for iOS, with an app."""

from __future__ import annotations

import re
from pathlib import Path

from mlcpipe.compiler.licenses import source_licenses
from mlcpipe.compiler.native_runtime import definitions
from mlcpipe.compiler.sdk import write_sources
from mlcpipe.compiler.tvm_sources import INCLUDES
from mlcpipe.resources import native_path
from mlcpipe.version import __version__

_TEMPLATES = native_path() / "ios"


def write_sources_of_package(folder: Path, table: str) -> None:
    """Write all of the package but its model. `table` is the name of that model's table of symbols."""
    sources = folder / "Sources" / "CMlcpipe"
    write_sources(sources, sources / "include")
    (sources / "runtime" / "exports.map").unlink()  # of a shared library
    values = {
        "VERSION": __version__,
        "TABLE": table,
        "INCLUDES": ", ".join(f'"{name}"' for name in ("runtime", *(f"tvm/{name}" for name in INCLUDES))),
        "DEFINITIONS": "\n".join(_macro(option) for option in definitions()),
    }
    for path in sorted(_TEMPLATES.rglob("*")):
        copy = folder / path.relative_to(_TEMPLATES)
        if path.is_dir():
            copy.mkdir(exist_ok=True)
            continue
        text = path.read_text(encoding="utf-8")
        copy.write_text(re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], text), encoding="utf-8")
    (folder / "THIRD_PARTY.txt").write_text(source_licenses(), encoding="utf-8")


def _macro(option: str) -> str:
    """A compiler's option -DNAME=VALUE as a line of C."""
    name, _, value = option.removeprefix("-D").partition("=")
    return f"#define {name} {value}".rstrip()
