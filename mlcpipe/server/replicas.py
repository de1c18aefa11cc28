"""`mlcpipe serve --ray N`: the same server in N processes of Ray Serve, behind one address.

This process listens and sends each request to a replica, which Ray's own policy chooses by the prompt's beginning and
by load. Ray restarts a replica that ends or whose engine fails; SIGHUP replaces them one after the other.
It pays where one process cannot use all cores, or must not be the only one; it needs memory for N copies of the model.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from fastapi.responses import JSONResponse, Response
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from mlcpipe.errors import ResourceError, last_line
from mlcpipe.server.app import create_app
from mlcpipe.server.background import Runs
from mlcpipe.server.errors import ANTHROPIC_PATH, ApiError
from mlcpipe.server.guard import OPEN_PATHS, Guard, Rules
from mlcpipe.server.health import LOADING
from mlcpipe.server.json_values import MAX_VALUES, check_values
from mlcpipe.server.leases import Leasing
from mlcpipe.server.metrics import CONTENT_TYPE, merged
from mlcpipe.server.model_pool import ModelPool
from mlcpipe.server.off_loop import OffLoop
from mlcpipe.server.page import PAGE, page_router
from mlcpipe.server.sse import DONE, SLOW_READER_S, event

_log = logging.getLogger("mlcpipe.server")
_APP = "mlcpipe"
# The public name, ray.serve.llm.request_router, also imports what only vLLM needs.
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
_IMBALANCE = 2  # requests by which a replica may exceed another to reuse a prefix
_AT_ONCE = 4096  # requests per replica, whose own queue is shorter
_OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum: nothing goes through it
_STARTS = 3  # restarts of a failing replica before the server gives up
_LAST_S = 5.0  # for the last events to go out
_PAUSE_S = 0.04  # between two messages of a stream, as each is a call between processes
# State of one engine; a client cannot choose its replica.
_OF_ONE = ("/status", "/v1/kv", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/lora-adapters",
           "/v1/conversations", "/api/copy", "/api/delete")  # fmt: skip
_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "scheme",
    "headers",
    "state",
)


@contextmanager
def running_ray() -> Iterator[None]:
    """Ray's processes on this machine, which end with the entering thread."""
    ray.init(
        "local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class Asked:
    """A request on its way to a replica; `prompt` is the text whose beginning the router compares."""

    scope: dict[str, Any]
    body: bytes
    prompt: str


class Answering:
    """In a process with the model: a server's application without the guard, which is in front of all processes."""

    async def begin(self, load: Callable[[], Any], *, embeds: bool = False) -> None:
        """Load the model in a thread, and make the application."""
        app, _ = create_app(serves="embeddings" if embeds else "text")
        loaded = await asyncio.get_running_loop().run_in_executor(None, load)
        self._service = loaded.service()
        app.state.pool = self._pool = ModelPool.of(self._service)
        app.state.runs = Runs(offered=False)
        self._app = Leasing(app)

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.close()

    def check_health(self) -> None:
        """Raises if the engine failed; Ray then starts another replica."""
        if self._service.engine.fault:
            raise RuntimeError(self._service.engine.fault)

    def text_of_metrics(self) -> bytes:
        """Its metrics in Prometheus's text format."""
        text: bytes = self._service.metrics.text()
        return text

    async def answer(self, asked: Asked) -> AsyncIterator[list[dict[str, Any]]]:
        """ASGI's messages of the response; those within a pause are sent together, the first two at once."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        bodies = [{"type": "http.request", "body": asked.body}]

        async def receive() -> dict[str, Any]:
            return bodies.pop() if bodies else await asyncio.Event().wait()  # type: ignore[return-value]

        task = asyncio.ensure_future(self._app(asked.scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            for count in itertools.count():
                several = [await messages.get()]
                if count > 1 and several[-1] is not None:
                    await asyncio.sleep(_PAUSE_S)
                while not messages.empty():
                    several.append(messages.get_nowait())
                yield _joined([message for message in several if message is not None])
                if several[-1] is None:
                    break
        finally:
            task.cancel()
            (failed,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(failed, Exception):
                _log.error("a request failed", exc_info=failed)


class Replica(Answering):
    """A process of Ray Serve."""

    async def __init__(self, load: Callable[[], Any], embeds: bool) -> None:  # type: ignore[misc]  # Ray awaits it
        await self.begin(load, embeds=embeds)

    def metrics(self) -> tuple[str, bytes]:
        """The name of this replica, and its metrics."""
        return serve.get_replica_context().replica_id.unique_id, self.text_of_metrics()


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same response in fewer messages: joins successive bodies."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {"type": ""}
        if last["type"] == message["type"] == "http.response.body":
            joined[-1] = {**message, "body": last.get("body", b"") + message.get("body", b"")}
        else:
            joined.append(message)
    return joined


class Replicas:
    """Running replicas, as a server's service."""

    ended = ("the replica that computed the answer ended", "replica_ended")

    def __init__(self, load: Callable[[], Any], count: int, drain_s: float, *, embeds: bool) -> None:
        """Start them, and wait until they are loaded. Raises ResourceError if that fails."""
        quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
        serve.start(proxy_location="Disabled", logging_config=quiet)
        deployment = serve.deployment(
            Replica, num_replicas=count, ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_AT_ONCE,
            graceful_shutdown_timeout_s=drain_s, health_check_period_s=2, max_constructor_retry_count=_STARTS,
            logging_config=quiet, request_router_config=RequestRouterConfig(
                request_router_class=_ROUTER,
                request_router_kwargs={"imbalanced_threshold": _IMBALANCE, "do_eviction": True},
            ),
        )  # fmt: skip
        self._application = deployment.bind(load, embeds)
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False
        try:
            self._handle = self._deploy().options(stream=True)
        except RuntimeError as error:
            raise ResourceError("the replicas did not start", found=_reason(error)) from None

    def _deploy(self) -> Any:
        return serve.run(self._application, name=_APP, route_prefix=None)

    def pool(self) -> Replicas:
        """Install the replacement on SIGHUP and return self; called inside the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(
            signal.SIGHUP, lambda: threading.Thread(target=self._replace, daemon=True).start()
        )
        return self

    def _replace(self) -> None:
        """Replace the replicas one after the other. If a new one fails, report it and keep the others."""
        try:
            self._deploy()
        except RuntimeError as error:
            refused = ResourceError(
                "the replicas are not all replaced", found=_reason(error),
                next_step="the others continue; fix the cause and send SIGHUP again",
            )  # fmt: skip
            sys.stderr.write(f"error: {refused}\n")

    def healthy(self) -> int:
        """The number of working replicas."""
        status = serve.status().applications.get(_APP)
        return 0 if status is None else status.deployments[Replica.__name__].replica_states.get("RUNNING", 0)

    def metrics(self) -> bytes:
        """Metrics of all replicas, each with its name."""
        return merged(dict(self._handle.broadcast("metrics").results(timeout_s=_LAST_S)))

    def answer(self, asked: Asked) -> Any:
        """The messages of a response, for `async for`; `cancel` ends it."""
        return self._handle.answer.remote(asked)

    async def forward(self, asked: Asked, receive: Any, send: Any) -> None:
        """Forward to a replica, until the client leaves. Raises ApiError before the first byte."""
        work = asyncio.ensure_future(self._relay(asked, send))
        left = asyncio.ensure_future(_left(receive))
        self._running.add(work)
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._running.discard(work)
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _relay(self, asked: Asked, send: Any) -> None:
        started, streams, events = False, False, 0
        answer = self.answer(asked)
        try:
            async for messages in answer:
                for message in messages:
                    if message["type"] == "http.response.start":
                        started, streams = True, b"text/event-stream" in dict(message["headers"])[b"content-type"]
                    events += message.get("body", b"").count(b"\ndata: ")  # JSON has no line feed: none is inside
                    await asyncio.wait_for(send(message), SLOW_READER_S)
            return
        except (asyncio.CancelledError, asyncio.TimeoutError):
            answer.cancel()
            if not self._closing:
                raise
            error = ApiError(503, "the server ended the request", code="cancelled", retry_after_s=5.0)
        except (RayError, RayServeException):
            error = ApiError(503, self.ended[0], code=self.ended[1], retry_after_s=1.0)
        if not started:
            raise error
        if not streams:
            raise RuntimeError(error.message)  # cuts the connection
        await send({"type": "http.response.body", "body": _last_events(error, asked.scope["path"], events).encode()})

    def end(self, drain_s: float) -> None:
        """Begin the end: `close` in a thread."""
        self._loop.run_in_executor(None, self.close, drain_s)

    def close(self, drain_s: float = 0.0) -> None:
        """Give requests `drain_s` seconds, then end the rest, and the replicas."""
        if self._running:
            with suppress(futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(self._end(drain_s), self._loop).result(drain_s + 2 * _LAST_S)

    async def _end(self, drain_s: float) -> None:
        end = self._loop.time() + drain_s
        while self._running and (left := end - self._loop.time()) > 0:
            await asyncio.wait(self._running, timeout=left)
        self._closing = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_LAST_S)


class Front:
    """The application that forwards; `state.pool` is None until the replicas run."""

    def __init__(self) -> None:
        self.state, self._threads = SimpleNamespace(pool=None), OffLoop()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer for all replicas, or forward to one."""
        replicas, path = self.state.pool, scope["path"]
        loop = asyncio.get_running_loop()
        if path in OPEN_PATHS:
            healthy = 0 if replicas is None else await loop.run_in_executor(None, replicas.healthy)
            response: Response = JSONResponse({"status": "ok", "replicas": healthy})
            if not healthy:
                response = JSONResponse(LOADING, 503, {"retry-after": "1"})
            await response(scope, receive, send)
        elif replicas is None:
            raise ApiError(503, "Loading model", retry_after_s=1.0)
        elif path.startswith(_OF_ONE):
            raise ApiError(404, f"{path[:200]} is not there with --ray", code="not_found")
        elif path == "/metrics":
            text = await loop.run_in_executor(None, replicas.metrics)
            await Response(text, media_type=CONTENT_TYPE)(scope, receive, send)
        else:
            body = (await receive()).get("body", b"")
            kept = {key: scope[key] for key in _SCOPE if key in scope}
            prompt = await self._threads.aside(lambda: _prompt(body), len(body))
            await replicas.forward(Asked(kept, body, prompt or path), receive, send)


def create_front(rules: Rules) -> tuple[Front, Guard]:
    """The application in front of replicas, and the guard around it."""
    front, router = Front(), page_router(PAGE)
    open_paths = {*OPEN_PATHS, *(route.path for route in router.routes)}  # type: ignore[attr-defined]
    return front, Guard(front, rules, lambda error: None, open_paths)


def _reason(error: RuntimeError) -> str:
    """The reason of a failed deployment: Ray's message about it ends with the replica's exception."""
    status = serve.status().applications.get(_APP)
    told = [] if status is None else [one.message for one in status.deployments.values() if one.message]
    return last_line(told[0] if told else error)


def _prompt(body: bytes) -> str:
    """The text of a request's messages, "" if none; without field names, which would make all prompts alike."""
    with suppress(ValueError, RecursionError, ApiError):
        check_values(body, MAX_VALUES)  # with more values it is refused, or has token ids
        fields = json.loads(body or b"{}")
        if isinstance(fields, dict):
            return _text([fields.get(key) for key in ("system", "instructions", "messages", "prompt", "input")])
    return ""


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    if isinstance(value, dict):
        return _text([value.get("content"), value.get("text")])
    return "" if value is None else str(value)


def _last_events(error: ApiError, path: str, number: int) -> str:
    """The last events of a failed stream of this path, after `number` named ones."""
    if path == ANTHROPIC_PATH:
        return event(error.body(path), "error")
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return event({**told, "sequence_number": number}, "error")
    return event(error.body(path)) + DONE


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
