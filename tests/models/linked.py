"""Stages behind links, each with its own worker and files, in this process: what Ray's actors are elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.loading import LoadedBundle
from mlcpipe.runtime.remote.lane import Place, Rows, StageLostError
from mlcpipe.runtime.remote.opening import open_with_stages
from mlcpipe.runtime.remote.worker import StageWorker


class Here:
    """A link to a stage of a bundle in `folder`. `before(method, arguments)` sees every call; `end` replaces its worker.

    A `silent` one answers no call, as a process that hangs.
    """

    def __init__(self, folder: Path, index: int, after: Here | None = None) -> None:
        self.name, self.after, self.before = f"stage {index}", after, self._seen
        self._make: Callable[[], StageWorker] = lambda: StageWorker(
            folder, index, None, self.name, None if after is None else after.feed
        )
        self.worker, self.ends, self.calls, self.silent = self._make(), 0, [], False
        self._threads = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    def _seen(self, method: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(method if method != "call" else arguments[1])

    def feed(self, place: Place, rows: Rows) -> None:
        """The rows of the stage before."""
        self.worker.feed(place, rows)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """As `Link.call`."""
        failed: Future[Any] = Future()
        try:
            self.before(method, arguments)
            if self.silent:
                return failed  # which nothing ends
            if method == "ping":
                failed.set_result(None)
                return failed
            if method == "call":
                return self.worker.call(*arguments)
            return self._threads.submit(getattr(self.worker, method), *arguments)
        except MlcpipeError as error:
            failed.set_exception(error)
            return failed

    def end(self) -> None:
        """Lose the worker with all that it has; another one, which has loaded nothing, takes its place."""
        with self._lock:
            before, self.worker, self.ends = self.worker, self._make(), self.ends + 1
            self.silent = False
        threading.Thread(target=before.close, daemon=True).start()

    def lost(self) -> StageLostError:
        """The error of a call whose process has ended."""
        return StageLostError(f"{self.name} ended", next_step="send the request again")


def links_of(*folders: Path) -> list[Here]:
    """Links to the stages before the last, each with its folder."""
    links: list[Here] = []
    for index in reversed(range(len(folders))):
        links.insert(0, Here(folders[index], index, links[0] if links else None))
    return links


def opened(bundle: Path, context: int = 256) -> tuple[LoadedBundle, list[Here]]:
    """A bundle in three stages, of which the last is here and the others are behind links."""
    links = links_of(bundle, bundle)
    return open_with_stages(bundle, links, context, 1), links
