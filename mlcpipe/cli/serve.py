"""`mlcpipe serve`: a server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mlcpipe.cli.options import (
    ContextOption,
    ContextShiftOption,
    DeviceOption,
    DraftHeadOption,
    KvCacheDtypeOption,
    ModelArgument,
    QuantizationOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
)
from mlcpipe.cli.serve_embeddings import loaded_embedder, manifest_of, say_ready
from mlcpipe.cli.serve_replicas import check_on_host, check_ray, serve_replicas, threads_of_each
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.defaults import AUTO
from mlcpipe.env import env
from mlcpipe.errors import UsageError, last_line
from mlcpipe.files import HUB_SCHEME, OLLAMA_SCHEME, read_bounded
from mlcpipe.loading import engine_device, is_bundle, prepare_bundle
from mlcpipe.private import private_folder
from mlcpipe.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe import Engine
    from mlcpipe.bundle import Manifest
    from mlcpipe.server.run import Loaded, LoadedEmbedder

DEFAULT_PORT = 8000
DEFAULT_ADAPTER_RANKS = 128
DEFAULT_SIMILARITY = 0.95
DEFAULT_STEP_MS = 100
_MAX_WARM_BYTES = 4 << 20


class DraftKind(str, Enum):
    """The source of drafts."""

    lookup = "lookup"
    off = "off"


def serve_command(
    model: ModelArgument = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any free one.", min=0, max=65535)] = DEFAULT_PORT,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients must send; several are allowed. MLCPIPE_API_KEY hides it from `ps`."),
    ] = None,
    share_prompts: Annotated[
        bool,
        typer.Option(
            "--share-prompts", help="Share computed and saved prompts among all keys; else each key has its own."
        ),
    ] = False,
    name: Annotated[str | None, typer.Option(help="The model's name for clients. (default: the checkpoint's)")] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(help="Another name that the model answers to; * is any, for clients that choose one themselves."),
    ] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; one more gets 503.")] = 64,
    sequences: Annotated[
        int | None,
        typer.Option(help="How many answers of the whole context fit the KV cache. (default: what memory allows)"),
    ] = None,
    swap_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of the host's memory for keys and values of answers preempted on a GPU; 0 computes them "
            "again. (default: a quarter of the free memory)",
            min=0,
        ),
    ] = None,
    step_ms: Annotated[
        int, typer.Option(help="Milliseconds that a step may take while an answer waits for its next token.")
    ] = DEFAULT_STEP_MS,
    draft: Annotated[
        DraftKind,
        typer.Option(
            help="How to guess the next tokens, to check several at a time; answers do not change. "
            "lookup: from the prompt, the answer and the request's prediction, when that is faster."
        ),
    ] = DraftKind.lookup,
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="A smaller model with the same tokens that drafts the next tokens when that is faster; answers "
            "do not change.",
        ),
    ] = None,
    draft_head: DraftHeadOption = None,
    max_per_key: Annotated[
        int | None, typer.Option(help="Concurrent requests per key; one more gets 429. (default: any number)")
    ] = None,
    warm: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a system message, to compute before the first request; several are allowed."),
    ] = None,
    prefixes: Annotated[
        Path | None,
        typer.Option(help="A folder where /v1/kv/save writes computed prompts and /v1/kv/restore finds them."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="A LoRA adapter that PEFT saved, for requests whose model is NAME; several are allowed.",
        ),
    ] = None,
    adapter_ranks: Annotated[
        int | None,
        typer.Option(
            help="Total ranks of the loaded adapters, each rounded up to 16. (default with --adapter or "
            f"--adapter-folder: those of --adapter, at least {DEFAULT_ADAPTER_RANKS})"
        ),
    ] = None,
    adapter_folder: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder whose adapters clients with a key may load while the server runs; several are allowed. "
            "(default: all folders)"
        ),
    ] = None,
    semantic_cache: Annotated[
        str | None,
        typer.Option(
            metavar="ENCODER",
            help="An embedding model. A question that it finds similar to an earlier one, in an otherwise equal "
            "request, gets the earlier answer.",
        ),
    ] = None,
    semantic_threshold: Annotated[
        float, typer.Option(help="Least cosine similarity of such questions.", min=0.0, max=1.0)
    ] = DEFAULT_SIMILARITY,
    semantic_entries: Annotated[int, typer.Option(help="Answers kept in memory for that.")] = 1000,
    ray: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Serve with N processes of Ray Serve, each with the model and its share of the cores."
        ),
    ] = None,
    drain: Annotated[int, typer.Option(help="Seconds that answers have to finish after Ctrl-C or SIGTERM.")] = 30,
    context: ContextOption = None,
    context_shift: ContextShiftOption = False,
    device: DeviceOption = AUTO,
    threads: ThreadsOption = None,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
) -> None:
    """Serve a model over HTTP, for programs that speak to OpenAI or Anthropic.

    The paths: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models`, `/tokenize`,
    `/detokenize`, `/health`, `/metrics`, and a page at `/`. A model that embeds texts has `/v1/embeddings` or
    `/v1/rerank` instead of those that answer.

    Examples:

    `mlcpipe serve`

    `mlcpipe serve hf://Qwen/Qwen3-0.6B --port 8080`

    `mlcpipe serve ./my-bundle --host 0.0.0.0 --api-key SECRET`
    """
    check_at_least_one(
        context=context, threads=threads, sequences=sequences, step_ms=step_ms, max_queue=max_queue,
        max_per_key=max_per_key, drain=drain, adapter_ranks=adapter_ranks, semantic_entries=semantic_entries, ray=ray,
    )  # fmt: skip
    from mlcpipe import Embedder, Engine

    try:
        from mlcpipe.server.app import create_app
        from mlcpipe.server.guard import Rules, is_loopback, namespace_of
        from mlcpipe.server.run import bound_socket, serve
        from mlcpipe.server.semantic_cache import SemanticCache
    except ImportError as error:
        raise UsageError(
            "a server needs more packages", found=f"no {error.name}", next_step="pip install 'mlcpipe[server]'"
        ) from None
    keys = [key for key in [*(api_key or ()), env().api_key or ""] if key]
    if api_key is not None and not all(api_key):
        raise UsageError("--api-key", expected="a key", found="nothing")
    if name == "*":
        raise UsageError("--name", expected="a name", found="*", next_step="--alias '*' answers to any name")
    if draft_model is not None and draft is DraftKind.off:
        raise UsageError("--draft-model", expected="no --draft off", found=draft_model)
    if draft_head is not None and (draft_model is not None or draft is DraftKind.off):
        raise UsageError("--draft-head", expected="no --draft-model and no --draft off", found=draft_head)
    if share_prompts and len(set(keys)) < 2:
        raise UsageError("--share-prompts has no effect", expected="two keys or more", found=len(set(keys)))
    if adapter_folder and not keys:
        raise UsageError("--adapter-folder has no effect", expected="--api-key", found="no key")
    folders = _adapter_folders(adapter or ())
    texts = [_system_message(path) for path in warm or ()]
    if ray is not None:
        check_ray(**{"prefixes": prefixes, "adapter-folder": adapter_folder})
        threads = threads_of_each(ray, threads)
    if prefixes is not None:
        _make_folder(prefixes)
    bound = bound_socket(host, port)
    console = stderr_console()
    with bound:
        with console_progress(console) as progress:
            bundle = prepare_bundle(
                model, device, quantization, target=target, kv_cache_dtype=kv_cache_dtype,
                adapters=bool(folders or adapter_ranks or adapter_folder), draft_head=draft_head, progress=progress,
            )  # fmt: skip
            drafts = None
            if draft_model is not None:
                drafts = prepare_bundle(
                    draft_model, device, quantization, target=target, kv_cache_dtype=kv_cache_dtype, progress=progress
                )
            encoder = None if semantic_cache is None else prepare_bundle(semantic_cache, device, progress=progress)
        changed = {
            "semantic_cache": semantic_cache,
            "adapter_ranks": adapter_ranks,
            "adapter_folder": adapter_folder,
            "share_prompts": share_prompts,
            "step_ms": step_ms != DEFAULT_STEP_MS,
            "draft": draft is not DraftKind.lookup,
            "draft_model": draft_model,
            "draft_head": draft_head,
            "context_shift": context_shift,
            "swap_bytes": swap_bytes,
        }
        manifest = manifest_of(bundle, sequences=sequences, warm=warm, prefixes=prefixes, adapter=adapter, **changed)
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{bound.getsockname()[1]}"

        loopback = is_loopback(bound.getsockname()[0])
        rules = Rules(keys, host, loopback, max_per_key, shares_prompts=share_prompts, adapter_folders=adapter_folder)
        namespaces = {namespace_of(owner) for owner in rules.owners.values()} or {""}
        if not loopback and not keys:
            say(console, f"warning: everybody who reaches {host} may use the model: set --api-key")
        if ray is not None:
            check_on_host(manifest, device)
        names = (name or _name_of(model, manifest), *(alias or ()))
        on_address = f"{names[0]} on {address}  (Ctrl-C stops the server)"
        header = " -H 'Authorization: Bearer YOUR_KEY'" if keys else ""
        if manifest.model.embedding is not None:

            def load_embedder() -> LoadedEmbedder:
                embedder = Embedder(bundle, context_length=context, device=engine_device(device), threads=threads)
                return loaded_embedder(embedder, names, max_queue)

            if ray is not None:
                serve_replicas(bound, load_embedder, rules, ray, float(drain), on_address, embeds=True)
                return
            says = partial(say_ready, address=address, key=header)
            serve(bound, load_embedder, rules, says, float(drain), partial(create_app, embeds=True))
            return

        def load() -> Loaded:
            engine = Engine(bundle, context_length=context, device=engine_device(device), threads=threads)
            plan = EnginePlan(
                max_queue, sequences, step_ms / 1000, draft is not DraftKind.off, adapter_ranks, context_shift,
                ray or 1, swap_bytes,
            )  # fmt: skip
            smaller = None if drafts is None else _draft_model(drafts, engine, engine_device(device))
            loaded = _load(engine, names, plan, folders, prefixes, smaller, bool(adapter_folder))
            _warm(loaded, texts, namespaces)
            if encoder is not None:
                embedder = Embedder(encoder, device=engine_device(device), threads=threads)
                cache = SemanticCache(embedder, semantic_threshold, semantic_entries)
                loaded = replace(loaded, semantic_cache=cache)
            return loaded

        def ready(loaded: Loaded) -> None:
            fit = loaded.engine.kv_tokens // loaded.engine.context_length
            say(console, f"the KV cache holds {fit} x {loaded.engine.context_length:,} tokens")
            say(console, on_address)
            body = '{"messages": [{"role": "user", "content": "Hello"}]}'
            say(console, f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'")

        if ray is not None:
            serve_replicas(bound, load, rules, ray, float(drain), on_address, embeds=False)
        else:
            serve(bound, load, rules, ready, float(drain))


def _system_message(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_WARM_BYTES, UsageError, "the file of --warm").decode()
    except UnicodeDecodeError as error:
        raise UsageError("the file of --warm", where=path, expected="text in UTF-8", found=last_line(error)) from None


def _make_folder(folder: Path) -> None:
    try:
        private_folder(folder)
    except OSError as error:
        raise UsageError("--prefixes", where=folder, expected="a folder", found=error.strerror) from None


def _warm(loaded: Loaded, texts: Iterable[str], namespaces: Iterable[str]) -> None:
    """Compute the beginning of conversations with these system messages in advance, in each namespace."""
    from mlcpipe.runtime.sampling_params import SamplingParams
    from mlcpipe.runtime.serving.interface import Request
    from mlcpipe.server.prompts import system_tokens

    for text, namespace in itertools.product(texts, namespaces):
        tokens = system_tokens(loaded.tokenizer, text)
        for event in loaded.engine.submit(Request(tokens, 1, SamplingParams(temperature=0.0), namespace=namespace)):
            if event.error is not None:
                raise event.error


class EnginePlan(NamedTuple):
    """The options of `open_engine`, which explains them."""

    max_queue: int
    sequences: int | None
    step_s: float
    drafts: bool
    adapter_ranks: int | None
    context_shift: bool
    replicas: int
    swap_bytes: int | None


def _adapter_folders(options: Iterable[str]) -> dict[str, Path]:
    """Name -> folder of each --adapter. Raises UsageError."""
    folders: dict[str, Path] = {}
    for option in options:
        name, equals, folder = option.partition("=")
        if not equals or not name or not folder:
            raise UsageError("--adapter", expected="NAME=FOLDER", found=option)
        if name in folders:
            raise UsageError("--adapter", expected="each name once", found=name)
        folders[name] = Path(folder)
    return folders


def _draft_model(bundle: Path, engine: Engine, device: str | None) -> Engine:
    """The engine of a draft model. Raises UsageError."""
    from mlcpipe import Engine
    from mlcpipe.bundle import read_manifest
    from mlcpipe.runtime.serving.draft_model import check_pair

    context = min(engine.context_length, read_manifest(bundle).model.context_length)
    smaller = Engine(bundle, context_length=context, device=device, threads=engine.threads)
    check_pair(engine.tokenizer, smaller.tokenizer)
    return smaller


def _load(
    engine: Engine,
    names: tuple[str, ...],
    plan: EnginePlan,
    adapters: Mapping[str, Path],
    folder: Path | None,
    draft_model: Engine | None,
    clients_load: bool,
) -> Loaded:
    from mlcpipe.runtime.serving.adapters import read_packed
    from mlcpipe.runtime.serving.open_engine import open_engine
    from mlcpipe.runtime.stated_sampling import bundle_sampling
    from mlcpipe.server.prefix_store import PrefixStore
    from mlcpipe.server.run import Loaded
    from mlcpipe.server.service import DEFAULTS, Facts
    from tir_schedules.step_layout import RANK

    manifest = engine.manifest
    about = {
        "model_type": manifest.model.model_type,
        "quantization": manifest.quantization,
        "target": manifest.target.name,
        "device": engine.device,
    }
    defaults = bundle_sampling(engine.path, DEFAULTS)
    tokenizer = engine.tokenizer
    packed = [read_packed(path, name, manifest.model) for name, path in adapters.items()]
    if taken := set(names) & adapters.keys():
        raise UsageError("--adapter", expected="a name that the model does not have", found=taken.pop())
    ranks = plan.adapter_ranks
    if ranks is None and (packed or clients_load):
        ranks = max(RANK * sum(one.blocks for one in packed), DEFAULT_ADAPTER_RANKS)
    plan = plan._replace(adapter_ranks=ranks or 0)
    serving = open_engine(
        engine.model, draft_model=None if draft_model is None else draft_model.model, **plan._asdict()
    )
    loaded = {one.name: serving.load_adapter(one).result() for one in packed}
    store = None
    if folder is not None:
        store = PrefixStore(folder, manifest, serving.context_length)
    return Loaded(serving, tokenizer, Facts(names, about, defaults), store, loaded)


def _name_of(model: str | None, manifest: Manifest) -> str:
    """The last part of a checkpoint's path, or a hub's name without the revision; a bundle knows its checkpoint's."""
    if model is None:
        return "mlcpipe-demo"
    for scheme in (HUB_SCHEME, OLLAMA_SCHEME):
        if model.startswith(scheme):
            return model.removeprefix(scheme).partition("@")[0]
    path = Path(model).resolve()
    return manifest.name or path.name if is_bundle(path) else path.name
