"""`mlcpipe serve --ray`: several processes of one server."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.host.versions import package_version
from mlcpipe.loading import engine_device
from mlcpipe.support.env import env, join_ray, keep_ray_here
from mlcpipe.version import RAY

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.server.guard import Rules


def check_ray(alone: Mapping[str, object] = MappingProxyType({}), *, joins: bool = False) -> None:
    """Raises UsageError without the packages or with another Ray, and for an option that needs a single process: one of
    `alone`, by name, that was given.

    `joins`: the processes are those of a cluster, not of this machine.
    """
    given = next((name for name, value in alone.items() if value), None)
    if given is not None:
        expected = "options that models in stages have" if joins else "options of all replicas"
        raise UsageError("--ray with --stages" if joins else "--ray", expected=expected, found=f"--{given}")
    if joins:
        join_ray()
    else:
        keep_ray_here()
    installed = package_version("ray")
    if installed is not None and not installed.startswith(f"{RAY}."):
        raise UsageError(
            "--ray needs another version of Ray", expected=RAY, found=installed, next_step="pip install 'mlcpipe[ray]'"
        )
    try:
        import mlcpipe.server.replicas  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--ray needs more packages", found=f"no {error.name}", next_step="pip install 'mlcpipe[ray]'"
        ) from None


def threads_of_each(replicas: int, threads: int | None) -> int:
    """The default number of threads per replica: its share of the cores."""
    from mlcpipe.devices.support.threads import physical_cores

    return threads or env().threads or max(1, physical_cores() // replicas)


def check_on_host(manifest: Manifest, device: str) -> None:
    """Raises UsageError if the bundle runs on a GPU, which replicas would have to share."""
    from mlcpipe.devices import open_device

    found = open_device(manifest.target.variants[0], engine_device(device))
    if not found.on_host:
        raise UsageError("--ray", expected="a model on the CPU", found=found.description)


def serve_replicas(
    bound: Sequence[socket.socket],
    load: Callable[[], Any],
    rules: Rules,
    count: int,
    drain_s: float,
    says: str,
    *,
    embeds: bool,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `says` is the line to print when all replicas are loaded."""
    from mlcpipe.server.replicas import Replicas, create_front, running_ray
    from mlcpipe.server.run import serve

    def ready(loaded: Replicas) -> None:
        say(stderr_console(), says)

    with running_ray():
        serve(bound, partial(Replicas, load, count, drain_s, embeds=embeds), rules, ready, drain_s, create_front)
