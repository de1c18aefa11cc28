"""`mlcpipe serve --ray 1 --stages N`: one model on several machines, a stage on each."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcpipe.cli.options import stages_of
from mlcpipe.cli.serve_embeddings import manifest_of
from mlcpipe.cli.serve_loading import Bundles, load, name_of, prepare
from mlcpipe.cli.serve_options import ServeOptions
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.loading import bundle_of, prepare_bundle
from mlcpipe.support.defaults import AUTO, DEFAULT_TARGET
from mlcpipe.support.progress import Progress, SilentProgress, console_progress

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from mlcpipe.bundle import Manifest
    from mlcpipe.compiler.stage_plan import Room
    from mlcpipe.server.guard import Rules
    from mlcpipe.server.ray_links import Seat
    from mlcpipe.server.run import Loaded
    from mlcpipe.server.stage_places import Found, Machine

_CPU = "cpu"  # the device of stages where nobody says another


def one_machine_only(options: ServeOptions) -> dict[str, Any]:
    """The options that a model on several machines does not have, with their values."""
    return {
        "prefixes": options.prefixes,
        "picture-rows": options.picture_rows,
        "responses-store": options.responses_store,
        "adapter": options.adapter,
        "adapter-ranks": options.adapter_ranks,
        "adapter-folder": options.adapter_folder,
        "allow-remote-images": options.allow_remote_images or None,
        "best": options.best or None,
        "draft-model": options.draft_model,
        "draft-head": options.draft_head,
        "mmproj": options.mmproj,
        "semantic-cache": options.semantic_cache,
        "swap-bytes": options.swap_bytes,
    }


def devices_of(options: ServeOptions, stages: int) -> Sequence[str | None]:
    """The device of each stage on its machine, None for what its library was compiled for.

    Raises UsageError for another number of them.
    """
    if options.device == AUTO:
        return [None] * stages
    found = options.device.split(",")
    if len(found) not in (1, stages):
        raise UsageError("--device", expected=f"one device, or one for each of {stages} stages", found=options.device)
    return found if len(found) == stages else found * stages


def count_of(counts: Sequence[int]) -> int:
    """The number of stages in --stages, which is a number alone, or those of the layers of each.

    Raises UsageError for experts apart, and for a single stage.
    """
    from mlcpipe.bundle.stages import Experts

    if any(isinstance(count, Experts) for count in counts):
        raise UsageError("--ray with --stages", expected="layers with their experts", found=",".join(map(str, counts)))
    stages = counts[0] if len(counts) == 1 else len(counts)
    if stages < 2:
        raise UsageError("--ray with --stages", expected="two stages or more", found=stages)
    return stages


def check_cut(manifest: Manifest, counts: Sequence[int], where: Path) -> None:
    """Raise UsageError for a bundle that is not cut as --stages says."""
    from mlcpipe.bundle.stages import read_parts, stage_of

    infos = [stage_of(part.manifest) for part in read_parts(where, manifest)] if manifest.stages else []
    cut = [one.end - one.begin for one in infos if one is not None and not one.alone]
    fits = counts[0] == len(cut) if len(counts) == 1 else list(counts) == cut
    if not fits or len(cut) < len(infos):
        found = f"stages of {','.join(map(str, cut))} layers" if cut else "a bundle for one device"
        raise UsageError(
            "the bundle is not cut as --stages says", where=where, expected=f"--stages {','.join(map(str, counts))}",
            found=found, next_step="compile the checkpoint with the same --stages, or give the checkpoint",
        )  # fmt: skip


def room_there(machine: Machine, device: str | None, target: str | None, limit: int | None) -> Room:
    """What a device of the machine that calls this has for a stage; a CPU's target is that of all CPUs of its kind."""
    from mlcpipe import devices
    from mlcpipe.compiler.stage_plan import gb_s_of, room_of

    found = devices.choose(device or _CPU)
    if target is None and found.on_host:
        target = DEFAULT_TARGET
    return replace(room_of(found.spec, target, limit, gb_s_of), spec=machine.address, memory=machine.node)


def prepare_there(options: ServeOptions, rooms: Sequence[Room], counts: Sequence[int]) -> str:
    """The folder of the bundle on the machine that calls this, which downloads and compiles the checkpoint."""
    return str(_bundle(options, rooms, counts, SilentProgress()))


