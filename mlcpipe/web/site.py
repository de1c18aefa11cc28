"""A static site: maps paths to files. `package` writes it to a folder, `chat --web` serves it in place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlcpipe.bundle import Manifest, read_manifest, verify
from mlcpipe.bundle.manifest import MANIFEST
from mlcpipe.bundle.origin import note_foreign
from mlcpipe.compiler.licenses import tvm_licenses
from mlcpipe.errors import BundleError, UsageError
from mlcpipe.support.atomic import atomic_directory

SITE_JSON = "site.json"
SITE_FORMAT = 1
LICENSES = "licenses-model.txt"
"""Licences of what a library for browsers is linked with; those of the page are in its licenses.md."""
# Files that the page fetches in addition to weights and library, by who owns the KV cache: WebLLM runs libraries over
# TVM's, the page's own engine those over pages. The bundle's other files are for other hosts.
_NEEDED = {
    "tvm": ("mlc-chat-config.json", "tokenizer.json", "tensor-cache.json"),
    "pages": ("mlc-chat-config.json", "tokenizer.json", "tensor-cache.json", "tokenizer_config.json"),
}


@dataclass(frozen=True)
class Site:
    """Path in the site (relative, forward slashes) -> the file on disk, or its content."""

    files: Mapping[str, Path | bytes]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in self.files.values())


@dataclass(frozen=True)
class _Choice:
    """A library of a bundle; the page takes the first whose features and subgroup size the GPU supports."""

    bundle: Path
    manifest: Manifest
    path: str
    library: str
    features: tuple[str, ...]
    subgroup_size: int | None

    @property
    def facts(self) -> dict[str, Any]:
        """The entry in `site.json`."""
        size = {} if self.subgroup_size is None else {"subgroup_size": self.subgroup_size}
        return {"path": self.path, "library": self.library, "features": list(self.features), **size}


def assemble_site(page: Path, bundles: Sequence[Path], *, title: str, autostart: bool = False) -> Site:
    """The site with a page and one model, compiled for one or more sets of GPU features.

    A bundle is at `models/<folder's name>/resolve/main/`, where WebLLM also looks for the address
    `models/<folder's name>/`.

    Args:
        page: the built page.
        bundles: bundles for webgpu targets; the page prefers the library that uses the most GPU features.
        title: the model's display name.
        autostart: whether the page downloads the model without asking.

    Raises:
        BundleError: a bundle is damaged, or not for browsers.
        SignatureError: a bundle's signature is bad.
        UsageError: two bundles with the same name, or libraries with the same GPU features.
    """
    choices = _choices(bundles)
    for bundle, manifest in {choice.bundle: choice.manifest for choice in choices}.items():
        verify(bundle, manifest, deep=True)
        note_foreign(bundle, manifest.target, "packages or serves")
    files: dict[str, Path | bytes] = {
        path.relative_to(page).as_posix(): path for path in sorted(page.rglob("*")) if path.is_file()
    }
    for choice in choices:
        needed = _NEEDED[choice.manifest.model.kv_cache]
        names = [name for name in choice.manifest.files if name in needed or name.endswith((".bin", ".wasm"))]
        for name in [MANIFEST, *names]:
            files[choice.path + name] = choice.bundle / name
    facts = {
        "format": SITE_FORMAT,
        "title": title,
        "autostart": autostart,
        "choices": [choice.facts for choice in choices],
    }
    files[LICENSES] = _licenses()
    files[SITE_JSON] = f"{json.dumps(facts, indent=2)}\n".encode()
    return Site(files)


def _licenses() -> bytes:
    """LICENSE and NOTICE of TVM, whose runtime is part of every library for browsers."""
    first = "Each model.wasm of this site contains the runtime of Apache TVM; and musl and libc++ of Emscripten (MIT)."
    return "\n\n".join([first, *(f"{title}\n\n{text}" for title, text in tvm_licenses())]).encode()


def check_bundles(bundles: Sequence[Path]) -> None:
    """Raise the errors of `assemble_site` that manifests reveal, before building a page or hashing files."""
    _choices(bundles)


def _choices(bundles: Sequence[Path]) -> list[_Choice]:
    """The libraries of all bundles, sorted by descending number of GPU features."""
    by_bundle = [_libraries(bundle) for bundle in bundles]
    choices = sorted((c for libraries in by_bundle for c in libraries), key=lambda choice: -len(choice.features))
    if not choices:
        raise UsageError("no bundle for the site")
    for kind, seen in (
        ("name", [libraries[0].path for libraries in by_bundle]),
        ("set of GPU features", [f"{sorted(c.features)} {c.subgroup_size}" for c in choices]),
    ):
        if len(set(seen)) < len(seen):
            raise UsageError(f"two bundles with the same {kind}", where=", ".join(map(str, bundles)))
    return choices


def _libraries(bundle: Path) -> list[_Choice]:
    # The library runs in a browser, so the TVM installed here does not matter.
    manifest = read_manifest(bundle, check_abi=False)
    libraries = [name for name in manifest.files if name.endswith(".wasm")]
    variants = manifest.target.variants
    named = [variant.library.path if variant.library else libraries[0] for variant in variants if libraries]
    if sorted(named) != sorted(libraries) or not libraries:
        raise BundleError(
            "the bundle is not for browsers",
            where=bundle,
            expected="a WebAssembly library for each variant",
            found=f"a bundle for {manifest.target.name}",
            next_step="compile it with: mlcpipe compile CHECKPOINT --target webgpu --output FOLDER",
        )
    missing = [name for name in _NEEDED[manifest.model.kv_cache] if name not in manifest.files]
    if missing:
        raise BundleError(
            f"the bundle has no {missing[0]}",
            where=bundle,
            next_step="compile a checkpoint with a tokenizer and a chat template",
        )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", bundle.resolve().name).strip("-.") or "model"
    path = f"models/{name}/resolve/main/"
    return [
        _Choice(bundle, manifest, path, library, variant.features, variant.subgroup_size)
        for library, variant in zip(named, variants, strict=True)
    ]


def write_site(site: Site, output: Path, *, overwrite: bool = False) -> None:
    """Write the site to a folder, atomically.

    Raises:
        UsageError: the folder is not empty or, with `overwrite`, not a site.
        ResourceError: the disk is full.
    """
    with atomic_directory(output, replaces=SITE_JSON if overwrite else "", needed_bytes=site.bytes) as folder:
        for path, content in site.files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                target.write_bytes(content)
            else:
                shutil.copyfile(content, target)
