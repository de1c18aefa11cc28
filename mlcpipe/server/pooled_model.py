"""A model of a server's pool: where it comes from, and what state it is in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from mlcpipe.errors import UsageError
from mlcpipe.server.errors import ApiError
from mlcpipe.server.load_report import LoadReport

if TYPE_CHECKING:
    from mlcpipe.runtime.sampling_params import SamplingParams
    from mlcpipe.server.prefix_store import PrefixFolder

State = Literal["unloaded", "loading", "ready", "unloading", "failed"]
Kind = Literal["text", "embed", "rerank", "speech"]
MAKES: dict[Kind, str] = {
    "text": "writes text", "embed": "embeds texts", "rerank": "scores documents", "speech": "turns sound into text",
}  # fmt: skip
_PATHS: dict[Kind, str] = {
    "text": "/v1/chat/completions", "embed": "/v1/embeddings", "rerank": "/v1/rerank",
    "speech": "/v1/audio/transcriptions",
}  # fmt: skip


@dataclass(frozen=True)
class Room:
    """Bytes that a loaded model takes of a place: the memory of the host, or of a device."""

    place: str
    nbytes: int


@dataclass(frozen=True)
class ModelCard:
    """What is not known is empty: of a model that is not prepared, all but `capabilities`.

    about: as of `/v1/models`, with context_length and vocab_size; defaults: sampling settings that a request does not
    set, None for an encoder; dimensions: of an embedding; template: of chats, in Jinja; capabilities: in Ollama's words
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    defaults: SamplingParams | None = None
    dimensions: int | None = None
    template: str = ""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()


class ModelSource(Protocol):
    """Where a model comes from. `prepare`, `room` and `load` run in a thread, in this order, and may raise."""

    names: tuple[str, ...]
    kind: Kind | None  # None until it is prepared
    guess: Kind  # until then

    @property
    def about(self) -> dict[str, Any]:
        """Fields of `/v1/models` for a model that is not loaded."""

    @property
    def prefixes(self) -> PrefixFolder | None:
        """The folder of its saved prompts."""

    def card(self) -> ModelCard:
        """What it is; read in a thread at any time."""

    def prepare(self, report: LoadReport) -> None:
        """Download, convert and compile what is not a bundle yet."""

    def room(self) -> Room:
        """What it takes once loaded."""

    def load(self, report: LoadReport) -> Any:
        """Load it; the result's `service()` is called in the event loop."""

    def free(self) -> None:
        """Free the memory of a loaded model, whose service was closed and is known to nobody any more."""

    def stop(self) -> None:
        """End a running `prepare`, which then raises."""

    def check_removable(self) -> None:
        """Raises MlcpipeError where `remove` would find no file of the server's own."""

    def remove(self) -> None:
        """Remove the files of a model that is not loaded, those that are the server's own. Raises MlcpipeError."""


@dataclass(eq=False)
class Model:
    """A model of the pool; only the pool changes it."""

    source: ModelSource
    pinned: bool = False
    ttl_s: float | None = None
    state: State = "unloaded"
    service: Any = None
    leases: int = 0
    used_s: float = 0.0  # when it was last leased or released
    room: Room | None = None  # taken in the plan
    failure: ApiError | None = None
    failed_s: float = 0.0
    created: int = field(default_factory=lambda: int(time.time()))
    report: LoadReport = field(default_factory=LoadReport)
    copied: dict[str, str] = field(default_factory=dict)  # of its names, those that clients gave, and `key_of` them
    adapters: dict[str, Path] = field(default_factory=dict)  # name -> folder, kept while it is not loaded
    metrics_text: bytes = b""  # of the time before it was unloaded
    waiting: list[asyncio.Future[Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    committed: bool = False  # the task cannot be cancelled any more
    timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.source.names[0]

    @property
    def kind(self) -> Kind | None:
        """What it makes; None if not known yet."""
        return self.source.kind

    @property
    def own_names(self) -> list[str]:
        """All names, its adapters' too, but for the one that stands for any."""
        return [name for name in (*self.source.names, *self.adapter_names) if name != "*"]

    @property
    def about(self) -> Mapping[str, Any]:
        """Facts of its bundle, as far as they are known."""
        about: Mapping[str, Any] = self.source.about if self.service is None else self.service.facts.about
        return about

    @property
    def adapter_names(self) -> list[str]:
        """The names of its adapters, also of those that come back when it is loaded."""
        return list(self.adapters if self.service is None else self.service.adapters)

    def adapter_folder(self, name: str) -> Path | None:
        """The folder of an adapter, None for other names."""
        if self.service is None:
            return self.adapters.get(name)
        return self.service.adapters[name].path if name in self.service.adapters else None

    @property
    def metrics(self) -> Callable[[], bytes]:
        """Makes its metrics in Prometheus's text format: those of the time before, if it was unloaded."""
        if self.service is None:
            text = self.metrics_text
            return lambda: text
        return cast("Callable[[], bytes]", self.service.metrics.text)

    def answers_to(self, name: str) -> bool:
        """Whether this is its name, or that of one of its adapters."""
        return name in self.source.names or name in self.adapter_names


def check_kind(model: Model, kind: Kind) -> None:
    """Raises ApiError for a model that is known to make something else."""
    if model.kind not in (kind, None):
        assert model.kind is not None
        message = f"the model {model.name!r} {MAKES[model.kind]}; ask {_PATHS[model.kind]}"
        raise ApiError(400, message, code="unsupported_task", param="model")


class LoadedSource:
    """The source of a model that was loaded before."""

    def __init__(self, service: Any) -> None:
        self.names: tuple[str, ...] = service.facts.names
        self.guess: Kind = service.kind
        self.kind: Kind | None = service.kind
        self.about: dict[str, Any] = {}
        self.prefixes: PrefixFolder | None = None

    def card(self) -> ModelCard:
        """It is made of the service."""
        raise AssertionError("loaded already")

    def prepare(self, report: LoadReport) -> None:
        """Nothing to do."""

    def room(self) -> Room:
        """Not planned: it has all."""
        return Room("", 0)

    def load(self, report: LoadReport) -> Any:
        """It is never unloaded."""
        raise AssertionError("loaded already")

    def free(self) -> None:
        """It is never unloaded."""

    def stop(self) -> None:
        """Nothing runs."""

    def check_removable(self) -> None:
        """It is loaded as long as the server runs."""
        message = "a server of one model keeps it loaded"
        raise UsageError(message, next_step="stop the server, then: mlcpipe rm NAME")

    def remove(self) -> None:
        """As `check_removable`."""
        self.check_removable()
