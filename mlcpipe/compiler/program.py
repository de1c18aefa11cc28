"""A bundle as a program of one file, for a board without Python."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlcpipe.bundle import Manifest
from mlcpipe.compiler.container import checked_manifest, write_container
from mlcpipe.compiler.licenses import third_party_licenses
from mlcpipe.compiler.link import find_cxx
from mlcpipe.compiler.native_runtime import write_program
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu_features import architecture_of
from mlcpipe.support.atomic import atomic_file
from mlcpipe.support.env import env
from mlcpipe.support.progress import Progress

_BOARDS = ("arm64-linux", "riscv64-linux", "x86_64-linux")


def data_beside(program: Path) -> Path:
    """The path at which a program without its own model looks for the data."""
    return program.with_name(f"{program.name}.mlcp")


def write_chat_program(bundle: Path, output: Path, progress: Progress, *, weights: bool = True) -> list[Path]:
    """Write a static program that chats with a bundle's model -> the files.

    Without `weights` the model's data is a separate file, expected next to the program. Raises
    UsageError for a bundle without a static library, CompileError, BundleError, SignatureError and ResourceError.
    """
    manifest = checked_manifest(bundle)
    arch, code = architecture_of(manifest.target.triple), static_library(bundle, manifest)
    with tempfile.TemporaryDirectory() as folder:
        program, licenses = Path(folder, "program"), Path(folder, "licenses.txt")
        licenses.write_text(third_party_licenses(), encoding="utf-8")
        write_program(find_cxx(f"{arch}-linux-musl"), env().cache_dir, code, program, licenses, progress=progress)
        if weights:
            return [write_container(bundle, output, progress, program=program)]
        content = program.read_bytes()
    with atomic_file(output, len(content)) as file:
        file.write(content)
        Path(file.name).chmod(0o755)
    return [output, write_container(bundle, data_beside(output), progress)]


def static_library(bundle: Path, manifest: Manifest, system: str = "Linux", targets: Sequence[str] = _BOARDS) -> Path:
    """The path of a bundle's static library for a system. Raises UsageError naming `targets` if it has none."""
    found = [bundle / name for name in manifest.files if name.endswith(".a")]
    if len(found) != 1 or system.lower() not in manifest.target.triple:
        raise UsageError(
            f"the bundle has no static library for {system}",
            where=bundle,
            expected=f"one that was compiled for {' or '.join(targets)}",
            found=f"target {manifest.target.name}",
            next_step=f"compile the model again with --target {targets[0]}",
        )
    return found[0]
