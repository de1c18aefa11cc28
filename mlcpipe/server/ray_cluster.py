"""This process in a Ray cluster: its machines, and functions that they call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mlcpipe.errors import MlcpipeError, ResourceError, UsageError, last_line
from mlcpipe.server.stage_places import Machine
from mlcpipe.version import __version__

_ASK_S = 1800.0  # a machine may download and compile
T = TypeVar("T")


@contextmanager
def joined_ray() -> Iterator[None]:
    """Inside, this process is one of the cluster that RAY_ADDRESS names, or that this machine is in.

    Raises UsageError where there is none.
    """
    try:
        ray.init("auto", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RayError, RuntimeError) as error:
        raise UsageError(
            "--ray with --stages", expected="a Ray cluster that this machine is in", found=last_line(error),
            next_step="type `ray start --head` here and `ray start --address=HOST:6379` on the other machines",
        ) from None  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def machines_for(stages: int) -> list[Machine]:
    """The machines that may have stages, this one where the last stage is. Raises UsageError if there are too few."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if len(alive) < stages:
        raise UsageError(
            "--stages", expected=f"{stages} machines in the Ray cluster, with a CPU of Ray each", found=len(alive),
            next_step="type `ray start --address=HOST:6379` on another machine, or take fewer stages",
        )  # fmt: skip
    alive.sort(key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    own = [node for node in alive if node["NodeID"] == here]
    others = [node for node in alive if node["NodeID"] != here]
    before = stages - len(own)
    ordered = [*others[:before], *own, *others[before:]]
    return [Machine(node["NodeID"], node["NodeManagerAddress"]) for node in ordered]


def ask(machines: Sequence[Machine], function: Callable[..., T], each: Sequence[tuple[object, ...]]) -> list[T]:
    """The results of a function of mlcpipe, called on all machines at the same time, with `each` one's arguments.

    Raises the first error, with the name of its machine.
    """
    asked = [
        ray.remote(function)
        .options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(one.node, soft=False))
        .remote(*arguments)
        for one, arguments in zip(machines, each)
    ]
    results = []
    for machine, one in zip(machines, asked):
        try:
            results.append(ray.get(one, timeout=_ASK_S))
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, MlcpipeError):
                cause.relocate(f"{machine.address}{f', {cause.where}' if cause.where else ''}")
                raise cause from None
            raise _unusable(machine, cause) from None
        except (GetTimeoutError, RayError) as error:
            raise _unusable(machine, error) from None
    return results


def _unusable(machine: Machine, error: Any) -> ResourceError:
    return ResourceError(
        "a machine of the Ray cluster cannot be used", where=machine.address,
        expected=f"mlcpipe {__version__} in the environment that `ray start` was typed in", found=last_line(error),
    )  # fmt: skip
