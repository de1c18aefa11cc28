"""`mlcpipe serve` for models that embed texts, and for those that hear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.runtime.embedder import Embedder
    from mlcpipe.runtime.speech.transcriber import Transcriber
    from mlcpipe.server.pooled_model import Kind
    from mlcpipe.server.run import LoadedEmbedder, LoadedTranscriber


def manifest_of(bundle: Path, **chat_only: object) -> Manifest:
    """The bundle's manifest. Raises UsageError for an option that only concerns answers."""
    from mlcpipe.bundle import read_manifest

    manifest = read_manifest(bundle)
    given = next((name for name, value in chat_only.items() if value), None)
    if kind_of(manifest) != "text" and given is not None:
        found = "a model that hears" if manifest.model.speech is not None else "a model that writes no text"
        raise UsageError(f"--{given.replace('_', '-')} has no effect", where=bundle, found=found)
    return manifest


def kind_of(manifest: Manifest) -> Kind:
    """What the model of a bundle makes."""
    model = manifest.model
    if model.speech is not None:
        return "speech"
    return "text" if model.embedding is None else "rerank" if model.embedding.task == "rerank" else "embed"


def facts_of(manifest: Manifest) -> dict[str, object]:
    """What lists of models say about a bundle."""
    return {
        "model_type": manifest.model.model_type,
        "quantization": manifest.quantization,
        "target": manifest.target.name,
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "digest": manifest.checkpoint_hash,
    }


def loaded_embedder(embedder: Embedder, names: tuple[str, ...], max_queue: int) -> LoadedEmbedder:
    """The loaded model for the server."""
    from mlcpipe.server.embedding_service import EmbeddingEngine
    from mlcpipe.server.run import LoadedEmbedder
    from mlcpipe.server.service import Facts

    manifest = embedder.manifest
    about = {**facts_of(manifest), "device": embedder.device}
    return LoadedEmbedder(EmbeddingEngine(embedder), Facts(names, about), max_queue)


def loaded_transcriber(transcriber: Transcriber, names: tuple[str, ...], max_queue: int) -> LoadedTranscriber:
    """The loaded model for the server."""
    from mlcpipe.server.run import LoadedTranscriber
    from mlcpipe.server.service import Facts
    from mlcpipe.server.speech_service import SpeechEngine

    about = {**facts_of(transcriber.manifest), "device": transcriber.device}
    return LoadedTranscriber(SpeechEngine(transcriber), Facts(names, about), max_queue)


def say_hears(loaded: LoadedTranscriber, address: str, curl: str, key: str) -> None:
    """As `say_ready`, for a model that hears."""
    console = stderr_console()
    say(console, f"{loaded.facts.names[0]} on {address}  (Ctrl-C stops the server)")
    say(console, f"{curl}/v1/audio/transcriptions{key} -F file=@talk.mp3")


def say_ready(loaded: LoadedEmbedder, address: str, curl: str, key: str) -> None:
    """Print the address and a first request, which begins with `curl`; `key` is the header with the API key."""
    console, reranks = stderr_console(), loaded.engine.embedder.info.task == "rerank"
    say(console, f"{loaded.facts.names[0]} on {address}  (Ctrl-C stops the server)")
    path, body = ("rerank", '{"query": "Who sat?", "documents": ["A cat"]}') if reranks else (
        "embeddings", '{"input": "A cat sat"}')  # fmt: skip
    say(console, f"{curl}/v1/{path} -H 'Content-Type: application/json'{key} -d '{body}'")
