"""The stages of a checkpoint on this machine's devices: a later start takes the same cut while it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from mlcpipe.bundle.stages import counts_of
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.compiler.automatic import Place
from mlcpipe.compiler.stage_plan import Room, StagePlan, gb_s_of, plan_stages, room_of
from mlcpipe.errors import ConfigError, MlcpipeError, ResourceError
from mlcpipe.quantization.recipe import QuantizationRecipe
from mlcpipe.support.atomic import atomic_write
from mlcpipe.support.env import env
from mlcpipe.support.private import private_folder

_SLOWER = 1.1  # than a new plan: as much slower may a kept one be


class Asked(Protocol):
    """The arguments of `prepare_bundle` that a plan follows."""

    @property
    def kv_cache_dtype(self) -> str: ...

    @property
    def context(self) -> int | None: ...

    @property
    def stages(self) -> Sequence[int] | None: ...

    @property
    def device_memory_bytes(self) -> int | None: ...

    @property
    def rooms(self) -> Sequence[Room] | None: ...


def planned(
    place: Place,
    checkpoint: Checkpoint,
    quantization: str | QuantizationRecipe,
    asked: Asked,
    key: Callable[[str], str],
) -> Place:
    """The place with its stages, or on one device where that holds the whole model.

    One device is then the only one of `devices`. `auto` takes the CPU alone where the model cannot be cut; its reason
    for stages is in `why`. `key` names a file of the cache for these devices. With `rooms`, those of other machines,
    each has a stage. Raises what `plan_stages` raises.
    """
    machines = asked.rooms is not None
    rooms = asked.rooms or [
        room_of(spec, target, asked.device_memory_bytes, gb_s_of)
        for spec, target in zip(place.devices, place.target.split(","))
    ]

    def made(counts: Sequence[int] | None) -> StagePlan:
        return plan_stages(checkpoint, rooms, quantization, asked.kv_cache_dtype, asked.context, counts, even=machines)

    try:
        found = made(asked.stages)
    except (ConfigError, ResourceError) as error:
        if not place.why:
            raise
        return Place(rooms[-1].target, f"{place.why}; in stages: {error.what}", True)
    if len(found.stages) == 1:
        room = found.stages[0].room
        return replace(place, target=room.target, devices=(room.spec,))
    path = env().cache_dir / "stages" / key("machines" if machines else "stages")
    if asked.stages is None:
        with suppress(MlcpipeError, OSError, UnicodeDecodeError):
            kept = made(counts_of(path.read_text(encoding="utf-8")[:1000]))
            found = kept if kept.token_s <= _SLOWER * found.token_s else found
        with suppress(MlcpipeError, OSError):
            atomic_write(private_folder(path.parent) / path.name, ",".join(map(str, found.counts)).encode())
    return replace(place, stages=found.counts)
