"""Apple's object files: the simulator's copy of a static library differs in its labels alone."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mlcpipe.compiler.link import find_archiver, find_linker, find_zig
from mlcpipe.compiler.macho import find_command, for_simulator, member_offsets
from mlcpipe.errors import CompileError

BUILD_VERSION = 0x32


def archive(folder: Path, triple: str) -> bytes:
    """Two object files of C as a static library for a system."""
    if find_zig() is None:
        pytest.skip("static libraries need ziglang")
    compiler, objects = find_linker(triple), []
    for name in ("one", "another_with_a_long_name"):
        source = folder / f"{name}.c"
        source.write_text(f"int {name}(int x) {{ return x + 1; }}\n")
        objects.append(source.with_suffix(".o"))
        compiler.compile(source, objects[-1])
    find_archiver().archive(objects, folder / "lib.a")
    return (folder / "lib.a").read_bytes()


def platforms(library: bytes) -> list[int]:
    commands = [find_command(library, BUILD_VERSION, begin) for begin in member_offsets(library)]
    return [struct.unpack_from("<I", library, command + 8)[0] for command in commands if command is not None]


def test_the_simulator_s_library_has_other_labels(tmp_path: Path) -> None:
    library = archive(tmp_path, "arm64-apple-ios17.0")
    simulated = for_simulator(library)
    assert platforms(library) == [2, 2] and platforms(simulated) == [7, 7]
    assert sum(old != new for old, new in zip(library, simulated)) == 2 and len(library) == len(simulated)


def test_other_libraries_are_refused(tmp_path: Path) -> None:
    linux = archive(tmp_path, "riscv64-linux-gnu")
    for content in (b"", b"!<arch>\n", linux, for_simulator(archive(tmp_path, "arm64-apple-ios17.0"))):
        with pytest.raises(CompileError, match="no static library for iOS"):
            for_simulator(content)
