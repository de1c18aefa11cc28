"""Responses that are computed in the background, while nobody waits: got again, followed as a stream, cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from mlcpipe.server.answers import Answers
from mlcpipe.server.errors import ApiError
from mlcpipe.server.guard import MAX_BODY_BYTES

MAX_RUNS = 64  # of all clients, that have not ended
MAX_INPUT_BYTES = 4 * MAX_BODY_BYTES  # of their requests together, which are held until they end
MAX_ENDED = 16  # whose events are kept for those who come later
MAX_EVENT_CHARS = 4 << 20  # of the events of one response; the first ones leave
_log = logging.getLogger("mlcpipe.server")
Response = dict[str, Any]


class Run:
    """One response in the background. `response` is as it is now; `ended` says that it does not change any more;
    `nbytes` has the JSON that it continues and answers.
    """

    def __init__(self, owner: str, frame: Response, nbytes: int = 0, *, streams: bool) -> None:
        self.nbytes = nbytes
        self.owner, self.response, self.ended, self.streams = owner, {**frame, "status": "queued"}, False, streams
        self._events: deque[str] = deque()
        self._first = self._chars = 0  # the number of the first event that is kept
        self._news = asyncio.Event()
        self._answers: Answers | None = None
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False

    def start(
        self,
        answers: Answers,
        events: AsyncIterator[str],
        failed: Callable[[ApiError, str], Awaitable[str]],
        leases: AsyncExitStack,
    ) -> None:
        """Compute it: `events` are those of its stream, `failed` is told an error and the status and gives the last
        event, `leases` are held until the end.
        """
        self._answers = answers
        self.response["status"] = "in_progress"
        self._task = asyncio.get_running_loop().create_task(self._run(events, failed, leases))

    async def _run(
        self, events: AsyncIterator[str], failed: Callable[[ApiError, str], Awaitable[str]], leases: AsyncExitStack
    ) -> None:
        assert self._answers is not None
        async with leases:
            try:
                async for text in events:
                    self._add(text)
            except asyncio.CancelledError:
                if not self._cancelled:
                    raise
                self._add(await failed(ApiError(499, "the response was cancelled"), "cancelled"))
            except ApiError as error:
                self._add(await failed(error, "failed"))
            except Exception:
                _log.exception("a response in the background failed")
                self._add(await failed(ApiError(500, "the server failed; its log says why"), "failed"))
            finally:
                self._answers.close()
                self._answers, self.ended = None, True
                self._tell()

    async def cancel(self) -> None:
        """End it, if it has not ended."""
        if self._task is not None and not self._task.done():
            if not self._cancelled:
                self._cancelled = True
                self._task.cancel()
            await asyncio.wait({self._task})

    async def follow(self, after: int = -1) -> AsyncIterator[str]:
        """The events after the one of this number, until the last. Raises ApiError for those that are gone."""
        place = after + 1
        while True:
            news = self._news
            if place < self._first:
                raise ApiError(400, f"starting_after: the events before {self._first} are gone", param="starting_after")
            while place < self._first + len(self._events):
                yield self._events[place - self._first]
                place += 1
                if place < self._first:
                    break
            else:
                if self.ended:
                    return
                if news is self._news:
                    await news.wait()

    def _add(self, text: str) -> None:
        if not self.streams:
            return
        self._events.append(text)
        self._chars += len(text)
        while self._chars > MAX_EVENT_CHARS and len(self._events) > 1:
            self._chars -= len(self._events.popleft())
            self._first += 1
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Runs:
    """The responses of a server in the background, by owner and id; those that have ended are in the store too.

    `offered` is false where later requests may come to another process.
    """

    def __init__(self, *, offered: bool = True) -> None:
        self._offered = offered
        self._kept: OrderedDict[tuple[str, str], Run] = OrderedDict()

    def check(self, owner: str, most_of_owner: int | None, nbytes: int = 0) -> None:
        """Raises ApiError where too many run already, of this owner or of all, or they hold too much for `nbytes` more,
        and where none is offered.
        """
        if not self._offered:
            message = "background: not offered with --ray; leave it out"
            raise ApiError(400, message, param="background", code="unsupported_parameter")
        running = [run for run in self._kept.values() if not run.ended]
        own = sum(run.owner == owner for run in running)
        if most_of_owner is not None and own >= most_of_owner:
            message = f"{own} responses of this key are computed in the background already"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=5.0)
        if len(running) >= MAX_RUNS:
            message = f"{len(running)} responses are computed in the background already"
            raise ApiError(503, message, code="overloaded", retry_after_s=5.0)
        held = sum(run.nbytes for run in running)
        if running and held + nbytes > MAX_INPUT_BYTES:
            message = f"requests of {held} bytes are answered in the background, of at most {MAX_INPUT_BYTES}"
            raise ApiError(503, message, code="overloaded", retry_after_s=5.0)

    def add(self, run: Run) -> None:
        """Keep one that begins; the oldest of those that have ended leave."""
        ended = [place for place, one in self._kept.items() if one.ended]
        for place in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
            del self._kept[place]
        self._kept[run.owner, run.response["id"]] = run

    def find(self, owner: str, name: str) -> Run | None:
        """One by its id, None for one that is not kept."""
        return self._kept.get((owner, name))

    def forget(self, owner: str, name: str) -> None:
        """Keep it no more."""
        self._kept.pop((owner, name), None)
