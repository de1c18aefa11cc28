"""`mlcpipe serve`: a server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlcpipe.cli.options import from_fields
from mlcpipe.cli.serve_embeddings import kind_of, loaded_embedder, loaded_transcriber, manifest_of, say_hears, say_ready
from mlcpipe.cli.serve_loading import Bundles, load, name_of, prepare
from mlcpipe.cli.serve_options import AccessLog, ServeOptions
from mlcpipe.cli.serve_replicas import check_on_host, check_ray, serve_replicas, threads_of_each
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError, last_line
from mlcpipe.loading import engine_device, prepare_bundle
from mlcpipe.support.files import read_bounded
from mlcpipe.support.private import private_folder
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.server.response_store import ResponseStore
    from mlcpipe.server.run import Loaded, LoadedEmbedder, LoadedTranscriber

_MAX_WARM_BYTES = 4 << 20


@from_fields(ServeOptions)
def serve_command(options: ServeOptions) -> None:
    """Serve a model over HTTP, for programs that speak to OpenAI or Anthropic.

    The paths: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models`, `/tokenize`,
    `/detokenize`, `/health`, `/metrics`, and a page at `/`. A model that embeds texts has `/v1/embeddings` or
    `/v1/rerank` instead of those that answer, one that hears `/v1/audio/transcriptions` and `/v1/audio/translations`.
    Several models are loaded when requests name them.

    Examples:

    `mlcpipe serve`

    `mlcpipe serve hf://Qwen/Qwen3-0.6B --port 8080`

    `mlcpipe serve ./my-bundle --host 0.0.0.0 --api-key SECRET`

    `mlcpipe serve ./chat ./coder --embed ./bge-small --ttl 600`
    """
    options.check()
    from mlcpipe.bundle.stages import check_one_device
    from mlcpipe.server.app import create_app
    from mlcpipe.server.guard import Rules, namespace_of
    from mlcpipe.server.listening import listening
    from mlcpipe.server.run import check_tls, serve

    texts = [_system_message(path) for path in options.warm or ()]
    if options.staged:
        from mlcpipe.cli.serve_stages import one_machine_only, serve_stages

        check_ray(one_machine_only(options), joins=True)
    elif options.ray is not None:
        alone = {
            "prefixes": options.prefixes, "adapter-folder": options.adapter_folder,
            "allow-remote-images": options.allow_remote_images, "responses-store": options.responses_store,
        }  # fmt: skip
        check_ray(alone)
        options = replace(options, threads=threads_of_each(options.ray, options.threads))
    if options.prefixes is not None:
        _make_folder(options.prefixes)
    if options.tls is not None:
        check_tls(options.tls)
    console = stderr_console()
    with listening(options.hosts, options.port) as listeners, _stored(options) as store:
        bound, first = [one.socket for one in listeners], listeners[0]
        loopback = all(one.local for one in listeners)
        host = next((one.host for one in listeners if not one.local), first.host)
        if loopback and options.no_key:
            raise UsageError("--no-key has no effect", expected="--host of a network", found=host)
        if not loopback and not options.keys and not options.no_key:
            raise UsageError(
                f"--host {host} opens the server to a network", expected="--api-key, or MLCPIPE_API_KEY",
                found="no key", next_step="--no-key lets everybody in",
            )  # fmt: skip
        scheme = "http" if options.tls is None else "https"
        address, curl = " and ".join(one.url(scheme) for one in listeners), first.curl(scheme)
        rules = Rules(
            options.keys, first.host, loopback, [one.host for one in listeners[1:]],
            [one.address for one in listeners if one.local], options.max_per_key, shares_prompts=options.share_prompts,
            adapter_folders=options.adapter_folder, origins=options.allow_origin or (), hosts=options.allow_host or (),
            tls=options.tls, logs_access=options.access_log is AccessLog.json,
        )  # fmt: skip
        if not loopback and not options.keys:
            say(console, f"warning: everybody who reaches {host} may use the model")
        if "*" in rules.origins and not options.keys:
            say(console, "warning: every page that a browser here opens may use the model")
        header = " -H 'Authorization: Bearer YOUR_KEY'" if options.keys else ""
        namespaces = {namespace_of(owner) for owner in rules.owners.values()} or {""}
        drain_s = float(options.drain)
        if options.many:
            from mlcpipe.cli.serve_many import models_of

            several = models_of(options, texts, namespaces)
            title = several.sources[0].names[0] + (f" and {more} more" if (more := len(several.sources) - 1) else "")

            def says_ready(loaded: Any) -> None:
                say(console, f"{title} on {address}  (Ctrl-C stops the server)")
                say(console, f"{curl}/v1/models{header}")

            serve(bound, lambda: several, rules, says_ready, drain_s, partial(create_app, serves="all", store=store))
            return
        if options.staged:

            def says_staged(name: str) -> None:
                say(console, f"{name} on {address}  (Ctrl-C stops the server)")

            serve_stages(bound, options, texts, rules, namespaces, says_staged)
            return
        bundles = _prepared(options)
        manifest = manifest_of(bundles.own, **options.for_answers())
        if options.ray is not None:
            check_one_device(bundles.own, manifest, "--ray")
            check_on_host(manifest, options.device)
        if options.allow_remote_images and manifest.model.vision is None:
            raise UsageError("--allow-remote-images has no effect", expected="a model that sees", found=options.first)
        names = (options.name or name_of(options.first, manifest), *(options.alias or ()))
        on_address = f"{names[0]} on {address}  (Ctrl-C stops the server)"
        kind = kind_of(manifest)
        embeds = kind in ("embed", "rerank")

        def load_embedder() -> LoadedEmbedder:
            from mlcpipe import Embedder

            device, threads = engine_device(options.device), options.threads
            embedder = Embedder(bundles.own, context_length=options.context, device=device, threads=threads)
            return loaded_embedder(embedder, names, options.max_queue)

        def load_transcriber() -> LoadedTranscriber:
            from mlcpipe import Transcriber

            transcriber = Transcriber(bundles.own, device=engine_device(options.device), threads=options.threads)
            return loaded_transcriber(transcriber, names, options.max_queue)

        def load_text() -> Loaded:
            return load(options, bundles, names, texts, namespaces)

        def ready(loaded: Loaded) -> None:
            fit = loaded.engine.kv_tokens // loaded.engine.context_length
            say(console, f"the KV cache holds {fit} x {loaded.engine.context_length:,} tokens")
            say(console, on_address)
            body = '{"messages": [{"role": "user", "content": "Hello"}]}'
            say(console, f"{curl}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'")

        if kind == "speech":
            if options.ray is not None or options.context is not None:
                name = "--context" if options.ray is None else "--ray"
                raise UsageError(f"{name} has no effect", where=bundles.own, found="a model that hears")
            hears = partial(say_hears, address=address, curl=curl, key=header)
            serve(bound, load_transcriber, rules, hears, drain_s, partial(create_app, serves="speech"))
        elif options.ray is not None:
            loads = load_embedder if embeds else load_text
            serve_replicas(bound, loads, rules, options.ray, drain_s, on_address, embeds=embeds)
        elif embeds:
            says = partial(say_ready, address=address, curl=curl, key=header)
            serve(bound, load_embedder, rules, says, drain_s, partial(create_app, serves="embeddings"))
        else:
            serve(bound, load_text, rules, ready, drain_s, partial(create_app, store=store))


def _prepared(options: ServeOptions) -> Bundles:
    """Download, convert and compile what is not a bundle yet."""
    with console_progress(stderr_console()) as progress:
        return prepare(options, partial(prepare_bundle, progress=progress))


@contextmanager
def _stored(options: ServeOptions) -> Iterator[ResponseStore | None]:
    """The responses of --responses-store; None without. Raises UsageError."""
    if options.responses_store is None:
        yield None
        return
    from mlcpipe.server.response_file import ResponseFile

    with closing(ResponseFile(options.responses_store)) as store:
        yield store


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
