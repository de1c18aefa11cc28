"""`mlcpipe doctor --model`: whether and how a model runs here, by its configuration, tokenizer and headers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlcpipe.cli.terminal import cell, new_table, print_json, print_rows, say, stderr_console, stdout_console
from mlcpipe.errors import MlcpipeError, TemplateError, UsageError, naming
from mlcpipe.host.bandwidth import last_cache_bytes
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.loading import bundle_of
from mlcpipe.support.defaults import CHAT, EMBED, LOCAL_TARGET, TRANSCRIBE
from mlcpipe.support.generated import shell_word
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.bundle.memory import Need
    from mlcpipe.checkpoint import Checkpoint
    from mlcpipe.checkpoint.preview import Download
    from mlcpipe.support.progress import Progress


@dataclass(frozen=True)
class Row:
    """A quantization: bytes of weights, of those that a token reads, and of all with a context; `problem` is why it
    does not run, or "".

    `target` is what `auto` compiles for, `why` the reason. `tokens_per_s` are decoded at most, None where the speed of
    memory is no bound.
    """

    quantization: str
    weights_bytes: int = 0
    read_bytes: int = 0
    context_tokens: int = 0
    memory_bytes: int = 0
    problem: str = ""
    target: str = ""
    why: str = ""
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class ModelReport:
    """A model, and its quantizations: the default, then the smallest. `refused` is the error that it ends in, or ""."""

    model: str
    family: str = ""
    does: str = ""
    refused: str = ""
    quantizations: tuple[Row, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether some quantization does."""
        return any(not row.problem for row in self.quantizations)

    @property
    def verdict(self) -> str:
        """In one line: whether and how the model runs."""
        if self.refused:
            return f"Does not run: {self.refused}"
        row = next((row for row in self.quantizations if not row.problem), None)
        if row is None:
            return f"Does not run: {self.quantizations[0].problem}"
        speed = f", at most {row.tokens_per_s:.1f} tokens/s" if row.tokens_per_s else ""
        return f"Runs: {self.family}, {self.does}; {row.quantization} for {row.target}{speed}."


def doctor_model(model: str, *, as_json: bool) -> bool:
    """Print the report on a model -> whether it runs. Raises UsageError and DownloadError."""
    if bundle_of(model) is not None:
        step = f"type: mlcpipe inspect {shell_word(model)}"
        raise UsageError("the model is compiled already", where=model, next_step=step)
    with console_progress(stderr_console(), lasting=False) as progress:
        report = report_on(model, progress)
    if as_json:
        print_json({"verdict": report.verdict, "runs": report.runs, **asdict(report)})
    else:
        _show(report)
    return report.runs


def report_on(model: str, progress: Progress) -> ModelReport:
    """What is known of a model before its weights are downloaded. Raises DownloadError."""
    from mlcpipe.checkpoint import resolve

    seen: list[ModelReport] = []
    path = resolve(model, progress, check=lambda c, d: seen.append(_judged(model, c, d, progress)), weights=False)
    if seen:
        return seen[0]
    try:
        with naming(model, path):
            checkpoint = _opened(path)
    except MlcpipeError as error:
        return ModelReport(model, refused=str(error))
    return _judged(model, checkpoint, None, progress)


def _opened(path: Path) -> Checkpoint:
    """A checkpoint, also one whose weights are not here."""
    from mlcpipe.checkpoint import open_checkpoint
    from mlcpipe.checkpoint.checkpoint import CONFIG, INDEX, SINGLE_FILE
    from mlcpipe.checkpoint.preview import config_preview

    bare = (path / CONFIG).is_file() and not any((path / name).exists() for name in (SINGLE_FILE, INDEX))
    return config_preview(path) if bare else open_checkpoint(path)


def _judged(model: str, checkpoint: Checkpoint, download: Download | None, progress: Progress) -> ModelReport:
    from mlcpipe.compiler.embedding import embedding_info
    from mlcpipe.compiler.preflight import Purpose
    from mlcpipe.sound import hears

    does, task = "chats", CHAT
    try:
        with naming(model, checkpoint.path, checkpoint.folder):
            if (embedding := embedding_info(checkpoint)) is not None:
                does, task = ("reranks" if embedding.task == "rerank" else "embeds texts"), EMBED
            if hears(checkpoint.config):
                does, task = "turns sound into text", TRANSCRIBE
            try:
                Purpose(LOCAL_TARGET, task=task, title=model).check(checkpoint, download)
            except TemplateError as error:
                does = f"continues text with --raw: {error.what}"
                Purpose(LOCAL_TARGET, title=model).check(checkpoint, download)
    except MlcpipeError as error:
        return ModelReport(model, refused=str(error))
    first, *others = (
        _row(name, checkpoint, download, task in (EMBED, TRANSCRIBE), progress) for name in _quantizations(checkpoint)
    )
    rows = first, *sorted(others, key=lambda row: row.weights_bytes)
    return ModelReport(model, str(checkpoint.config["model_type"]), does, quantizations=rows)


def _quantizations(checkpoint: Checkpoint) -> Iterator[str]:
    """The default, then the others with scales in float16."""
    from mlcpipe.quantization.scheme import load_scheme, scheme_names

    default = checkpoint.quantization(None)
    yield default
    yield from (name for name in scheme_names() if load_scheme(name).model_dtype == "float16" and name != default)


def _row(name: str, checkpoint: Checkpoint, download: Download | None, embeds: bool, progress: Progress) -> Row:
    from mlcpipe.compiler.automatic import STEP_S, choose, host_gb_s, token_s
    from mlcpipe.compiler.preflight import Purpose

    def needed(target: str) -> Need:
        return Purpose(target, name, useful=True).judge(checkpoint, download)

    try:
        place = choose(lambda target: [needed(target)], progress)
        need, free, on_cpu = needed(place.target), free_memory(), not place.gb_s
        row = Row(name, need.weights, need.read, need.context, need.nbytes, target=place.target, why=place.why)
        if not need.weights:
            return replace(row, problem="the size of its weights is not known: they are not here")
        if on_cpu and need.nbytes > free.nbytes:
            return replace(row, problem=f"takes {byte_size(need.nbytes)}, and there are {free}")
        if embeds or (on_cpu and need.read < last_cache_bytes()):
            return row
        seconds = token_s(need, host_gb_s()) if on_cpu else token_s(need, place.gb_s, STEP_S)
    except MlcpipeError as error:
        return Row(name, problem=str(error))
    return replace(row, tokens_per_s=1 / seconds)


def _show(report: ModelReport) -> None:
    console = stdout_console()
    say(console, report.verdict, style="bold")
    if not (rows := report.quantizations):
        return
    first = rows[0]
    facts = [("model", f"{report.model}: {report.family}, {report.does}"), ("memory", str(free_memory()))]
    if 0 < first.read_bytes < first.weights_bytes / 2:
        facts.append(("a token reads", f"{byte_size(first.read_bytes)} of {byte_size(first.weights_bytes)} of weights"))
    print_rows(console, [*facts, ("runs on", f"{first.target}: {first.why}")] if first.target else facts)
    say(console, "")
    context = f"memory, {first.context_tokens} tokens"
    table = new_table("quantization", "weights", context, "for", "tokens/s at most", whole="quantization")
    for row in rows:
        speed = f"{row.tokens_per_s:.1f}" if row.tokens_per_s else ""
        sizes = [byte_size(size) if size else "" for size in (row.weights_bytes, row.memory_bytes)]
        table.add_row(*map(cell, (row.quantization, *sizes, row.problem or row.target, speed)))
    console.print(table)
