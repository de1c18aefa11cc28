"""The native runtime and a model as a Swift package for iOS, with a chat app that uses it."""

from __future__ import annotations

import plistlib
from pathlib import Path

from mlcpipe.compiler.container import checked_manifest, write_container, write_parts
from mlcpipe.compiler.licenses import source_licenses
from mlcpipe.compiler.macho import for_simulator
from mlcpipe.compiler.native_runtime import macros
from mlcpipe.compiler.program import static_library
from mlcpipe.compiler.sdk import write_sources
from mlcpipe.compiler.static_library import own_table
from mlcpipe.compiler.tvm_sources import INCLUDES
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.generated import Value, write_templates
from mlcpipe.support.progress import Progress
from mlcpipe.support.resources import native_path
from mlcpipe.version import __version__

_TEMPLATES = native_path() / "ios"
_MARK = "Model.xcframework"  # marks such a folder
_LIBRARY = "libmodel.a"
_SIMULATOR = {"SupportedPlatformVariant": "simulator"}


def write_swift_package(bundle: Path, output: Path, progress: Progress, *, overwrite: bool = False) -> None:
    """Write the Swift package, its model and the chat app to the folder `output`.

    Raises UsageError for a bundle of another target, BundleError, SignatureError, CompileError and ResourceError.
    """
    manifest = checked_manifest(bundle)
    code = static_library(bundle, manifest, "iOS", ["ios"])
    on_gpu = manifest.target.variants[0].tvm_facts["kind"] != "llvm"
    with atomic_directory(output, replaces=_MARK if overwrite else "") as folder:
        write_package_sources(folder, own_table(code), on_gpu=on_gpu)
        _write_xcframework(code.read_bytes(), folder / _MARK)
        write_parts(write_container(bundle, folder / "App" / "Chat" / "model.mlcp", progress))


def write_package_sources(folder: Path, table: str, *, on_gpu: bool = False) -> None:
    """Write everything except the model. `table` names the model's symbol table; `on_gpu`: the model is for GPUs."""
    sources = folder / "Sources" / "CMlcpipe"
    write_sources(sources, sources / "include", "ios")
    (sources / "runtime" / "exports.map").unlink()  # of a shared library
    included = (Path("tvm", name).as_posix() for name in INCLUDES if (sources / "tvm" / name).is_dir())
    values: dict[str, Value] = {
        "VERSION": __version__,
        "TABLE": table,
        "GPU": str(on_gpu).lower(),
        "INCLUDES": ["runtime", *included],
        "DEFINITIONS": macros(),
    }
    write_templates(_TEMPLATES, folder, values)
    (folder / "THIRD_PARTY.txt").write_text(source_licenses(), encoding="utf-8")


def _write_xcframework(library: bytes, folder: Path) -> None:
    """Write a static library for iPhones and one for the simulator, in the layout that Xcode expects."""
    platforms = {"ios-arm64": (library, {}), "ios-arm64-simulator": (for_simulator(library), _SIMULATOR)}
    available = []
    for name, (content, variant) in platforms.items():
        (folder / name).mkdir(parents=True)
        (folder / name / _LIBRARY).write_bytes(content)
        described = {"LibraryIdentifier": name, "LibraryPath": _LIBRARY, "BinaryPath": _LIBRARY}
        available.append({**described, **variant, "SupportedArchitectures": ["arm64"], "SupportedPlatform": "ios"})
    info = {
        "AvailableLibraries": available,
        "CFBundlePackageType": "XFWK",
        "XCFrameworkFormatVersion": "1.0",
    }
    (folder / "Info.plist").write_bytes(plistlib.dumps(info))
