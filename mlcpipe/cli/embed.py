"""`mlcpipe embed`: texts to embeddings, and documents to scores for a query."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import (
    DeviceOption,
    JsonOption,
    QuantizationOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
)
from mlcpipe.cli.terminal import print_json, stderr_console
from mlcpipe.errors import UsageError, last_line, naming
from mlcpipe.loading import engine_device, prepare_bundle
from mlcpipe.support.defaults import AUTO, EMBED
from mlcpipe.support.files import read_bounded
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.runtime.embedder import Embedder

_MAX_FILE_BYTES = 64 << 20


def embed_command(
    model: Annotated[str, typer.Argument(help="hf://org/name, a checkpoint folder or a bundle of an encoder.")],
    texts: Annotated[list[str] | None, typer.Argument(help="Texts.", metavar="TEXT...")] = None,
    file: Annotated[Path | None, typer.Option(help="A file in UTF-8 with a text in each line.")] = None,
    query: Annotated[
        str | None, typer.Option(help="Score the texts as answers to this query; for cross-encoders.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="The name of one of the model's prompts, to stand before each text. (default: the model's)"),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="The first so many numbers, brought to length 1. (default: all)")
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are longer than the model takes.")
    ] = False,
    device: DeviceOption = AUTO,
    threads: ThreadsOption = None,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the embedding of each text, its numbers in a line; or with --query the score of each.

    Examples:

    `mlcpipe embed hf://BAAI/bge-small-en-v1.5 "a cat sat on a mat" "rain in spring"`

    `mlcpipe embed ./bundle --file lines.txt --json`

    `mlcpipe embed ./reranker --query "who sat?" "a cat sat on a mat" "rain in spring"`
    """
    check_at_least_one(threads=threads, dimensions=dimensions)
    given = [*(texts or ()), *(_lines(file) if file is not None else ())]
    if not given:
        raise UsageError("no texts", next_step="give some, or --file")
    if query is not None and (prompt is not None or dimensions is not None):
        raise UsageError(f"--{'prompt' if prompt is not None else 'dimensions'} has no effect with --query")
    with console_progress(stderr_console(), lasting=False) as progress:
        bundle = prepare_bundle(model, device, quantization, target=target, task=EMBED, progress=progress)
        from mlcpipe import Embedder

        with naming(model, bundle):
            embedder = Embedder(bundle, device=engine_device(device), threads=threads, progress=progress)
    if query is not None:
        _print_scores(embedder, query, given, truncate, as_json)
        return
    limit = embedder.max_tokens if truncate else None
    rows = embedder.embed(given, prompt_name=prompt, dimensions=dimensions, truncate=limit)
    if as_json:
        print_json([{"text": text, "embedding": row.tolist()} for text, row in zip(given, rows)])
        return
    for row in rows:
        sys.stdout.write(" ".join(f"{number:.6g}" for number in row.tolist()) + "\n")


def _print_scores(embedder: Embedder, query: str, texts: list[str], truncate: bool, as_json: bool) -> None:
    scores = embedder.rerank(query, texts, truncate=embedder.max_tokens if truncate else None).tolist()
    if as_json:
        print_json([{"text": text, "score": score} for text, score in zip(texts, scores)])
        return
    for text, score in zip(texts, scores):
        sys.stdout.write(f"{score:.6f} {text}\n")


def _lines(path: Path) -> list[str]:
    try:
        content = read_bounded(path, _MAX_FILE_BYTES, UsageError, "the file of texts").decode()
    except UnicodeDecodeError as error:
        raise UsageError("the file of texts", where=path, expected="UTF-8", found=last_line(error)) from None
    return [line for line in content.splitlines() if line.strip()]
