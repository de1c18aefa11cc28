"""`mlcpipe serve`: a server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlcpipe.cli.options import from_fields
from mlcpipe.cli.serve_embeddings import loaded_embedder, manifest_of, say_ready
from mlcpipe.cli.serve_options import DEFAULT_ADAPTER_RANKS, ServeOptions
from mlcpipe.cli.serve_replicas import check_on_host, check_ray, serve_replicas, threads_of_each
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.devices import kind_of
from mlcpipe.errors import UsageError, last_line
from mlcpipe.loading import engine_device, is_bundle, prepare_bundle
from mlcpipe.support.defaults import AUTO, SERVE
from mlcpipe.support.files import HUB_SCHEME, OLLAMA_SCHEME, read_bounded
from mlcpipe.support.private import private_folder
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.bundle import Manifest
    from mlcpipe.server.run import Loaded, LoadedEmbedder

_MAX_WARM_BYTES = 4 << 20


class Bundles(NamedTuple):
    """The folders of the compiled models: the one to serve, the one that drafts, the semantic cache's encoder."""

    own: Path
    drafts: Path | None
    encoder: Path | None


@from_fields(ServeOptions)
def serve_command(options: ServeOptions) -> None:
    """Serve a model over HTTP, for programs that speak to OpenAI or Anthropic.

    The paths: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models`, `/tokenize`,
    `/detokenize`, `/health`, `/metrics`, and a page at `/`. A model that embeds texts has `/v1/embeddings` or
    `/v1/rerank` instead of those that answer.

    Examples:

    `mlcpipe serve`

    `mlcpipe serve hf://Qwen/Qwen3-0.6B --port 8080`

    `mlcpipe serve ./my-bundle --host 0.0.0.0 --api-key SECRET`
    """
    options.check()
    from mlcpipe.server.app import create_app
    from mlcpipe.server.guard import Rules, is_loopback, namespace_of
    from mlcpipe.server.run import bound_socket, check_tls, serve

    texts = [_system_message(path) for path in options.warm or ()]
    if options.ray is not None:
        check_ray(**{"prefixes": options.prefixes, "adapter-folder": options.adapter_folder})
        options = replace(options, threads=threads_of_each(options.ray, options.threads))
    if options.prefixes is not None:
        _make_folder(options.prefixes)
    if options.tls is not None:
        check_tls(options.tls)
    bound, host, console = bound_socket(options.host, options.port), options.host, stderr_console()
    with bound:
        loopback = is_loopback(bound.getsockname()[0])
        if loopback and options.no_key:
            raise UsageError("--no-key has no effect", expected="--host of a network", found=host)
        if not loopback and not options.keys and not options.no_key:
            raise UsageError(
                f"--host {host} opens the server to a network", expected="--api-key, or MLCPIPE_API_KEY",
                found="no key", next_step="--no-key lets everybody in",
            )  # fmt: skip
        bundles = _prepare(options)
        manifest = manifest_of(bundles.own, **options.for_answers())
        scheme = "http" if options.tls is None else "https"
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
        rules = Rules(
            options.keys, host, loopback, options.max_per_key, shares_prompts=options.share_prompts,
            adapter_folders=options.adapter_folder, origins=options.allow_origin or (), hosts=options.allow_host or (),
            tls=options.tls,
        )  # fmt: skip
        if not loopback and not options.keys:
            say(console, f"warning: everybody who reaches {host} may use the model")
        if "*" in rules.origins and not options.keys:
            say(console, "warning: every page that a browser here opens may use the model")
        if options.ray is not None:
            check_on_host(manifest, options.device)
        names = (options.name or _name_of(options.model, manifest), *(options.alias or ()))
        on_address = f"{names[0]} on {address}  (Ctrl-C stops the server)"
        header = " -H 'Authorization: Bearer YOUR_KEY'" if options.keys else ""
        embeds = manifest.model.embedding is not None
        namespaces = {namespace_of(owner) for owner in rules.owners.values()} or {""}

        def load_embedder() -> LoadedEmbedder:
            from mlcpipe import Embedder

            device, threads = engine_device(options.device), options.threads
            embedder = Embedder(bundles.own, context_length=options.context, device=device, threads=threads)
            return loaded_embedder(embedder, names, options.max_queue)

        def load() -> Loaded:
            return _load(options, bundles, names, texts, namespaces)

        def ready(loaded: Loaded) -> None:
            fit = loaded.engine.kv_tokens // loaded.engine.context_length
            say(console, f"the KV cache holds {fit} x {loaded.engine.context_length:,} tokens")
            say(console, on_address)
            body = '{"messages": [{"role": "user", "content": "Hello"}]}'
            say(console, f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'")

        drain_s = float(options.drain)
        if options.ray is not None:
            loads = load_embedder if embeds else load
            serve_replicas(bound, loads, rules, options.ray, drain_s, on_address, embeds=embeds)
        elif embeds:
            says = partial(say_ready, address=address, key=header)
            serve(bound, load_embedder, rules, says, drain_s, partial(create_app, serves="embeddings"))
        else:
            serve(bound, load, rules, ready, drain_s)


def _prepare(options: ServeOptions) -> Bundles:
    """Download, convert and compile what is not a bundle yet."""
    automatic = options.device == AUTO and options.target is None
    device = "cpu" if automatic and options.ray is not None else options.device  # replicas share its weights
    with console_progress(stderr_console()) as progress:
        prepare = partial(
            prepare_bundle, quantization=options.quantization, target=options.target,
            kv_cache_dtype=options.kv_cache_dtype, progress=progress,
        )  # fmt: skip
        own = prepare(
            options.model, device, best=options.best, adapters=options.with_adapters, draft_head=options.draft_head,
            task=SERVE, context=options.context,
        )  # fmt: skip
        if automatic and (options.draft_model or options.semantic_cache):
            device = kind_of(manifest_of(own).target.variants[0])  # whose memory is divided among all
        drafts = None if options.draft_model is None else prepare(options.draft_model, device)
        encoder = None
        if options.semantic_cache is not None:
            encoder = prepare_bundle(options.semantic_cache, device, progress=progress)
        return Bundles(own, drafts, encoder)


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


def _load(
    options: ServeOptions, bundles: Bundles, names: tuple[str, ...], texts: Iterable[str], namespaces: Iterable[str]
) -> Loaded:
    """The engine with its adapters, warmed, and what stands beside it."""
    from mlcpipe import Embedder
    from mlcpipe.runtime.loading import load_bundle
    from mlcpipe.runtime.serving.adapters import read_packed
    from mlcpipe.runtime.serving.open_drafts import open_draft_model
    from mlcpipe.runtime.serving.open_engine import open_engine
    from mlcpipe.runtime.stated_sampling import bundle_sampling
    from mlcpipe.runtime.text.open_tokenizer import open_tokenizer
    from mlcpipe.server.prefix_store import PrefixStore
    from mlcpipe.server.run import Loaded
    from mlcpipe.server.semantic_cache import SemanticCache
    from mlcpipe.server.service import DEFAULTS, Facts
    from tir_schedules.step_layout import RANK

    device, threads = engine_device(options.device), options.threads
    bundle, tokenizer = load_bundle(bundles.own, options.context, threads, device), open_tokenizer(bundles.own)
    smaller = None if bundles.drafts is None else open_draft_model(bundles.drafts, bundle, tokenizer, device)
    manifest = bundle.manifest
    about = {
        "model_type": manifest.model.model_type,
        "quantization": manifest.quantization,
        "target": manifest.target.name,
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "digest": manifest.checkpoint_hash,
        "device": bundle.device.description,
    }
    defaults = bundle_sampling(bundles.own, DEFAULTS)
    packed = [read_packed(path, name, manifest.model) for name, path in options.adapters.items()]
    if taken := set(names) & options.adapters.keys():
        raise UsageError("--adapter", expected="a name that the model does not have", found=taken.pop())
    ranks = options.adapter_ranks
    if ranks is None and (packed or options.adapter_folder):
        ranks = max(RANK * sum(one.blocks for one in packed), DEFAULT_ADAPTER_RANKS)
    serving = open_engine(
        bundle, max_queue=options.max_queue, sequences=options.sequences, step_s=options.step_ms / 1000,
        drafts=options.drafts, adapter_ranks=ranks or 0, draft_model=smaller,
        context_shift=options.context_shift, replicas=options.ray or 1, swap_bytes=options.swap_bytes,
    )  # fmt: skip
    adapters = {one.name: serving.load_adapter(one).result() for one in packed}
    store = None
    if options.prefixes is not None:
        store = PrefixStore(options.prefixes, manifest, serving.context_length)
    loaded = Loaded(serving, tokenizer, Facts(names, about, defaults), store, adapters)
    _warm(loaded, texts, namespaces)
    if bundles.encoder is None:
        return loaded
    embedder = Embedder(bundles.encoder, device=device, threads=threads)
    cache = SemanticCache(embedder, options.semantic_threshold, options.semantic_entries)
    return replace(loaded, semantic_cache=cache)


def _name_of(model: str | None, manifest: Manifest) -> str:
    """The last part of a checkpoint's path, or a hub's name without the revision; a bundle knows its checkpoint's."""
    if model is None:
        return "mlcpipe-demo"
    for scheme in (HUB_SCHEME, OLLAMA_SCHEME):
        if model.startswith(scheme):
            return model.removeprefix(scheme).partition("@")[0]
    path = Path(model).resolve()
    return manifest.name or path.name if is_bundle(path) else path.name
