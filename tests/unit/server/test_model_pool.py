"""The states of a pool of models, with sources that load nothing: the states alone are under test here."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.server.errors import ApiError
from mlcpipe.server.load_report import LoadReport
from mlcpipe.server.model_pool import RETRY_S, ModelPool
from mlcpipe.server.pooled_model import Kind, Room


class Source:
    """A model of `size` bytes. Each load takes the next word of `fate`: "ok", "fails" or "faulty"."""

    guess: Kind = "text"

    def __init__(self, name: str, size: int, fate: list[str] | None = None, kind: Kind = "text") -> None:
        self.names, self.kind, self.size, self.fate = (name,), kind, size, fate or []
        self.about: dict[str, Any] = {}
        self.loads = self.closed = self.stops = 0
        self.service: Any = None
        self.go: threading.Event | None = None  # without which `prepare` does not end
        self.more: tuple[dict[str, Any], dict[str, Any]] = {}, {}  # of the engine, of the service
        self.beside: list[Source] = []
        self.excess = False  # whether it was loaded beside others that left no room for it

    def prepare(self, report: LoadReport) -> None:
        report.stage("prepare")
        if self.go is not None:
            assert self.go.wait(60)

    def room(self) -> Room:
        return Room("host", self.size)

    def load(self, report: LoadReport) -> Any:
        self.loads += 1
        there = sum(one.size for one in self.beside if one.service is not None and one.service.open)
        self.excess |= there + self.size > 10
        word = self.fate.pop(0) if self.fate else "ok"
        if word == "fails":
            raise ResourceError("no luck")
        return SimpleNamespace(service=lambda: self.made("broken" if word == "faulty" else ""))

    def made(self, fault: str) -> Any:
        self.service = SimpleNamespace(
            name=self.names[0], kind=self.kind, **self.more[1],
            engine=SimpleNamespace(fault=fault, close=lambda drain_s: None, **self.more[0]),
            close=self.close, adapters={}, metrics=SimpleNamespace(text=lambda: b""), open=True,
        )  # fmt: skip
        return self.service

    def close(self) -> None:
        self.service.open = False
        self.closed += 1

    def free(self) -> None:
        assert not self.service.open

    def stop(self) -> None:
        self.stops += 1

    def check_removable(self) -> None:
        raise UsageError("kept")

    def remove(self) -> None:
        raise UsageError("kept")


@asynccontextmanager
async def pool_of(*sources: Source, most: int = 10, **options: Any) -> AsyncIterator[ModelPool]:
    pool = ModelPool(sources, lambda place: most, **options)
    try:
        yield pool
    finally:
        pool.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))  # type: ignore[arg-type]


async def use(pool: ModelPool, name: str) -> Any:
    async with pool.lease(name) as service:
        return service


async def until(met: Callable[[], bool]) -> None:
    while not met():
        await asyncio.sleep(0.001)


def test_two_requests_load_a_model_once_and_the_least_recently_used_leaves() -> None:
    a, b, c = Source("a", 5), Source("b", 5), Source("c", 5)

    async def test() -> None:
        async with pool_of(a, b, c) as pool:
            await asyncio.gather(*(use(pool, "a") for _ in range(5)))
            assert (a.loads, pool.state("a")) == (1, "ready")
            await use(pool, "b")
            await use(pool, "a")
            await use(pool, "c")
            assert [pool.state(name) for name in "abc"] == ["ready", "unloaded", "ready"]
            assert b.closed == 1 and pool.taken("host") == 10

    run(test)


def test_no_more_leave_than_have_to() -> None:
    small, large, new = Source("small", 2), Source("large", 8), Source("new", 8)

    async def test() -> None:
        async with pool_of(small, large, new) as pool:
            for name in ("small", "large", "new"):
                await use(pool, name)
            assert [pool.state(name) for name in pool.names()] == ["ready", "unloaded", "ready"]

    run(test)


def test_a_busy_model_leaves_when_its_requests_are_answered_and_takes_no_more() -> None:
    a, b = Source("a", 6), Source("b", 6)

    async def test() -> None:
        async with pool_of(a, b) as pool:
            async with pool.lease("a") as service:
                other = asyncio.create_task(use(pool, "b"))
                await until(lambda: pool.state("a") == "unloading")
                late = asyncio.create_task(use(pool, "a"))
                await asyncio.sleep(0.01)
                assert service.open and b.loads == 0 and not late.done()
            assert (await other).name == "b" and not service.open
            assert (await late).name == "a" and (a.loads, b.loads) == (2, 1)

    run(test)


def test_a_model_stays_when_nobody_waits_any_more_for_what_drove_it_out() -> None:
    a, b = Source("a", 6), Source("b", 6)

    async def test() -> None:
        async with pool_of(a, b) as pool:
            async with pool.lease("a"):
                other = asyncio.create_task(use(pool, "b"))
                await until(lambda: pool.state("a") == "unloading")
                late = asyncio.create_task(use(pool, "a"))
                await asyncio.sleep(0)
                other.cancel()
                assert (await late).name == "a"
                await until(lambda: pool.state("b") == "unloaded")
            assert (pool.state("a"), a.loads, b.loads) == ("ready", 1, 0)

    run(test)


def test_a_failed_load_is_told_to_all_costs_others_nothing_and_is_tried_again_later() -> None:
    a, b = Source("a", 5), Source("b", 5, ["fails"])
    now = [100.0]

    async def test() -> None:
        async with pool_of(a, b, clock=lambda: now[0]) as pool:
            await use(pool, "a")
            failed = await asyncio.gather(*(use(pool, "b") for _ in range(3)), return_exceptions=True)
            again = await asyncio.gather(use(pool, "b"), return_exceptions=True)
            assert len({id(one) for one in (*failed, *again, pool.find("b").failure)}) == 5  # each with its own frames
            assert all(isinstance(one, ApiError) and one.status == 503 and "no luck" in one.message for one in failed)
            assert [pool.state(name) for name in "ab"] == ["ready", "failed"] and pool.taken("host") == 5
            with pytest.raises(ApiError, match="no luck"):
                await use(pool, "b")
            assert b.loads == 1
            now[0] += RETRY_S
            assert (await use(pool, "b")).name == "b" and b.loads == 2

    run(test)


def test_an_engine_that_failed_is_loaded_again() -> None:
    a = Source("a", 5, ["faulty"])

    async def test() -> None:
        async with pool_of(a) as pool:
            first = await use(pool, "a")
            second = await use(pool, "a")
            assert not first.open and second.open and second is not first

    run(test)


def test_pinned_models_stay_and_what_does_not_fit_beside_them_is_refused() -> None:
    a, b, c = Source("a", 6), Source("b", 6), Source("c", 11)

    async def test() -> None:
        async with pool_of(a, b, c, pinned=["a"], ttl_s=0.0) as pool:
            await use(pool, "a")
            with pytest.raises(ApiError, match=r"takes 6 bytes.*may take 10 bytes, and pinned ones have 6 bytes"):
                await use(pool, "b")
            with pytest.raises(ApiError, match="takes 11 bytes"):
                await use(pool, "c")
            with pytest.raises(ApiError, match="pinned"):
                await pool.unload("a")
            assert pool.state("a") == "ready"

    run(test)


def test_an_idle_model_is_unloaded_after_its_time_which_a_request_may_set_until_the_next() -> None:
    a, b = Source("a", 5), Source("b", 5)

    async def test() -> None:
        async with pool_of(a, b, ttl_s=0.0) as pool:
            async with pool.lease("a") as service:
                async with pool.lease("b"):
                    pool.set_ttl("b", None)
                await asyncio.sleep(0.01)
                assert service.open
            await until(lambda: pool.state("a") == "unloaded")
            assert pool.state("b") == "ready"
            await use(pool, "b")
            await until(lambda: pool.state("b") == "unloaded")
        async with pool_of(Source("c", 5)) as pool:
            async with pool.lease("c"):
                pool.set_ttl("c", 0.0)
            await until(lambda: pool.state("c") == "unloaded")
            async with pool.lease("c"):
                pass
            assert pool.find("c").ttl_s is None and pool.find("c").timer is None and pool.state("c") == "ready"

    run(test)


def test_too_many_that_wait_are_refused_with_a_time_to_come_back() -> None:
    a, b = Source("a", 6), Source("b", 6)

    async def test() -> None:
        async with pool_of(a, b, max_waiting=2) as pool, pool.lease("a"):
            waiting = [asyncio.create_task(use(pool, "b")) for _ in range(2)]
            await until(lambda: pool.state("a") == "unloading")
            with pytest.raises(ApiError, match="2 requests wait for the model 'b': wait until a can leave") as caught:
                await use(pool, "b")
            assert caught.value.status == 503 and caught.value.headers["retry-after"]
            for one in waiting:
                one.cancel()

    run(test)


def test_a_request_does_not_wait_for_ever_and_the_load_continues_without_it() -> None:
    a = Source("a", 6)
    a.go = threading.Event()

    async def test() -> None:
        async with pool_of(a, wait_s=0.0) as pool:
            with pytest.raises(ApiError, match="'a' is not loaded after 0 s"):
                await use(pool, "a")
            left = asyncio.create_task(use(pool, "a"))
            left.cancel()
            await asyncio.wait({left})
            a.go.set()
            await until(lambda: pool.state("a") == "ready")
            assert (a.loads, a.stops) == (1, 0)

    run(test)
    assert a.stops == 1  # at the end


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    """What the server has logged since the last call."""
    log, records = logging.getLogger("mlcpipe.server"), SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(records)  # type: ignore[arg-type]
    log.addHandler(handler)
    yield lambda: [records.get().getMessage() for _ in range(records.qsize())]
    log.removeHandler(handler)


def test_a_preload_waits_for_as_long_as_it_takes_and_its_failure_is_in_the_log(said: Callable[[], list[str]]) -> None:
    a, large = Source("a", 6), Source("large", 11)
    a.go = threading.Event()

    async def test() -> None:
        async with pool_of(a, large, wait_s=0.0) as pool:
            for _ in range(3):
                pool.preload("a")
            pool.preload("large")
            await until(lambda: pool.state("large") == "failed")
            assert pool.state("a") == "loading" and len(pool.find("a").waiting) == 1  # for others there are places
            a.go.set()
            await until(lambda: pool.state("a") == "ready")
            assert a.stops == 0 and pool.find("a").leases == 0

    run(test)
    assert any("'large' takes 11 bytes of memory" in line for line in said())


def test_adapters_come_back_with_their_model_but_for_one_that_is_gone() -> None:
    a, b = Source("a", 6), Source("b", 6)

    def read(folder: Path, name: str) -> Any:
        if folder == Path("gone"):
            raise FileNotFoundError("no adapter")
        return SimpleNamespace(path=folder, name=name)

    async def apart(work: Callable[[], Any]) -> Any:
        return work()

    def load(packed: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(packed)
        return done

    async def test() -> None:
        async with pool_of(a, b) as pool:
            service = await use(pool, "a")
            service.adapters.update({name: SimpleNamespace(path=Path(name)) for name in ("kept", "gone")})
            await use(pool, "b")
            assert pool.find("kept").name == "a" and pool.state("kept") == "unloaded"
            a.more = {"read_adapter": read, "load_adapter": load}, {"apart": apart}
            service = await use(pool, "kept")
            assert service.name == "a" and list(service.adapters) == ["kept"]
            with pytest.raises(ApiError, match="is not served here"):
                await use(pool, "gone")

    run(test)


def test_names_kinds_and_what_is_not_there() -> None:
    writes, embeds = Source("writes", 1), Source("embeds", 1, kind="embed")

    async def test() -> None:
        async with pool_of(writes, embeds) as pool:
            async with pool.lease(None, "embed") as service:
                assert service.name == "embeds"
            with pytest.raises(ApiError, match="'embeds' embeds texts; ask /v1/embeddings") as caught:
                await use_kind(pool, "embeds", "text")
            assert caught.value.status == 400
            for name, kind in (("other", "text"), (None, "rerank")):
                with pytest.raises(ApiError) as caught:
                    await use_kind(pool, name, kind)
                assert caught.value.status == 404
            assert writes.loads == 0

    run(test)


async def use_kind(pool: ModelPool, name: str | None, kind: Any) -> None:
    async with pool.lease(name, kind):
        pass


def test_the_end_refuses_those_who_wait() -> None:
    a, b = Source("a", 6), Source("b", 6)

    async def test() -> None:
        async with pool_of(a, b) as pool, pool.lease("a"):
            waits = asyncio.create_task(use(pool, "b"))
            await until(lambda: pool.state("a") == "unloading")
            pool.end(0.0)
            with pytest.raises(ApiError, match="shutting down"):
                await waits
            with pytest.raises(ApiError, match="shutting down"):
                await use(pool, "a")

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_plan_holds_and_no_lease_is_cut(seed: int) -> None:
    """Random requests, cancels, unloads, times and failures over five models that do not fit together."""
    draw = random.Random(seed)
    sources = [Source(name, draw.randint(2, 6)) for name in "abcde"]
    for source in sources:
        source.beside = sources
        source.fate = draw.choices(["ok", "fails", "faulty"], [8, 1, 1], k=200)
    ended: Counter[str] = Counter()

    async def client(pool: ModelPool) -> None:
        source = draw.choice(sources)
        try:
            async with pool.lease(source.names[0]) as service:
                for _ in range(draw.randrange(6)):
                    assert service.open and service is source.service
                    await asyncio.sleep(0)
            ended["ok"] += 1
        except ApiError as error:
            assert error.status == 503 and error.message
            ended["refused"] += 1
        except asyncio.CancelledError:
            ended["cancelled"] += 1

    async def test() -> None:
        async with pool_of(*sources, ttl_s=draw.choice([None, 0.0, 0.001]), max_waiting=8) as pool:
            clock = iter(range(10**9))
            pool._clock = lambda: float(next(clock))  # so that failed loads are tried again
            running: set[asyncio.Task[Any]] = set()
            clients = []
            for _ in range(300):
                clients.append(asyncio.create_task(client(pool)))
                running.add(clients[-1])
                await asyncio.sleep(draw.choice([0, 0, 0, 0.0005]))
                if draw.random() < 0.3:
                    draw.choice(sorted(running, key=id)).cancel()
                if draw.random() < 0.05:
                    running.add(asyncio.create_task(pool.unload(draw.choice("abcde"))))
            found = await asyncio.gather(*running, return_exceptions=True)
            assert not [one for one in found if isinstance(one, AssertionError)]
            not_begun = sum(one.cancelled() for one in clients)
            assert sum(ended.values()) + not_begun == len(clients)
            assert not any(source.excess for source in sources)
            pool._clock = lambda: 1e12
            for source in sources:  # nothing is stuck
                source.fate = []
                assert (await use(pool, source.names[0])).open
            assert all(model.leases == 0 and not model.waiting for model in pool.models)

    run(test)
