"""A model that hears, for `/v1/audio`: files are decoded one at a time, windows of all requests take turns."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from mlcpipe.errors import MlcpipeError
from mlcpipe.runtime.serving.adapters import Adapter
from mlcpipe.runtime.serving.interface import EngineStats
from mlcpipe.runtime.speech.transcriber import Segment, SpeechParams, Transcriber
from mlcpipe.server.errors import ApiError, refused
from mlcpipe.server.metrics import Metrics
from mlcpipe.server.off_loop import OffLoop
from mlcpipe.server.service import Facts
from mlcpipe.sound.decode import read_sound
from mlcpipe.sound.log_mel import RATE_HZ, Floats

MAX_S = 2 * 3600  # of one sound
MAX_HELD_S = 2 * MAX_S  # of all sounds that are heard or wait; an hour is 230 MB


class SpeechEngine:
    """The server's engine interface, for an engine without state between requests."""

    fault = ""

    def __init__(self, transcriber: Transcriber) -> None:
        self.transcriber = transcriber
        self.tokenizer = transcriber.tokenizer
        self.context_length = transcriber.hearing.context_length
        self.vocab_size = transcriber.manifest.model.vocab_size
        self.requests = self.tokens = self.ended = 0

    def stats(self) -> EngineStats:
        """Counts since the server began."""
        return EngineStats(running=self.requests, generated=self.tokens, finished={"stop": self.ended})

    def close(self, drain_s: float = 0.0) -> None:
        """Nothing to end: nothing runs between requests."""


class SpeechService(OffLoop):
    """The service of a model that hears."""

    kind = "speech"
    adapters: Mapping[str, Adapter] = {}

    def __init__(self, engine: SpeechEngine, facts: Facts, max_queue: int) -> None:
        super().__init__()
        self.engine, self.facts, self.transcriber = engine, facts, engine.transcriber
        self.tokenizer = engine.tokenizer
        self.created = int(time.time())
        self.metrics = Metrics(engine.stats)
        self.meta = dict(facts.about)
        self._max_queue, self._held_s = max_queue, 0.0
        self._decoding = 0  # files
        self._stops = set[threading.Event]()  # of the sounds that are heard
        # The compiled library's threads serve one caller at a time.
        self._steps = ThreadPoolExecutor(1, thread_name_prefix="mlcpipe-speech")

    @property
    def name(self) -> str:
        """The model's own name."""
        return self.facts.names[0]

    def close(self) -> None:
        """End the threads."""
        for stop in self._stops:
            stop.set()
        self._steps.shutdown(wait=False, cancel_futures=True)
        super().close()

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        self.facts.check(name)

    def check(self, params: SpeechParams) -> None:
        """Raises ApiError for what the model cannot do, and where too many requests wait."""
        if (waiting := self.engine.requests + self._decoding) >= self._max_queue:
            message = f"{waiting} requests are waiting; try again later"
            raise ApiError(503, message, code="overloaded", retry_after_s=1.0)
        try:
            self.transcriber.check(params)
        except MlcpipeError as error:
            raise refused(error) from None

    async def decoded(self, data: bytes) -> Floats:
        """The samples of a file. Raises ApiError for one that cannot be read."""
        self._decoding += 1
        try:
            return await self.apart(partial(read_sound, data, max_s=MAX_S), max(len(data), 1 << 20))
        finally:
            self._decoding -= 1

    async def heard(self, samples: Floats, params: SpeechParams) -> AsyncGenerator[tuple[str, list[Segment]], None]:
        """The language and the segments of each window; where it is closed, the window ends. Raises ApiError."""
        length_s = len(samples) / RATE_HZ
        if self._held_s + length_s > MAX_HELD_S:
            raise ApiError(503, "there are too many long sounds", code="overloaded", retry_after_s=10.0)
        self._held_s += length_s
        self.engine.requests += 1
        stop = threading.Event()
        self._stops.add(stop)
        loop, windows = asyncio.get_running_loop(), self.transcriber.heard(samples, params, stopped=stop.is_set)
        try:
            while (found := await loop.run_in_executor(self._steps, next, windows, None)) is not None:
                language, segments, _ = found
                self.engine.tokens += sum(len(one.tokens) for one in segments)
                yield language, segments
            self.engine.ended += 1
        except MlcpipeError as error:
            raise refused(error) from None
        finally:
            stop.set()
            self._stops.discard(stop)
            self.engine.requests -= 1
            self._held_s -= length_s
