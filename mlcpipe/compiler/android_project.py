"""A project for Android Studio: the native runtime with its Kotlin, apps that chat, and models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlcpipe.bundle import Manifest, read_manifest
from mlcpipe.compiler.container import checked_manifest, data_files, write_container, write_parts
from mlcpipe.compiler.licenses import kotlin_licenses, source_licenses
from mlcpipe.compiler.link import ANDROID
from mlcpipe.compiler.sdk import named_models, write_runtime
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu_features import architecture_of
from mlcpipe.support.atomic import atomic_directory
from mlcpipe.support.generated import write_templates
from mlcpipe.support.progress import Progress
from mlcpipe.support.resources import native_path

_TEMPLATES = native_path() / "android"
_MARK = "settings.gradle.kts"  # marks such a folder
_ABIS = {"aarch64": "arm64-v8a", "x86_64": "x86_64"}
# The bundles of a model, by Android's name of their architecture.
_Codes = dict[str, Path]


def write_android_project(
    bundles: Sequence[Path], output: Path, progress: Progress, *, overwrite: bool = False
) -> None:
    """Write a Gradle project with the code of each bundle for its apps, and the data in `models/NAME/model.mlcp`.

    Bundles that differ only in their code are one model, named after the first. Raises UsageError for
    bundles that were not compiled for Android, for models of different machines or of one name, BundleError,
    SignatureError, and ResourceError.
    """
    models = _models(bundles)
    abis = list(next(iter(models.values())))
    with atomic_directory(output, replaces=_MARK if overwrite else "") as folder:
        values = {
            "ABIS": abis,
            "MODELS": list(models),
            "MODEL": next(iter(models)),
        }
        write_templates(_TEMPLATES, folder, values)
        library = folder / "mlcpipe" / "src" / "main"
        write_runtime(library / "cpp" / "runtime", [read_manifest(bundle) for bundle in bundles])
        for name, codes in models.items():
            _write_model(folder, name, codes, progress)
        licences = library / "resources" / "META-INF" / "ai.mlcpipe" / "THIRD_PARTY.txt"  # in the AAR and in apps
        licences.parent.mkdir(parents=True)
        licences.write_text(source_licenses(kotlin_licenses()), encoding="utf-8")


def _models(bundles: Sequence[Path]) -> Mapping[str, _Codes]:
    """The bundles of each model, by its name."""
    groups: dict[str, _Codes] = {}
    for bundle in bundles:
        manifest = checked_manifest(bundle)
        triple, libraries = manifest.target.triple, _libraries(manifest)
        if not triple.endswith(ANDROID) or architecture_of(triple) not in _ABIS or len(libraries) != 1:
            raise UsageError(
                "the bundle has no code for Android",
                where=bundle,
                found=f"target {manifest.target.name}",
                next_step="compile the model again with --target android",
            )
        codes = groups.setdefault(_data(manifest), {})
        abi = _ABIS[architecture_of(triple)]
        if abi in codes:
            raise UsageError("two bundles of one model and machine", found=f"{codes[abi]} and {bundle}")
        codes[abi] = bundle
    models = dict(zip(named_models([next(iter(codes.values())) for codes in groups.values()]), groups.values()))
    if len({frozenset(codes) for codes in models.values()}) != 1:
        found = "; ".join(f"{name}: {', '.join(codes)}" for name, codes in models.items())
        raise UsageError("models for different machines", expected="bundles of each model for each", found=found)
    return models


def _libraries(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name.endswith(".so")]


def _data(manifest: Manifest) -> str:
    """The fields that all bundles of one model share, whatever machine they were compiled for."""
    files = {name: manifest.files[name].sha256 for name in data_files(manifest)}
    return json.dumps([manifest.model.model_dump(mode="json"), files], sort_keys=True)


def _write_model(folder: Path, name: str, codes: _Codes, progress: Progress) -> None:
    for abi, bundle in codes.items():
        library = folder / "jniLibs" / abi / f"libmodel_{name}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle / _libraries(read_manifest(bundle))[0], library)
    (folder / "models" / name).mkdir(parents=True)
    first, *others = codes.values()
    write_parts(write_container(first, folder / "models" / name / "model.mlcp", progress, others=others))
