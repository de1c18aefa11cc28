"""The licences of all parts of native programs, from the installed packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from mlcpipe.errors import CompileError

_DLPACK = "Apache TVM FFI contains the header of DLPack (Apache License 2.0, whose text is above)."
_KOTLIN = """{name}
Copyright 2010-2024 JetBrains s.r.o. and respective authors and developers
(Apache License 2.0, whose text is above)."""
# Parts that ziglang links into static programs, and their licence files in its package.
_LINKED = {
    "libc++": "lib/libcxx/LICENSE.TXT",
    "libc++abi": "lib/libcxxabi/LICENSE.TXT",
    "libunwind": "lib/libunwind/LICENSE.TXT",
    "musl": "lib/libc/musl/COPYRIGHT",
    "Zig's compiler-rt": "LICENSE",
}
# The character classes in tokenizer.bin are Unicode's; a header of libc++ with such tables quotes their licence.
_UNICODE = "lib/libcxx/include/__format/extended_grapheme_cluster_table.h"


def third_party_licenses() -> str:
    """The texts for a static program, each under a title. Raises CompileError for a package without its text."""
    return _joined("This program contains", [*tvm_licenses(), *_linked(), _unicode()])


def source_licenses(more: Sequence[tuple[str, str]] = ()) -> str:
    """The texts for the runtime's sources and data and `more`, each under a title. Raises CompileError likewise."""
    texts = [*tvm_licenses(), _unicode(), *more]
    return _joined("This folder contains sources of mlcpipe (Apache License 2.0) and", texts)


def kotlin_licenses() -> list[tuple[str, str]]:
    """The licences of libraries linked into the Android library."""
    return [(name, _KOTLIN.format(name=name)) for name in ("Kotlin's standard library", "kotlinx.coroutines")]


def tvm_licenses() -> Iterator[tuple[str, str]]:
    """LICENSE and NOTICE of TVM's packages."""
    for package in ("apache-tvm", "apache-tvm-ffi"):
        distribution = metadata.distribution(package)
        for file in distribution.files or ():
            if file.stem in ("LICENSE", "NOTICE") and ".dist-info" in str(file):
                yield f"{package} {distribution.version}, {file.name}", file.read_text(encoding="utf-8")


def _linked() -> Iterator[tuple[str, str]]:
    for name, file in _LINKED.items():
        yield name, _of_zig(file)


def _unicode() -> tuple[str, str]:
    lines = [line.removeprefix("//").strip() for line in _of_zig(_UNICODE).splitlines() if line.startswith("//")]
    return "Unicode's data", "\n".join(
        lines[lines.index("UNICODE, INC. LICENSE AGREEMENT - DATA FILES AND SOFTWARE") :]
    )


def _of_zig(file: str) -> str:
    found = importlib.util.find_spec("ziglang")
    if found is None or found.origin is None:
        raise CompileError("no linker for programs", expected="ziglang", next_step="pip install 'mlcpipe[zig]'")
    path = Path(found.origin).parent / file
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CompileError("a licence is missing", where=path, found=error.strerror) from error


def _joined(begin: str, texts: Sequence[tuple[str, str]]) -> str:
    parts = [_part(title, text) for title, text in (*texts, ("DLPack", _DLPACK))]
    return "\n\n".join([f"{begin} the following software, whose licences follow.", *parts]) + "\n"


def _part(title: str, text: str) -> str:
    return f"{title}\n{'=' * len(title)}\n\n{text.strip()}"
