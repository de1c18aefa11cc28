"""`mlcpipe inspect` of stages: a plan for devices, and what a bundle in stages has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlcpipe.cli.options import stages_of
from mlcpipe.cli.terminal import cell, new_table, print_json, say, stderr_console, stdout_console
from mlcpipe.errors import UsageError, naming
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import bundle_of
from mlcpipe.support.defaults import AUTO
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe.bundle import Manifest
    from mlcpipe.bundle.stages import Part
    from mlcpipe.compiler.stage_plan import StagePlan


def print_plan(
    model: str,
    devices: str,
    stages: str | None,
    quantization: str | None,
    limit: int | None,
    context: int | None,
    others: Sequence[object],
    *,
    as_json: bool,
) -> None:
    """Print a plan as a table or JSON. `others` are options that --devices excludes, true where they were given."""
    counts = stages_of(stages)
    if any(others):
        expected = "--stages, --device-memory-bytes, --quantization, --context and --json"
        raise UsageError("--devices plans stages alone", expected=expected)
    if bundle_of(model) is not None:
        raise UsageError(
            "--devices is for checkpoints", found="a bundle, which is cut already", next_step="leave it out"
        )
    from mlcpipe.checkpoint import open_checkpoint, resolve
    from mlcpipe.compiler.stage_plan import described, gb_s_of, plan_stages, room_of

    rooms = [room_of(spec, None, limit, gb_s_of) for spec in devices.split(",")]
    with console_progress(stderr_console(), lasting=False) as progress:
        path = resolve(model, progress)
    with naming(model, path):
        checkpoint = open_checkpoint(path)
        found = plan_stages(checkpoint, rooms, checkpoint.quantization(quantization), AUTO, context, counts)
    if as_json:
        print_json(
            {
                "stages": described(found),
                "context": found.context,
                "row_bytes": found.row_bytes,
                "token_s": found.token_s,
            }
        )
    else:
        _show(found)


def _show(found: StagePlan) -> None:
    console = stdout_console()
    table = new_table(
        "device", "layers", "weights", f"states of {found.context} tokens", "the rest", "free", "GB/s", "token"
    )
    for stage in found.stages:
        room, layers = stage.room, stage.layers
        words = f"{'experts of ' if stage.alone else ''}{layers.start} to {layers.stop - 1}"
        table.add_row(*map(cell, (
            room.spec, words, byte_size(stage.cost.weights),
            byte_size(stage.cost.states), byte_size(stage.running), byte_size(room.free), f"{room.gb_s:.1f}",
            f"{1e3 * stage.token_s:.2f} ms",
        )))  # fmt: skip
    console.print(table)
    apart = found.stages[-1].alone
    borders = len(found.stages) - 1 - apart
    crossed = "one device holds the whole model" if not apart else ""
    if borders:
        crossed = f"{byte_size(found.row_bytes)} a token cross {'the border' if borders == 1 else 'each border'}"
    if apart:
        there = f"{byte_size(found.row_bytes)} a token cross to the experts of each layer, and back"
        crossed = f"{crossed}, {there}" if crossed else there
    say(console, f"\na token takes at least {1e3 * found.token_s:.2f} ms; {crossed}")
    if len(found.stages) > 1:
        counts = ",".join(map(str, found.counts))
        say(console, f"\nNow type:  mlcpipe compile MODEL --target {found.targets} --stages {counts} -o BUNDLE")


def print_stages(console: Console, manifest: Manifest, parts: Sequence[Part]) -> None:
    """A row of each stage of a bundle: its target, and its memory for the whole context."""
    from mlcpipe.bundle.memory import one_sequence, running_bytes
    from mlcpipe.bundle.stages import has_experts_alone

    context = manifest.model.context_length
    units = one_sequence(manifest, context)
    table = new_table(
        "stage", "target", "variants", "weights", "states of a full context", "other memory", whole="stage"
    )
    for part in parts:
        own = part.manifest
        states = units.nbytes(manifest.states, own.states)
        variants = " ".join(variant.name for variant in own.target.variants)
        sizes = (own.memory_plan.weights_bytes, states, running_bytes(own))
        table.add_row(*map(cell, (part.folder.name, own.target.name, variants, *map(byte_size, sizes))))
    say(console, "\nstages")
    console.print(table)
    row = byte_size(4 * manifest.model.hidden_size)
    if has_experts_alone(parts[-1]):
        row = f"to the experts of each layer, and back, {row} a token;  {row}"
    say(console, f"{row} a token cross each border  (--kernels and --params show those of each stage)")
