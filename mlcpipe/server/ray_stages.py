"""`mlcpipe serve --ray 1 --stages N`: this process listens, and passes requests to the actor of the last stage.

That one has the engine, and starts the other stages: `ray_links.py`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.remote.lane import StageLostError
from mlcpipe.server.ray_links import Seat, lost
from mlcpipe.server.replicas import Answering, Asked, Replicas

_HEALTH_S = 2.0
_STARTS_S = 1800.0  # weights of tens of gigabytes may come from a slow disk
_METRICS_S = 5.0


class LastStage(Answering):
    """The actor with the last stage and the engine."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._starting: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Load the model if nobody has asked for that; return when it is loaded."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self.begin(self._load))
        await asyncio.shield(self._starting)

    async def health(self) -> None:
        """Raises if the model does not load, or the engine failed."""
        await self.start()
        self.check_health()

    async def metrics(self) -> bytes:
        """Its metrics in Prometheus's text format."""
        await self.start()
        return self.text_of_metrics()

    async def answer(self, asked: Asked) -> AsyncIterator[list[dict[str, Any]]]:
        """As `Answering.answer`, once the model is loaded."""
        await self.start()
        async for messages in super().answer(asked):
            yield messages


class _Messages:
    """A response of the actor: lists of ASGI's messages."""

    def __init__(self, actor: Any, asked: Asked) -> None:
        self._messages = actor.answer.options(num_returns="streaming").remote(asked)

    async def __aiter__(self) -> AsyncIterator[list[dict[str, Any]]]:
        async for message in self._messages:
            yield await message

    def cancel(self) -> None:
        """End the response."""
        ray.cancel(self._messages)


class StagedServer(Replicas):
    """A running model in stages, as a server's service."""

    ended = ("the machine that computed the answer ended", "stage_ended")

    def __init__(self, load: Callable[[], Any], seat: Seat) -> None:
        """Start the stages, the last one in `seat`, and wait until they are loaded. Raises what they raise."""
        self._running = set()
        self._closing = False
        self._seat, self._end_watch, self._works = seat, threading.Event(), True
        options = {"num_cpus": 1, "max_restarts": -1, "label_selector": seat.labels}
        self._actor = ray.remote(LastStage).options(**options).remote(load)
        try:
            ray.get(self._actor.start.remote())
        except RayError as error:
            raise lost(seat.name, error) from None
        threading.Thread(target=self._watch, name="mlcpipe-stages", daemon=True).start()

    def pool(self) -> StagedServer:
        """Return self; called inside the event loop."""
        self._loop = asyncio.get_running_loop()
        return self

    def healthy(self) -> int:
        """1 if the stages answer requests, 0 while they start again."""
        return int(self._works)

    def metrics(self) -> bytes:
        """Metrics of the engine."""
        text: bytes = ray.get(self._actor.metrics.remote(), timeout=_METRICS_S)
        return text

    def answer(self, asked: Asked) -> _Messages:
        """As `Replicas.answer`."""
        return _Messages(self._actor, asked)

    def close(self, drain_s: float = 0.0) -> None:
        """As `Replicas.close`; the actors end with this process."""
        self._end_watch.set()
        super().close(drain_s)

    def _watch(self) -> None:
        """Restart the last stage after its engine failed. One whose process ended is restarted by Ray."""
        while not self._end_watch.wait(_HEALTH_S):
            try:
                ray.get(self._actor.health.remote(), timeout=_STARTS_S)
                self._works = True
            except GetTimeoutError:
                self._restart(StageLostError(f"{self._seat.name} does not answer", found=f"nothing for {_STARTS_S} s"))
            except RayTaskError as error:
                self._restart(lost(self._seat.name, error))
            except RayError:
                self._works = False

    def _restart(self, error: MlcpipeError) -> None:
        if self._works and not self._end_watch.is_set():
            sys.stderr.write(f"error: {error}; the stages start again\n")
        self._works = False
        ray.kill(self._actor, no_restart=False)
