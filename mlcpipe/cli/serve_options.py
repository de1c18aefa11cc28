"""The options of `mlcpipe serve`, and which of them exclude each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.options import (
    BestOption,
    ContextOption,
    ContextShiftOption,
    DeviceMemoryOption,
    DeviceOption,
    DraftHeadOption,
    KvCacheDtypeOption,
    MmprojOption,
    PictureRowsOption,
    QuantizationOption,
    StagesOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
)
from mlcpipe.errors import UsageError
from mlcpipe.support.defaults import AUTO
from mlcpipe.support.env import env

DEFAULT_PORT = 8000
DEFAULT_ADAPTER_RANKS = 128
DEFAULT_SIMILARITY = 0.95
DEFAULT_STEP_MS = 100


class DraftKind(str, Enum):
    """The source of drafts."""

    lookup = "lookup"
    off = "off"


class AccessLog(str, Enum):
    """The form of the lines about requests."""

    off = "off"
    json = "json"


@dataclass(frozen=True)
class ServeOptions:
    """Each field is an option of the command line, with its help and default."""

    model: Annotated[
        list[str] | None,
        typer.Argument(
            help="hf://org/name, a checkpoint folder, a GGUF file or a bundle; the demo model if left out. Several are "
            "loaded when a request names them."
        ),
    ] = None
    embed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL", help="Another model, which embeds texts or scores documents; several are allowed."
        ),
    ] = None
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder of bundles, checkpoints and GGUF files that requests may name."),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="One of several models to load at the start, and never unload."),
    ] = None
    ttl: Annotated[
        int | None,
        typer.Option(help="Seconds without a request after which a model is unloaded. (default: never)", min=0),
    ] = None
    memory_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes that several models may take together; the least recently used one leaves for another. "
            "(default: 80% of the free memory)",
            min=1,
        ),
    ] = None
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Where to listen: 0.0.0.0 is every network, a path that ends in .sock a Unix socket; several are "
            "allowed. (default: 127.0.0.1)"
        ),
    ] = None
    port: Annotated[int, typer.Option(help="The port; 0 takes any free one.", min=0, max=65535)] = DEFAULT_PORT
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send; several are allowed. MLCPIPE_API_KEY hides it from `ps`."),
    ] = None
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Let everybody use the model who reaches an address that is not loopback.")
    ] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages, extensions and desktop programs that may ask from a browser: http://localhost:3000, "
            "app://obsidian.md, chrome-extension://*; several are allowed.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another name of this server, as host.docker.internal; several are allowed."),
    ] = None
    allow_remote_images: Annotated[
        bool,
        typer.Option(
            "--allow-remote-images",
            help="Fetch pictures and videos of http(s) URLs, for models that see: from public addresses alone, at most "
            "32 MiB and 30 s a request.",
        ),
    ] = False
    tls_cert: Annotated[Path | None, typer.Option(help="A certificate in PEM: serve HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM.")] = None
    access_log: Annotated[
        AccessLog,
        typer.Option(
            help="Write a line for each request to the standard output: time, id, client, method, path, status, bytes, "
            "seconds; nothing of what it says."
        ),
    ] = AccessLog.off
    share_prompts: Annotated[
        bool,
        typer.Option(
            "--share-prompts", help="Share computed and saved prompts among all keys; else each key has its own."
        ),
    ] = False
    name: Annotated[str | None, typer.Option(help="The model's name for clients. (default: the checkpoint's)")] = None
    alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name that the model answers to; * is any, for clients that choose one themselves."),
    ] = None
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more gets 503.")] = 64
    sequences: Annotated[
        int | None,
        typer.Option(help="How many answers of the whole context fit the KV cache. (default: what memory allows)"),
    ] = None
    swap_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of the host's memory for keys and values of answers preempted on a GPU; 0 computes them "
            "again. (default: a quarter of the free memory)",
            min=0,
        ),
    ] = None
    step_ms: Annotated[
        int, typer.Option(help="Milliseconds that a step may take while an answer waits for its next token.")
    ] = DEFAULT_STEP_MS
    draft: Annotated[
        DraftKind,
        typer.Option(
            help="How to guess the next tokens, to check several at a time; answers do not change. "
            "lookup: from the prompt, the answer and the request's prediction, when that is faster."
        ),
    ] = DraftKind.lookup
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A smaller model with the same tokens that drafts the next tokens when that is faster; answers "
            "do not change.",
        ),
    ] = None
    draft_head: DraftHeadOption = None
    mmproj: MmprojOption = None
    max_per_key: Annotated[
        int | None, typer.Option(help="Concurrent requests per key; one more gets 429. (default: any number)")
    ] = None
    warm: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a system message, to compute before the first request; several are allowed."),
    ] = None
    prefixes: Annotated[
        Path | None,
        typer.Option(help="A folder where /v1/kv/save writes computed prompts and /v1/kv/restore finds them."),
    ] = None
    responses_store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file for the stored responses of /v1/responses, which outlives the server. (default: in memory)",
        ),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="A LoRA adapter that PEFT saved, for requests whose model is NAME; several are allowed.",
        ),
    ] = None
    adapter_ranks: Annotated[
        int | None,
        typer.Option(
            help="Total ranks of the loaded adapters, each rounded up to 16. (default with --adapter or "
            f"--adapter-folder: those of --adapter, at least {DEFAULT_ADAPTER_RANKS})"
        ),
    ] = None
    adapter_folder: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder whose adapters clients with a key may load while the server runs; several are allowed. "
            "(default: all folders)"
        ),
    ] = None
    semantic_cache: Annotated[
        str | None,
        typer.Option(
            metavar="ENCODER",
            help="An embedding model. A question that it finds similar to an earlier one, in an otherwise equal "
            "request, gets the earlier answer.",
        ),
    ] = None
    semantic_threshold: Annotated[
        float, typer.Option(help="Least cosine similarity of such questions.", min=0.0, max=1.0)
    ] = DEFAULT_SIMILARITY
    semantic_entries: Annotated[int, typer.Option(help="Answers kept in memory for that.")] = 1000
    ray: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Serve with N processes of Ray Serve, each with the model and its share of the cores. 1 with --stages "
            "is one model on several machines of a Ray cluster: --stages 2, or 20,8 for the layers of each.",
        ),
    ] = None
    drain: Annotated[int, typer.Option(help="Seconds that answers have to finish after Ctrl-C or SIGTERM.")] = 30
    context: ContextOption = None
    context_shift: ContextShiftOption = False
    picture_rows: PictureRowsOption = None
    device: DeviceOption = AUTO
    stages: StagesOption = None
    device_memory_bytes: DeviceMemoryOption = None
    threads: ThreadsOption = None
    target: TargetOption = None
    quantization: QuantizationOption = None
    best: BestOption = False
    kv_cache_dtype: KvCacheDtypeOption = None

    @cached_property
    def keys(self) -> list[str]:
        """The keys of clients, also that of the environment."""
        return [key for key in [*(self.api_key or ()), env().api_key or ""] if key]

    @property
    def hosts(self) -> list[str]:
        """Where to listen."""
        return self.host or ["127.0.0.1"]

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The certificate and its key."""
        return (self.tls_cert, self.tls_key) if self.tls_cert is not None and self.tls_key is not None else None

    @cached_property
    def adapters(self) -> dict[str, Path]:
        """Name -> folder of each --adapter. Raises UsageError."""
        folders: dict[str, Path] = {}
        for option in self.adapter or ():
            name, equals, folder = option.partition("=")
            if not equals or not name or not folder:
                raise UsageError("--adapter", expected="NAME=FOLDER", found=option)
            if name in folders:
                raise UsageError("--adapter", expected="each name once", found=name)
            folders[name] = Path(folder)
        return folders

    @property
    def first(self) -> str | None:
        """The model, the first of several; None is the demo model."""
        return self.model[0] if self.model else None

    @property
    def many(self) -> bool:
        """Whether models are loaded and unloaded while the server runs."""
        return len(self.model or ()) > 1 or bool(self.embed or self.models or self.ttl is not None)

    @property
    def staged(self) -> bool:
        """Whether the stages of a model are on machines of a Ray cluster."""
        return self.ray is not None and self.stages is not None

    @property
    def ttl_s(self) -> float | None:
        """As of a pool."""
        return None if self.ttl is None else float(self.ttl)

    def of_another(self, model: str) -> ServeOptions:
        """The options of a model that is not the first: without those of one model."""
        return replace(
            self, model=[model], name=None, alias=None, warm=None, adapter=None, draft_model=None, draft_head=None,
            mmproj=None, picture_rows=None, semantic_cache=None,
        )  # fmt: skip

    def adapter_ranks_for(self, packed_ranks: int) -> int:
        """Ranks to keep room for: --adapter-ranks, or for adapters of so many ranks, if any may be loaded."""
        if self.adapter_ranks is not None:
            return self.adapter_ranks
        return max(packed_ranks, DEFAULT_ADAPTER_RANKS) if self.adapters or self.adapter_folder else 0

    @property
    def drafts(self) -> bool:
        """Whether the server drafts at all."""
        return self.draft is not DraftKind.off

    @property
    def with_adapters(self) -> bool:
        """Whether the bundle needs forwards with adapters."""
        return bool(self.adapters or self.adapter_ranks or self.adapter_folder)

    def check(self) -> None:
        """Raises UsageError for numbers out of range, and options that exclude each other or have no effect."""
        check_at_least_one(
            context=self.context, threads=self.threads, sequences=self.sequences, step_ms=self.step_ms,
            picture_rows=self.picture_rows,
            max_queue=self.max_queue, max_per_key=self.max_per_key, drain=self.drain, adapter_ranks=self.adapter_ranks,
            semantic_entries=self.semantic_entries, ray=self.ray,
        )  # fmt: skip
        if self.api_key is not None and not all(self.api_key):
            raise UsageError("--api-key", expected="a key", found="nothing")
        if self.no_key and self.keys:
            raise UsageError("--no-key", expected="no --api-key and no MLCPIPE_API_KEY", found="a key")
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key", expected="both", found="one")
        for origin in self.allow_origin or ():
            if origin != "*" and not all(origin.partition("://")):
                raise UsageError("--allow-origin", expected="scheme://host, or *", found=origin)
        if self.name == "*":
            raise UsageError("--name", expected="a name", found="*", next_step="--alias '*' answers to any name")
        if self.draft_model is not None and not self.drafts:
            raise UsageError("--draft-model", expected="no --draft off", found=self.draft_model)
        if self.draft_head is not None and (self.draft_model is not None or not self.drafts):
            raise UsageError("--draft-head", expected="no --draft-model and no --draft off", found=self.draft_head)
        if self.picture_rows is not None and self.ray is not None:
            raise UsageError("--picture-rows", expected="no --ray, whose models see no pictures", found="both")
        if self.share_prompts and len(set(self.keys)) < 2:
            raise UsageError("--share-prompts has no effect", expected="two keys or more", found=len(set(self.keys)))
        if self.adapter_folder and not self.keys:
            raise UsageError("--adapter-folder has no effect", expected="--api-key", found="no key")
        if self.ray is not None and self.stages is None and "," in self.device:
            raise UsageError(
                "--ray", expected="a model on the CPU in one piece, or --stages", found=f"--device {self.device}"
            )
        if self.staged and self.ray != 1:
            raise UsageError("--ray with --stages", expected="--ray 1: one model", found=f"--ray {self.ray}")
        _ = self.adapters
        self._check_many()

    def _check_many(self) -> None:
        if not self.many:
            for name, value in (("pin", self.pin), ("memory-bytes", self.memory_bytes)):
                if value is not None:
                    raise UsageError(f"--{name} has no effect", expected="several models, or --ttl", found="one model")
        elif self.stages is not None or "," in self.device:
            raise UsageError("stages", expected="one model, without --ttl", found="several, or --ttl")
        elif self.ray is not None:
            raise UsageError("--ray", expected="one model, without --ttl", found="several, or --ttl")
        elif not self.model and (self.embed or self.models):
            alone = {
                "name": self.name, "alias": self.alias, "warm": self.warm, "adapter": self.adapter,
                "draft-model": self.draft_model, "draft-head": self.draft_head, "mmproj": self.mmproj,
                "picture-rows": self.picture_rows, "semantic-cache": self.semantic_cache,
            }  # fmt: skip
            given = next((name for name, value in alone.items() if value), None)
            if given is not None:
                raise UsageError(f"--{given} is for the first model that is named", expected="a model", found="none")

    def for_answers(self) -> dict[str, object]:
        """The options that only concern models that answer, true where they were given."""
        return {
            "sequences": self.sequences,
            "warm": self.warm,
            "prefixes": self.prefixes,
            "responses_store": self.responses_store,
            "adapter": self.adapter,
            "semantic_cache": self.semantic_cache,
            "adapter_ranks": self.adapter_ranks,
            "adapter_folder": self.adapter_folder,
            "share_prompts": self.share_prompts,
            "step_ms": self.step_ms != DEFAULT_STEP_MS,
            "draft": self.draft is not DraftKind.lookup,
            "draft_model": self.draft_model,
            "draft_head": self.draft_head,
            "mmproj": self.mmproj,
            "picture_rows": self.picture_rows,
            "context_shift": self.context_shift,
            "swap_bytes": self.swap_bytes,
            "allow_remote_images": self.allow_remote_images,
        }
