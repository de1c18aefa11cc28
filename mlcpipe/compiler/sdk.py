"""The native runtime and models as a folder for C and C++ projects, which CMake builds without Python."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mlcpipe.bundle import Manifest
from mlcpipe.compiler.backends import native_sources
from mlcpipe.compiler.container import checked_manifest, write_container
from mlcpipe.compiler.licenses import source_licenses
from mlcpipe.compiler.link import POOL
from mlcpipe.compiler.native_runtime import RUNTIME_SOURCES, library_sources, macros
from mlcpipe.compiler.program import static_library
from mlcpipe.compiler.static_library import own_table
from mlcpipe.compiler.tvm_sources import INCLUDES, source_tree
from mlcpipe.errors import UsageError
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.generated import Value, filled, write_templates
from mlcpipe.support.progress import Progress
from mlcpipe.support.resources import native_path
from mlcpipe.version import __version__

_TEMPLATES = native_path() / "sdk"
_MARK = "mlcpipe-config.cmake.in"  # marks such a folder
_HEADER = "mlcpipe.h"
_MODELS_HEADER = """/* The code of each model in this folder, for mlcpipe_options.code. */
#ifndef MLCPIPE_MODELS_H_
#define MLCPIPE_MODELS_H_

#include "mlcpipe.h"

#ifdef __cplusplus
extern "C" {{
#endif

{declarations}
#ifdef __cplusplus
}}
#endif

#endif /* MLCPIPE_MODELS_H_ */
"""
_DECLARATION = "extern const mlcpipe_symbol @TABLE@[];\n#define @MACRO@ @TABLE@\n"


def write_sdk(bundles: Sequence[Path], output: Path, progress: Progress, *, overwrite: bool = False) -> None:
    """Write sources of the runtime with the code and data of each bundle to the folder `output`.

    A model is named after its bundle's folder. Raises UsageError for bundles without a static library, for different
    machines or with equal names, BundleError, SignatureError, CompileError and ResourceError.
    """
    models = named_models(bundles)
    manifests = {name: checked_manifest(bundle) for name, bundle in models.items()}
    triple = one_triple(manifests.values())
    codes = {name: static_library(bundle, manifests[name]) for name, bundle in models.items()}
    with atomic_directory(output, replaces=_MARK if overwrite else "") as folder:
        for name, bundle in models.items():
            (folder / "models" / name).mkdir(parents=True)
            shutil.copyfile(codes[name], folder / "models" / name / "libmodel.a")
            write_container(bundle, folder / "models" / name / "model.mlcp", progress)
        write_sources(folder / "src", folder / "include", "linux")
        _write_models(folder, codes, triple, manifests.values())


def named_models(bundles: Sequence[Path]) -> dict[str, Path]:
    """Bundles by names for CMake and C."""
    named = {re.sub(r"\W", "_", bundle.resolve().name, flags=re.ASCII): bundle for bundle in bundles}
    if len({name.upper() for name in named}) != len(bundles):
        raise UsageError("bundles of one name", expected="folders with different names", found=", ".join(named))
    return named


def one_triple(manifests: Iterable[Manifest]) -> str:
    """The machine of all bundles. Raises UsageError if they differ."""
    triples = {manifest.target.triple for manifest in manifests}
    if len(triples) != 1:
        raise UsageError("bundles for different machines", expected="one target", found=", ".join(sorted(triples)))
    return triples.pop()


def write_sources(folder: Path, include: Path, system: str) -> None:
    """Write the runtime's sources, those for a system's GPUs, and the TVM sources that they include.

    The interface goes to the folder `include`.
    """
    own = library_sources()
    for path in own:
        target = folder / "runtime" / path.relative_to(RUNTIME_SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(POOL, folder / POOL.name)
    include.mkdir(exist_ok=True)
    (folder / "runtime" / _HEADER).rename(include / _HEADER)
    plugins = native_sources(system)
    for plugin in plugins:
        shutil.copytree(plugin, folder / plugin.name, ignore=shutil.ignore_patterns("*.metal"))  # of kernels
    tree = source_tree()
    tree.copy(folder / "tvm", tree.included([*own, *(path for plugin in plugins for path in plugin.iterdir())]))


def write_runtime(folder: Path, manifests: Iterable[Manifest]) -> None:
    """Write the runtime without models, for a CMake project, to run bundles of these manifests."""
    folder.mkdir(parents=True)
    write_sources(folder / "src", folder / "include", "android")
    values = {"VERSION": __version__, "MODELS": [], "MODEL": "none", **_runtime_values(manifests)}
    for name in ("CMakeLists.txt", _MARK):
        write_templates(_TEMPLATES, folder, values, name)


def _runtime_values(manifests: Iterable[Manifest]) -> dict[str, Value]:
    variants = (variant for manifest in manifests for variant in manifest.target.variants)
    return {
        "KINDS": sorted({variant.tvm_facts["kind"] for variant in variants}),
        "INCLUDES": [Path("src/tvm", name).as_posix() for name in INCLUDES],
        "DEFINITIONS": macros(),
    }


def _write_models(folder: Path, codes: Mapping[str, Path], triple: str, manifests: Iterable[Manifest]) -> None:
    codes_of = {name: f"MLCPIPE_CODE_{name.upper()}" for name in codes}
    first = next(iter(codes))
    values = {
        "VERSION": __version__,
        "TRIPLE": triple,
        "MODELS": list(codes),
        "MODEL": first,
        "CODE": codes_of[first],
        **_runtime_values(manifests),
    }
    write_templates(_TEMPLATES, folder, values)
    tables = [{"TABLE": own_table(code), "MACRO": codes_of[name]} for name, code in codes.items()]
    header = folder / "include" / "mlcpipe_models.h"
    declared = "\n".join(filled(_DECLARATION, table, header.suffix) for table in tables)
    header.write_text(_MODELS_HEADER.format(declarations=declared), encoding="utf-8")
    (folder / "THIRD_PARTY.txt").write_text(source_licenses(), encoding="utf-8")
