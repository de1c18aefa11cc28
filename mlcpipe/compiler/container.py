"""One data file for a program to map: weights, tokenizer, chat template and manifest of a bundle.

A container ends a file: appended to a program, it makes that self-contained. It holds data only. The code is in the
program, which accepts weights whose manifest states the same model and ABI. If programs of several architectures share
a container, `mlcpipe.json` is the manifest of one, and `mlcpipe-ARCHITECTURE.json` that of each other.

    files, each at a multiple of 4096 bytes | index, a file of tables | trailer

The index has names (sections 0 and 1), offset and length of each file, counted from the container's begin, and the
SHA-256 of the concatenated manifests, which contain those of the other files. The trailer: magic, then length of the
container, offset and length of the index as u64, and the SHA-256 of the index. Hashes are 64 hexadecimal digits.
`mlcpipe/native/runtime/bundle/files.cc` reads it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlcpipe.bundle import MANIFEST, Manifest, read_manifest, verify
from mlcpipe.bundle.origin import note_foreign
from mlcpipe.bundle.params_writer import BLOCK_BYTES
from mlcpipe.bundle.stages import check_one_device
from mlcpipe.compiler.text.tables import strings, tables
from mlcpipe.host.cpu_features import architecture_of
from mlcpipe.support.atomic import atomic_file
from mlcpipe.support.progress import Progress

KIND, VERSION = b"mlcfiles", 1
MAGIC = b"mlcpipe\x01"
ALIGNMENT = 4096  # of files; a container behind a program begins at a multiple of a page
PAGE_BYTES = 1 << 16  # the largest page of Linux on ARM
_TRAILER = struct.Struct("<8s3Q64s")
PART_BYTES = 8 << 20  # of a download; an app fetches a part again after a broken connection


@dataclass(frozen=True)
class Place:
    """The place of a file in a container, in bytes from its beginning."""

    offset: int
    nbytes: int


def checked_manifest(bundle: Path, *, deep: bool = False) -> Manifest:
    """The manifest of a bundle to package, after checking its files against it; with `deep` also the weights.

    Raises BundleError for a bundle that is damaged, SignatureError for a signature that does not hold. A
    ForeignBundleWarning is given for a foreign bundle, as in loading.
    """
    manifest = read_manifest(bundle)
    check_one_device(bundle, manifest, "`mlcpipe package`")
    verify(bundle, manifest, deep=deep)
    note_foreign(bundle, manifest.target, "packages")
    return manifest


def data_files(manifest: Manifest) -> list[str]:
    """The files of a bundle that are neither manifest nor code."""
    return [name for name in manifest.files if not name.startswith("lib/")]


def write_container(
    bundle: Path, output: Path, progress: Progress, *, program: Path | None = None, others: Sequence[Path] = ()
) -> Path:
    """Write the data of a bundle as the file `output`; if `program` is given, appended to a copy of it and executable.

    `others` are bundles of the same data for other architectures. Raises the errors of `checked_manifest`, and
    ResourceError for a full disk.
    """
    manifest, manifests = checked_manifest(bundle, deep=True), {MANIFEST: bundle / MANIFEST}
    for other in others:
        manifests[f"mlcpipe-{architecture_of(checked_manifest(other).target.triple)}.json"] = other / MANIFEST
    files = manifests | {name: bundle / name for name in data_files(manifest)}
    code = b"" if program is None else program.read_bytes()
    total = sum(path.stat().st_size for path in files.values())
    progress.stage("write the file")
    progress.bytes_total(total)
    with atomic_file(output, total + ALIGNMENT * len(files) + len(code) + 2 * PAGE_BYTES) as file:
        file.write(code + bytes(-len(code) % PAGE_BYTES))
        begin, places = file.tell(), {}
        for name, path in files.items():
            file.write(bytes(-(file.tell() - begin) % ALIGNMENT))
            offset = file.tell() - begin
            with path.open("rb") as source:
                while block := source.read(BLOCK_BYTES - file.tell() % BLOCK_BYTES):
                    file.write(block)
                    progress.advance(len(block))
            places[name] = Place(offset, file.tell() - begin - offset)
        file.write(bytes(-(file.tell() - begin) % ALIGNMENT))
        index, at = _index(places, b"".join(path.read_bytes() for path in manifests.values())), file.tell() - begin
        length = at + len(index) + _TRAILER.size
        file.write(index + _TRAILER.pack(MAGIC, length, at, len(index), hashlib.sha256(index).hexdigest().encode()))
        if program is not None:
            Path(file.name).chmod(0o755)
    return output


def write_parts(data: Path, part_bytes: int = PART_BYTES) -> Path:
    """Write name and size of a file, and the SHA-256 of each part, for a download that checks them: `NAME.json`."""
    with data.open("rb") as file:
        hashes = [hashlib.sha256(part).hexdigest() for part in iter(lambda: file.read(part_bytes), b"")]
    parts = {"name": data.name, "bytes": data.stat().st_size, "part_bytes": part_bytes, "sha256": hashes}
    description = data.with_suffix(".json")
    description.write_text(json.dumps(parts), encoding="utf-8")
    return description


def _index(places: Mapping[str, Place], manifests: bytes) -> bytes:
    ends, text = strings(name.encode() for name in places)
    numbers = np.array([(place.offset, place.nbytes) for place in places.values()], np.uint64)
    return tables(KIND, VERSION, [ends, text, numbers, hashlib.sha256(manifests).hexdigest().encode()])
