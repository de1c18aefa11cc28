"""The models of a server: loaded when a request names them, unloaded when idle or when another needs the memory.

Each model is in one of five states. A request holds a lease of its model from before its first work until its response
is complete; a leased model is never unloaded. One model is loaded at a time. What has to leave for it is chosen by last
use: idle models first, then busy ones, which take no more requests and leave when theirs are answered. So a model that
always has requests cannot keep another out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from mlcpipe.errors import MlcpipeError
from mlcpipe.host.finding import byte_size
from mlcpipe.server.errors import ApiError
from mlcpipe.server.load_report import LoadReport
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.off_loop import OffLoop
from mlcpipe.server.pooled_model import MAKES, Kind, LoadedSource, Model, ModelSource, Room, State, check_kind

_T = TypeVar("_T")
_log = logging.getLogger("mlcpipe.server")
RETRY_S = 10.0  # from a failed load to the next attempt
WAIT_S = 600.0  # that a request waits for its model
MAX_WAITING = 64  # requests that wait for one model


class ModelPool(OffLoop):
    """All models of a server; made inside the event loop, where all methods run.

    capacity     bytes that models may take of a place
    ttl_s        seconds without a request after which a model is unloaded, None for never
    max_waiting  requests that may wait for one model
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        capacity: Callable[[str], int],
        *,
        pinned: Sequence[str] = (),
        ttl_s: float | None = None,
        max_waiting: int = MAX_WAITING,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.models = [Model(one, pinned=any(name in pinned for name in one.names), ttl_s=ttl_s) for one in sources]
        self.metrics = Metrics(None)
        self.single, self.ttl_s = False, ttl_s
        self._capacity, self._max_waiting, self._wait_s, self._clock = capacity, max_waiting, wait_s, clock
        self._loop = asyncio.get_running_loop()
        self._loading = asyncio.Lock()
        self._watchers: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._preloading: set[Model] = set()
        self._closing = False

    @classmethod
    def of(cls, service: Any) -> ModelPool:
        """A pool of one model that is loaded already, and stays."""
        pool = cls([LoadedSource(service)], lambda place: 0)
        (model,) = pool.models
        model.service, model.state, model.pinned, pool.single = service, "ready", True, True
        pool.metrics = service.metrics
        return pool

    # What other parts of the server use.

    def names(self) -> list[str]:
        """The first name of each model."""
        return [model.name for model in self.models]

    def state(self, name: str) -> State:
        """The state of a model. Raises ApiError for an unknown one."""
        return self.find(name).state

    @asynccontextmanager
    async def lease(self, name: str | None, kind: Kind | None = None) -> AsyncIterator[Any]:
        """The service of a model, loaded if necessary, which stays loaded inside. Take no second lease inside.

        None is the first model of this `kind`. Raises ApiError: 404 for an unknown model, 400 for one of another kind,
        503 if it does not load, or too many requests wait for it already.
        """
        model = self.find(name, kind)
        service = await self._leased(model, self._wait_s)
        try:
            if kind is not None:
                check_kind(model, kind)  # known by now
            yield service
        finally:
            self._release(model)

    async def unload(self, name: str) -> None:
        """Unload a model once its requests are answered; nothing to do for one that is not loaded.

        Raises ApiError for an unknown or a pinned one.
        """
        model = self.find(name)
        if model.pinned:
            raise ApiError(400, f"the model {model.name!r} is pinned and stays loaded", param="model")
        while model.state in ("loading", "unloading"):
            await self._change()
        if model.state == "ready":
            await self._unload([model])

    def preload(self, name: str) -> None:
        """Begin to load a model, however long that takes, without a request that waits. Raises ApiError."""
        model = self.find(name)
        if model in self._preloading:
            return

        async def loaded() -> None:
            with contextlib.suppress(ApiError):  # which is in the log
                await self._leased(model, None)
                self._release(model)

        self._preloading.add(model)  # once, however often it is asked for: places of requests that wait are few
        self._start(loaded()).add_done_callback(lambda _: self._preloading.discard(model))

    def set_ttl(self, name: str, seconds: float | None) -> None:
        """Unload a model so many seconds after the running request, unless another one follows; None is never."""
        model = self.find(name)
        model.ttl_s = seconds
        self._schedule(model)

    def find(self, name: str | None, kind: Kind | None = None) -> Model:
        """The model of a name, of one of its adapters or of "*", or the first one of this `kind`. Raises ApiError."""
        if name is None:
            return self._first(kind)
        found = next((one for one in self.models if one.answers_to(name)), None)
        if found is None:
            found = next((one for one in self.models if "*" in one.source.names and one.kind in (kind, None)), None)
        if found is None:
            known = ", ".join(one for model in self.models for one in (*model.source.names, *model.adapter_names))
            message = f"the model {name[:100]!r} is not served here; expected {known}"
            raise ApiError(404, message, code="model_not_found", param="model")
        if kind is not None and not self.single:
            check_kind(found, kind)
        return found

    def _first(self, kind: Kind | None) -> Model:
        if self.models and (self.single or kind is None):
            return self.models[0]
        unknown = [one for one in self.models if one.kind is None]
        of_kind = [one for one in self.models if (one.kind or one.source.guess) == kind]
        found = of_kind or (unknown if kind == "rerank" else [])
        if not found:
            message = f"no model is served here{f' that {MAKES[kind]}' if kind is not None else ''}"
            raise ApiError(404, message, code="model_not_found", param="model")
        return found[0]

    # Leases.

    async def _leased(self, model: Model, wait_s: float | None) -> Any:
        """The service, once it is loaded, with one more lease. A load continues when `wait_s` are over."""
        self._check_open()
        if model.state == "ready" and _fault(model) and not self.single:
            self._begin_unload([model])
        if model.state == "ready":
            self._take(model)
            return model.service
        if model.state == "failed" and self._clock() < model.failed_s + RETRY_S:
            assert model.failure is not None
            raise model.failure.again()
        if len(model.waiting) >= self._max_waiting:
            message = f"{len(model.waiting)} requests wait for the model {model.name!r}: {model.report.words}"
            raise ApiError(503, message, code="overloaded", retry_after_s=5.0)
        granted: asyncio.Future[Any] = self._loop.create_future()
        model.waiting.append(granted)
        if model.state in ("unloaded", "failed"):
            self._begin(model)
        try:
            await asyncio.wait({granted}, timeout=wait_s)
        except BaseException:
            self._leave(model, granted)
            raise
        if not granted.done():
            model.committed = True
            self._leave(model, granted)
            message = f"the model {model.name!r} is not loaded after {wait_s:.0f} s: {model.report.words}"
            raise ApiError(503, message, code="overloaded", retry_after_s=10.0)
        return granted.result()

    def _take(self, model: Model) -> None:
        model.leases, model.used_s, model.ttl_s = model.leases + 1, self._clock(), self.ttl_s
        if model.timer is not None:
            model.timer.cancel()

    def _release(self, model: Model) -> None:
        model.leases, model.used_s = model.leases - 1, self._clock()
        self._schedule(model)
        self._notify()

    def _leave(self, model: Model, granted: asyncio.Future[Any]) -> None:
        """A request waits no more: a load that nobody waits for is given up, as long as it has not begun."""
        if granted.done():
            if not granted.cancelled() and granted.exception() is None:
                self._release(model)
            return
        model.waiting.remove(granted)
        if not model.waiting and model.task is not None and not model.committed:
            model.task.cancel()

    def _grant(self, model: Model) -> None:
        """Give a lease to each request that waits."""
        waiting, model.waiting = model.waiting, []
        for granted in waiting:
            if not granted.done():
                self._take(model)
                granted.set_result(model.service)
        if not model.leases:
            self._schedule(model)

    # Loads.

    def _begin(self, model: Model) -> None:
        model.state, model.failure, model.report, model.committed = "loading", None, LoadReport(), False
        model.ttl_s = self.ttl_s
        model.task = task = self._start(self._load(model))
        task.add_done_callback(lambda _: self._loaded(model, task))
        self._notify()

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, model: Model) -> None:
        """The task of one load, which all waiting requests share; `_loaded` follows."""
        source = model.source
        await self._in_thread(lambda: source.prepare(model.report), stop=partial(_stop, model))
        room = await self._in_thread(source.room)
        model.report.stage("wait for memory")
        async with self._loading:
            await self._make_room(model, room)
            model.committed = True
            service = (await self._in_thread(lambda: source.load(model.report))).service()
            try:
                await _load_adapters(service, model.adapters)
            except BaseException:
                await self._in_thread(service.close)
                raise
            model.service = service

    def _loaded(self, model: Model, task: asyncio.Task[None]) -> None:
        """What a load leaves: a model that is ready, or why it is not. A task may be cancelled before it begins."""
        model.task = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            model.state, model.room = "unloaded", None
            self._begin_again(model)
        elif error is not None:
            self._fail(model, error)
        else:
            model.state, model.used_s = "ready", self._clock()
            self._grant(model)
        self._notify()

    def _begin_again(self, model: Model) -> None:
        """For requests that came while an earlier load was given up, or while the model was unloaded."""
        if model.waiting and model.state == "unloaded" and not self._closing:
            self._begin(model)

    def _fail(self, model: Model, error: BaseException) -> None:
        if isinstance(error, ApiError):
            failure = error.again()
            _log.error("%s", failure.message)
        else:
            words = str(error) if isinstance(error, MlcpipeError) else f"{type(error).__name__}: {error}"
            message = f"the model {model.name!r} did not load: {words}"
            failure = ApiError(503, message, code="load_failed", retry_after_s=RETRY_S)
            _log.error("%s", message, exc_info=None if isinstance(error, MlcpipeError) else error)
        model.state, model.room, model.failure, model.failed_s = "failed", None, failure, self._clock()
        waiting, model.waiting = model.waiting, []
        for granted in waiting:
            if not granted.done():
                granted.set_exception(failure.again())

    # The memory plan.

    def taken(self, place: str) -> int:
        """Bytes of a place that models take, or are about to."""
        return sum(one.room.nbytes for one in self.models if one.room is not None and one.room.place == place)

    async def _make_room(self, model: Model, room: Room) -> None:
        """Unload what has to leave for `room`, and take it. Raises ApiError if the plan has none."""
        while any(one.state == "unloading" for one in self.models):  # as somebody else asked for
            await self._change()
        leaving = self._leaving(model, room)
        if leaving:
            model.report.stage(f"wait until {', '.join(one.name for one in leaving)} can leave")
            await self._unload(leaving)
        model.room = room

    def _leaving(self, model: Model, room: Room) -> list[Model]:
        """The models to unload, the least recently used first; none that is not needed."""
        over = self.taken(room.place) + room.nbytes - self._capacity(room.place)
        others = [one for one in self.models if one.state == "ready" and not one.pinned and one.room is not None]
        others = [one for one in others if one.room is not None and one.room.place == room.place]
        leaving: list[Model] = []
        for one in sorted(others, key=lambda one: (one.leases > 0, one.used_s)):
            if over <= _freed(leaving):
                break
            leaving.append(one)
        if over > _freed(leaving):
            stays = self.taken(room.place) - _freed(leaving)
            message = f"the model {model.name!r} takes {byte_size(room.nbytes)} of memory; the models of this server "
            message += f"may take {byte_size(self._capacity(room.place))}"
            message += f", and pinned ones have {byte_size(stays)}" if stays else ""
            raise ApiError(503, message, code="out_of_memory", retry_after_s=60.0)
        for one in reversed(leaving):
            if over <= _freed(leaving) - _freed([one]):
                leaving.remove(one)
        return leaving

    # Unloading.

    def _begin_unload(self, models: Sequence[Model]) -> None:
        for model in models:
            model.state = "unloading"
        self._start(self._emptied(models))

    async def _unload(self, models: Sequence[Model]) -> None:
        """Unload models once their requests are answered; when cancelled before, they stay."""
        for model in models:
            model.state = "unloading"
        await self._emptied(models)

    async def _emptied(self, models: Sequence[Model]) -> None:
        self._notify()
        try:
            while any(model.leases for model in models):
                await self._change()
        except asyncio.CancelledError:
            for model in models:
                model.state = "ready"
                self._grant(model)
            self._notify()
            raise
        closing = self._loop.create_task(self._closed(models))
        self._tasks.add(closing)
        closing.add_done_callback(self._tasks.discard)
        await asyncio.shield(closing)

    async def _closed(self, models: Sequence[Model]) -> None:
        """Close the services, and free their memory."""
        for model in models:
            service, model.service = model.service, None
            model.adapters = {name: one.path for name, one in getattr(service, "adapters", {}).items()}
            with contextlib.suppress(Exception):
                model.metrics_text = service.metrics.text()
            close = service.close
            del service
            try:
                await self._in_thread(close)
                del close
                await self._in_thread(model.source.free)
            except Exception:
                _log.exception("the model %r did not end cleanly", model.name)
            model.state, model.room = "unloaded", None
            if model.timer is not None:
                model.timer.cancel()
        for model in models:
            self._begin_again(model)
        self._notify()

    def _schedule(self, model: Model) -> None:
        """Unload an idle model when its time has come."""
        if model.timer is not None:
            model.timer.cancel()
            model.timer = None
        if model.state != "ready" or model.leases or model.pinned or model.ttl_s is None:
            return
        wait_s = max(0.0, model.used_s + model.ttl_s - self._clock())
        model.timer = self._loop.call_later(wait_s, self._expire, model)

    def _expire(self, model: Model) -> None:
        model.timer = None
        if model.state == "ready" and not model.leases and not self._closing:
            self._begin_unload([model])

    # The end.

    def _check_open(self) -> None:
        if self._closing:
            raise ApiError(503, "the server is shutting down", code="cancelled", retry_after_s=5.0)

    def end(self, drain_s: float) -> None:
        """Accept nothing more, end what waits, and let running answers finish for `drain_s` seconds."""
        self._closing = True
        refused = ApiError(503, "the server is shutting down", code="cancelled", retry_after_s=5.0)
        for model in self.models:
            waiting, model.waiting = model.waiting, []
            for granted in waiting:
                if not granted.done():
                    granted.set_exception(refused)
            if model.service is not None:
                self._loop.run_in_executor(None, model.service.engine.close, drain_s)
            _stop(model)

    def close(self) -> None:
        """End all engines and threads."""
        self._closing = True
        for model in self.models:
            _stop(model)
            if model.timer is not None:
                model.timer.cancel()
            if model.service is not None:
                model.service.close()
        super().close()

    # Waiting for a change of any model.

    async def _change(self) -> None:
        """The next change of a state or of leases."""
        watcher: asyncio.Future[None] = self._loop.create_future()
        self._watchers.add(watcher)
        try:
            await watcher
        finally:
            self._watchers.discard(watcher)

    def _notify(self) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    async def _in_thread(self, work: Callable[[], _T], stop: Callable[[], None] | None = None) -> _T:
        """The result of work in a thread of its own, which does not keep the process alive; `stop` ends it."""
        done: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            try:
                result, error = work(), None
            except BaseException as raised:
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_tell, done, result, error)

        threading.Thread(target=run, name="mlcpipe-loading", daemon=True).start()  # __main__ knows the name
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if stop is not None:
                stop()
            done.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise


def _tell(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def _stop(model: Model) -> None:
    """End a running preparation, or one that is about to begin."""
    model.report.stopped = True
    model.source.stop()


def _freed(models: Sequence[Model]) -> int:
    return sum(one.room.nbytes for one in models if one.room is not None)


def _fault(model: Model) -> str:
    """Why a loaded model answers no more, "" if it does."""
    fault: str = model.service.engine.fault
    return fault


async def _load_adapters(service: Any, adapters: Mapping[str, Path]) -> None:
    """Load again what clients had loaded before the model was unloaded; one that is gone is left out."""
    for name, folder in adapters.items():
        if name in service.adapters:
            continue
        try:
            packed = await service.apart(partial(service.engine.read_adapter, folder, name))
            service.adapters[name] = await asyncio.wrap_future(service.engine.load_adapter(packed))
        except Exception as error:  # also of the system, as for a folder that is gone
            _log.error("the adapter %r of %r is left out: %s", name, service.name, error)