def _bundle(options: ServeOptions, rooms: Sequence[Room], counts: Sequence[int], progress: Progress) -> Path:
    """A bundle as it is given, or a checkpoint compiled for `rooms`, with a stage for each."""
    if not rooms:
        asked = replace(options, stages=None)
    else:
        stages = None if len(counts) == 1 else ",".join(map(str, counts))
        # Not the devices: they are those of the rooms.
        device = ",".join(_CPU for _ in rooms)
        asked = replace(options, device=device, stages=stages, target=None, device_memory_bytes=None)
    return prepare(asked, partial(prepare_bundle, rooms=rooms or None, progress=progress)).own


def seats_for(options: ServeOptions, counts: Sequence[int]) -> tuple[Path, list[Seat]]:
    """The bundle on this machine, and where each of its stages runs.

    Raises ResourceError where no machine has a stage, or its memory does not hold it.
    """
    from mlcpipe.bundle import read_manifest
    from mlcpipe.bundle.stages import weights_digest
    from mlcpipe.server.ray_cluster import ask, machines_for
    from mlcpipe.server.ray_links import Seat
    from mlcpipe.server.stage_places import assigned, check_versions, look_for, nowhere

    stages = count_of(counts)
    specs, machines = devices_of(options, stages), machines_for(stages)
    rooms: list[Room] = []
    given = bundle_of(options.first)
    if given is None:
        machines = machines[:stages]
        targets = [None] * stages if options.target is None else options.target.split(",")
        if len(targets) not in (1, stages):
            expected = f"one target, or one for each of {stages} stages"
            raise UsageError("--target", expected=expected, found=options.target)
        targets = targets if len(targets) == stages else targets * stages
        asked = [(*each, options.device_memory_bytes) for each in zip(machines, specs, targets)]
        rooms = ask(machines, room_there, asked)
    with console_progress(stderr_console()) as progress:
        own = _bundle(options, rooms, counts, progress)
    manifest = read_manifest(own)
    check_cut(manifest, counts, own)
    digest = weights_digest(manifest)
    found: list[Found] = ask(machines, look_for, [(str(own), digest)] * len(machines))
    check_versions(machines, found)
    chosen = assigned(stages, found)
    if chosen is None and given is None:
        folders = ask(machines, prepare_there, [(options, rooms, _counts_of(manifest, own))] * stages)
        found = ask(machines, look_for, [(folder, digest) for folder in folders])
        chosen = assigned(stages, found)
    if chosen is None:
        raise nowhere(manifest.stages, machines, found, own)
    return own, [
        Seat(machines[index].node, machines[index].address, found[index].folder, spec, name.removeprefix("layers-"))
        for index, spec, name in zip(chosen, specs, manifest.stages)
    ]


def _counts_of(manifest: Manifest, folder: Path) -> list[int]:
    from mlcpipe.bundle.stages import read_parts, stage_of

    stages = [stage_of(part.manifest) for part in read_parts(folder, manifest)]
    return [one.end - one.begin for one in stages if one is not None]


def load_last(
    options: ServeOptions, seats: Sequence[Seat], group: PlacementGroup, names: tuple[str, ...], texts: Sequence[str],
    namespaces: set[str],
) -> Loaded:  # fmt: skip
    """In the process of the last stage: all stages, and the engine."""
    from mlcpipe.server.ray_links import open_stages

    last = seats[-1]
    bundles = Bundles(Path(last.folder), None, None, last.device)
    opened = partial(open_stages, seats, group, options.context, options.threads)
    return load(options, bundles, names, texts, namespaces, opened=opened)


def serve_stages(
    bound: Sequence[socket.socket],
    options: ServeOptions,
    texts: Sequence[str],
    rules: Rules,
    namespaces: set[str],
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or Ctrl-C; `ready` gets the model's name when all stages are loaded."""
    from mlcpipe.server.ray_cluster import joined_ray
    from mlcpipe.server.ray_links import reserved
    from mlcpipe.server.ray_stages import StagedServer
    from mlcpipe.server.replicas import create_front
    from mlcpipe.server.run import serve

    counts = stages_of(options.stages) or ()
    count_of(counts)
    with joined_ray():
        own, seats = seats_for(options, counts)
        names = (options.name or name_of(options.first, manifest_of(own)), *(options.alias or ()))
        for seat in seats:
            say(stderr_console(), f"layers {seat.layers} on {seat.address}, {seat.folder}")
        loads = partial(load_last, options, seats, reserved(seats), names, texts, namespaces)

        def told(server: Any) -> None:
            ready(names[0])

        serve(bound, partial(StagedServer, loads, seats[-1]), rules, told, float(options.drain), create_front)
