"""Stages as actors of a Ray cluster, each with its own part of the bundle, from the disk of its machine.

The process of the last stage starts the others, in a placement group. Hidden rows go from actor to actor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import NODE_ID_LABEL_KEY, PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mlcpipe.errors import ComputeError, MlcpipeError, ResourceError, last_line
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.remote.lane import Place, Rows, StageLostError
from mlcpipe.runtime.remote.opening import open_with_stages
from mlcpipe.runtime.remote.worker import StageWorker

_PLACED_S = 60.0  # until Ray has reserved a place on each machine


@dataclass(frozen=True)
class Seat:
    """Where a stage runs: Ray's name of the machine, its address for people, the bundle's folder and the device there.

    `layers` are those of the stage, for people.
    """

    node: str
    address: str
    folder: str
    device: str | None
    layers: str

    @property
    def labels(self) -> dict[str, str]:
        """What Ray chooses the machine by."""
        return {NODE_ID_LABEL_KEY: self.node}

    @property
    def name(self) -> str:
        """The stage for people."""
        return f"the stage of layers {self.layers} on {self.address}"


class StageProcess:
    """An actor with a stage that gives its rows to the next one."""

    def __init__(self, seat: Seat, index: int, after: Any, next_name: str) -> None:
        self._next_name = next_name

        def feed(place: Place, rows: Rows) -> Any:
            return after.feed.remote(place, rows)

        self._worker = StageWorker(
            Path(seat.folder), index, seat.device, seat.name, None if after is None else feed
        )  # fmt: skip

    async def run(self, method: str, arguments: Sequence[Any]) -> Any:
        """The result of a method of `StageWorker`; of `ping`, that this process answers."""
        if method == "ping":
            return None
        if method != "call":
            return await asyncio.to_thread(getattr(self._worker, method), *arguments)
        result = await asyncio.wrap_future(self._worker.call(*arguments))
        if not isinstance(result, ray.ObjectRef):
            return result
        try:
            return await result  # the next stage has the rows
        except RayError as error:
            raise lost(self._next_name, error) from None

    async def feed(self, place: Place, rows: Rows) -> None:
        """The rows of the stage before."""
        self._worker.feed(place, rows)


class RayLink:
    """A stage's actor, as the last stage calls it."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self.name = actor, name

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """As `Link.call`."""
        done: Future[Any] = Future()
        try:
            self._actor.run.remote(method, arguments).future().add_done_callback(partial(_pass_on, done, self.name))
        except RayError as error:
            done.set_exception(lost(self.name, error))
        return done

    def end(self) -> None:
        """As `Link.end`."""
        ray.kill(self._actor, no_restart=False)


def _pass_on(done: Future[Any], name: str, came: Future[Any]) -> None:
    """Give a result of Ray, or its error in words."""
    try:
        done.set_result(came.result())
    except RayError as error:
        done.set_exception(lost(name, error))
    except Exception as error:
        done.set_exception(ComputeError(f"{name} failed", found=last_line(error)))


def lost(name: str, error: RayError) -> MlcpipeError:
    """The error of mlcpipe for one of Ray: what a method raised, or that its process is gone."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, MlcpipeError) else ComputeError(f"{name} failed", found=last_line(cause))
    return StageLostError(f"{name} ended", found=type(error).__name__, next_step="send the request again")


def reserved(seats: Sequence[Seat]) -> PlacementGroup:
    """Places of Ray for all stages but the last, each on its machine, also for their later starts.

    Raises ResourceError where Ray finds none.
    """
    others = seats[:-1]
    group = placement_group(
        [{"CPU": 1}] * len(others), "STRICT_SPREAD", bundle_label_selector=[seat.labels for seat in others]
    )
    if not group.wait(_PLACED_S):
        raise ResourceError(
            "Ray finds no place for the stages", where=", ".join(seat.address for seat in others),
            expected="a free CPU of Ray on each", found=f"none within {_PLACED_S:.0f} s",
            next_step="`ray status` shows what takes them",
        )  # fmt: skip
    return group


def open_stages(
    seats: Sequence[Seat], group: PlacementGroup, context_length: int | None, threads: int | None
) -> LoadedBundle:
    """The model with its last stage here, and the others in actors that this process starts and that end with it.

    Raises what `open_with_stages` raises.
    """
    *others, last = seats
    links: list[RayLink] = []
    after, names = None, [seat.name for seat in seats]
    for index, seat in reversed([*enumerate(others)]):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = {"num_cpus": 1, "max_restarts": -1, "scheduling_strategy": strategy}
        after = ray.remote(StageProcess).options(**options).remote(seat, index, after, names[index + 1])
        links.insert(0, RayLink(after, seat.name))
    return open_with_stages(Path(last.folder), links, context_length, threads, last.device)
