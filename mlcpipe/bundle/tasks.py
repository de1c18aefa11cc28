"""What a model is for, and the command that uses a bundle."""

from __future__ import annotations

from pathlib import Path

from mlcpipe.bundle.manifest import Manifest
from mlcpipe.errors import UsageError
from mlcpipe.host.cpu_features import architecture, architecture_of
from mlcpipe.support.defaults import ANY, CHAT, EMBED, SERVE, TRANSCRIBE, WRITE
from mlcpipe.support.generated import shell_word


def check_task(task: str, title: object, *, embeds: bool, hears: bool = False) -> None:
    """Raise UsageError if the model `title`, which embeds texts, hears, or else writes text, does not do `task`."""
    if hears != (task == TRANSCRIBE) and task not in (ANY, SERVE):
        raise UsageError(
            f"the model {'turns sound into text' if hears else 'hears nothing'}", where=title,
            expected="a model that hears, such as Whisper" if task == TRANSCRIBE else "a model of text",
            next_step=f"type: mlcpipe transcribe FILE --model {shell_word(str(title))}" if hears else None,
        )  # fmt: skip
    if task in (CHAT, WRITE) and embeds:
        raise UsageError(
            "the model embeds texts and writes none", where=title, expected="a model that writes text",
            next_step=f'type: mlcpipe embed {shell_word(str(title))} "a text"',
        )  # fmt: skip
    if task == EMBED and not embeds:
        raise UsageError(
            "the model writes text and has no embeddings", where=title, expected="an encoder",
            next_step=f"type: mlcpipe chat {shell_word(str(title))}",
        )  # fmt: skip


def check_writes(manifest: Manifest) -> None:
    """Raise UsageError for a bundle of a model that does not continue text."""
    if manifest.model.speech is not None:
        raise UsageError("the model turns sound into text", next_step="use mlcpipe transcribe or mlcpipe.Transcriber")
    if manifest.model.embedding is not None:
        raise UsageError("the model embeds texts and writes none", next_step="use mlcpipe embed or mlcpipe.Embedder")


def command_elsewhere(bundle: Path, manifest: Manifest) -> str | None:
    """The command for a bundle that a browser, a phone or a board runs; None for this kind of machine."""
    triple, word = manifest.target.triple, shell_word(bundle)
    if triple.startswith("wasm"):
        return f"mlcpipe chat --web {word}"
    if app := next((system for system in ("ios", "android") if system in triple), None):
        return f"mlcpipe package {word} --app {app} -o Chat"
    if "linux" in triple and architecture_of(triple) != architecture():
        return f"mlcpipe package {word} --app cli -o chat"
    return None


def next_command(bundle: Path, manifest: Manifest) -> str:
    """The command that runs a bundle, here or on the machine that it was compiled for."""
    embedding, word = manifest.model.embedding, shell_word(bundle)
    if (elsewhere := command_elsewhere(bundle, manifest)) is not None:
        return elsewhere
    if manifest.model.speech is not None:
        return f"mlcpipe transcribe FILE --model {word}"
    if embedding is None:
        return f"mlcpipe chat {word}"
    return f'mlcpipe embed {word} {"--query QUESTION " if embedding.task == "rerank" else ""}"a text"'
