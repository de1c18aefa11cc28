"""`ollama://name[:tag]`: a model in Ollama's store on this machine; nothing is downloaded.

Layout (Ollama's packages manifest and blob): `manifests/<host>/<namespace>/<name>/<tag>` is a JSON manifest. Its layers
have a media type and a digest; `blobs/sha256-<hex>` are their contents. The model's layer is a GGUF file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mlcpipe.checkpoint.content_hash import file_digest
from mlcpipe.errors import CheckpointError
from mlcpipe.support.env import env, expanded
from mlcpipe.support.files import OLLAMA_SCHEME
from mlcpipe.support.json_files import read_json_object, shown, shown_path

STORES = ("~/.ollama/models", "/usr/share/ollama/.ollama/models")  # of a user, and of Linux's service
MAX_MANIFEST_BYTES = 1 << 20
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|\.(?!\.))*"
_SPEC = re.compile(rf"{OLLAMA_SCHEME}((?:{_PART}/){{0,2}})({_PART})(?::({_PART}))?")
_DEFAULTS = ("registry.ollama.ai", "library")
_TYPE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


def resolve_ollama(spec: str) -> Path:
    """The GGUF file of `ollama://[[host/]namespace/]name[:tag]`, checked against its digest.

    Raises CheckpointError for a bad name, a model that the store does not have, and a damaged store.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise CheckpointError(
            "bad model name", expected="ollama://name or ollama://name:tag", found=shown(spec),
            next_step="copy the name from `ollama list`",
        )  # fmt: skip
    before = match[1].split("/")[:-1]
    parts = [*_DEFAULTS[: 2 - len(before)], *before, match[2], match[3] or "latest"]
    chosen = env().ollama_models
    stores = [expanded(store) for store in STORES] if chosen is None else [chosen]
    store = next((store for store in stores if store.joinpath("manifests", *parts).is_file()), None)
    if store is None:
        raise CheckpointError(
            f"Ollama has no model {shown(spec.removeprefix(OLLAMA_SCHEME))} on this machine",
            where=" or ".join(map(shown_path, stores)), expected="/".join(parts), found="no such manifest",
            next_step="check `ollama list`, set OLLAMA_MODELS to Ollama's folder, or run `ollama pull`",
        )  # fmt: skip
    manifest = store.joinpath("manifests", *parts)
    digest = _model_digest(manifest)
    blob = store / "blobs" / f"sha256-{digest}"
    if file_digest(blob, env().cached("hashes")) != digest:
        raise CheckpointError(
            "a file of Ollama's store is damaged", where=shown_path(blob), expected=digest, found="another digest",
            next_step="run `ollama pull` again",
        )  # fmt: skip
    return blob


def _model_digest(manifest: Path) -> str:
    """The digest of the one layer with the model. An adapter, which would change the weights, is refused."""
    layers = read_json_object(manifest, limit=MAX_MANIFEST_BYTES, error=CheckpointError).get("layers")
    entries: list[Any] = layers if isinstance(layers, list) else []
    kinds = [layer.get("mediaType") if isinstance(layer, dict) else None for layer in entries]
    if kinds.count(f"{_TYPE}model") != 1 or f"{_TYPE}adapter" in kinds:
        raise CheckpointError(
            "Ollama's manifest is not supported", where=shown_path(manifest), expected="one model without an adapter",
            found=shown([str(kind).removeprefix(_TYPE) for kind in kinds[:8]]),
        )  # fmt: skip
    digest = entries[kinds.index(f"{_TYPE}model")].get("digest")
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise CheckpointError("bad digest", where=shown_path(manifest), expected="sha256:<hex>", found=shown(digest))
    return match[1]
