"""Opening a model whose last stage is here and whose other stages are processes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlcpipe.bundle.stages import Part
from mlcpipe.errors import UsageError
from mlcpipe.runtime.loading import CompiledLibrary, LoadedBundle, choose_context_length, load_part, open_last
from mlcpipe.runtime.remote.stages import Link, RemoteDevice, RemoteStages
from mlcpipe.runtime.remote.worker import StageReport
from mlcpipe.support.progress import Progress, SilentProgress


def open_with_stages(
    path: Path,
    links: Sequence[Link],
    context_length: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    progress: Progress = SilentProgress(),
) -> LoadedBundle:
    """A bundle in a folder that has its last stage; `links` are the processes of the others, in order.

    All look at their files and memory before any loads weights; `context_length` is bounded by the memory of all.
    Raises the errors of `load_bundle`.
    """
    parts, opened = open_last(path, device)
    manifest = opened.whole
    if len(links) != len(parts) - 1:
        raise UsageError("stages", where=path, expected=f"{len(parts) - 1} processes before the last", found=len(links))
    remote = RemoteStages(links, opened.device)
    places = [*zip([part.manifest for part in parts], [*_devices(links, remote.look()), opened.device])]
    context = choose_context_length(manifest, context_length, places)
    last, reports = remote.load(
        context, threads, manifest.states, lambda: load_part(opened, context, threads, progress)
    )
    stages = (*(_elsewhere(*each, last) for each in zip(parts, _devices(links, reports))), last)
    return replace(last, manifest=manifest, stages=stages, elsewhere=remote)


def _devices(links: Sequence[Link], reports: Sequence[StageReport]) -> list[RemoteDevice]:
    return [RemoteDevice(index, link.name, report) for index, (link, report) in enumerate(zip(links, reports))]


def _elsewhere(part: Part, device: RemoteDevice, last: LoadedBundle) -> LoadedBundle:
    """A stage of another process, as the last one has it: without code and weights."""
    found = next(one for one in part.manifest.target.variants if one.name == device.report.variant)
    library = CompiledLibrary(None, None, None, found.name)
    return LoadedBundle(part.manifest, found, device, last.threads, last.context_length, library, None)
