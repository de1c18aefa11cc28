"""A project for Android Studio: the native runtime with its Kotlin, an app that chats, and models."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mlcpipe.atomic import atomic_directory
from mlcpipe.bundle import Manifest
from mlcpipe.compiler.container import checked_manifest, write_container, write_parts
from mlcpipe.compiler.licenses import source_licenses
from mlcpipe.compiler.link import ANDROID
from mlcpipe.compiler.sdk import named_models, one_triple, write_runtime, write_templates
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu_features import architecture_of
from mlcpipe.progress import Progress
from mlcpipe.resources import native_path

_TEMPLATES = native_path() / "android"
_MARK = "settings.gradle.kts"  # only such a folder has it
_ABIS = {"aarch64": "arm64-v8a", "x86_64": "x86_64"}


def write_android_project(
    bundles: Sequence[Path], output: Path, progress: Progress, *, overwrite: bool = False
) -> None:
    """Write a Gradle project with the code of each bundle in its app, and the data in `models/NAME/model.mlcp`.

    Raises UsageError for bundles that were not compiled for Android, for different machines or of one name,
    BundleError, SignatureError, and ResourceError.
    """
    models = named_models(bundles)
    manifests = {name: checked_manifest(bundle) for name, bundle in models.items()}
    codes = {name: _code(bundle, manifests[name]) for name, bundle in models.items()}
    triple = one_triple(manifests.values())
    abi = _ABIS[architecture_of(triple)]
    with atomic_directory(output, replaces=_MARK if overwrite else "") as folder:
        values = {"TRIPLE": triple, "ABI": abi, "MODELS": ", ".join(models), "MODEL": next(iter(models))}
        write_templates(_TEMPLATES, folder, values)
        write_runtime(folder / "mlcpipe" / "src" / "main" / "cpp" / "runtime")
        libraries = folder / "app" / "src" / "main" / "jniLibs" / abi
        libraries.mkdir(parents=True)
        for name, bundle in models.items():
            shutil.copyfile(codes[name], libraries / f"libmodel_{name}.so")
            (folder / "models" / name).mkdir(parents=True)
            write_parts(write_container(bundle, folder / "models" / name / "model.mlcp", progress))
        (folder / "THIRD_PARTY.txt").write_text(source_licenses(), encoding="utf-8")


def _code(bundle: Path, manifest: Manifest) -> Path:
    """The path of a bundle's shared library for Android. Raises UsageError for a bundle without one."""
    triple, found = manifest.target.triple, [bundle / name for name in manifest.files if name.endswith(".so")]
    if not triple.endswith(ANDROID) or architecture_of(triple) not in _ABIS or len(found) != 1:
        raise UsageError(
            "the bundle has no code for Android",
            where=bundle,
            found=f"target {manifest.target.name}",
            next_step="compile the model again with --target android",
        )
    return found[0]
