"""`mlcpipe serve`: a server with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import (
    ContextOption,
    DeviceOption,
    KvCacheDtypeOption,
    ModelArgument,
    QuantizationOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
)
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
    from mlcpipe.server.run import Loaded

DEFAULT_PORT = 8000
_MAX_WARM_BYTES = 4 << 20


class DraftKind(str, Enum):
    """Where drafts of answers come from."""

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
    step_ms: Annotated[
        int, typer.Option(help="Milliseconds that a step may take while somebody waits for the next token.")
    ] = 100,
    draft: Annotated[
        DraftKind,
        typer.Option(
            help="Where tokens that may come next are looked up, to check several at a time; no answer changes by it. "
            "lookup: in the prompt, the answer and the request's prediction, where that is faster."
        ),
    ] = DraftKind.lookup,
    max_per_key: Annotated[
        int | None, typer.Option(help="Requests at once for each key; one more gets 429. (default: any number)")
    ] = None,
    warm: Annotated[
        list[Path] | None,
        typer.Option(help="A file with a system message, to compute before the first request; several are allowed."),
    ] = None,
    prefixes: Annotated[
        Path | None,
        typer.Option(help="A folder where /v1/kv/save writes computed prompts and /v1/kv/restore finds them."),
    ] = None,
    drain: Annotated[int, typer.Option(help="Seconds that answers have to finish after Ctrl-C or SIGTERM.")] = 30,
    context: ContextOption = None,
    device: DeviceOption = AUTO,
    threads: ThreadsOption = None,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
) -> None:
    """Serve a model over HTTP, for programs that speak to OpenAI or Anthropic.

    The paths: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/messages`, `/v1/models`, `/tokenize`,
    `/detokenize`, `/health`, `/metrics`, and a page at `/`.

    Examples:

    `mlcpipe serve`

    `mlcpipe serve hf://Qwen/Qwen3-0.6B --port 8080`

    `mlcpipe serve ./my-bundle --host 0.0.0.0 --api-key SECRET`
    """
    check_at_least_one(
        context=context, threads=threads, sequences=sequences, step_ms=step_ms, max_queue=max_queue,
        max_per_key=max_per_key, drain=drain,
    )  # fmt: skip
    from mlcpipe import Engine

    try:
        from mlcpipe.server.guard import Rules
        from mlcpipe.server.run import bound_socket, serve
    except ImportError as error:
        raise UsageError(
            "a server needs more packages", found=f"no {error.name}", next_step="pip install 'mlcpipe[server]'"
        ) from None
    keys = [key for key in [*(api_key or ()), env().api_key or ""] if key]
    if api_key is not None and not all(api_key):
        raise UsageError("--api-key", expected="a key", found="nothing")
    if name == "*":
        raise UsageError("--name", expected="a name", found="*", next_step="--alias '*' answers to any name")
    texts = [_system_message(path) for path in warm or ()]
    if prefixes is not None:
        _make_folder(prefixes)
    bound = bound_socket(host, port)
    console = stderr_console()
    with bound:
        with console_progress(console) as progress:
            bundle = prepare_bundle(
                model, device, quantization, target=target, kv_cache_dtype=kv_cache_dtype, progress=progress
            )
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{bound.getsockname()[1]}"

        def load() -> Loaded:
            engine = Engine(bundle, context_length=context, device=engine_device(device), threads=threads)
            names = (name or _name_of(model, engine.manifest), *(alias or ()))
            loaded = _load(engine, names, max_queue, sequences, step_ms / 1000, draft is not DraftKind.off, prefixes)
            _warm(loaded, texts)
            return loaded

        def ready(loaded: Loaded) -> None:
            fit = loaded.engine.kv_tokens // loaded.engine.context_length
            say(console, f"the KV cache holds {fit} x {loaded.engine.context_length:,} tokens")
            key = " -H 'Authorization: Bearer YOUR_KEY'" if keys else ""
            say(console, f"{loaded.facts.names[0]} on {address}  (Ctrl-C stops the server)")
            body = '{"messages": [{"role": "user", "content": "Hello"}]}'
            say(console, f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")

        serve(bound, load, Rules(keys, host, max_per_key), ready, float(drain))


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


def _warm(loaded: Loaded, texts: Iterable[str]) -> None:
    """Compute what conversations with these system messages begin with, before anybody asks."""
    from mlcpipe.runtime.sampling_params import SamplingParams
    from mlcpipe.runtime.serving.interface import Request
    from mlcpipe.server.prompts import system_tokens

    for text in texts:
        tokens = system_tokens(loaded.tokenizer, text)
        for event in loaded.engine.submit(Request(tokens, 1, SamplingParams(temperature=0.0))):
            if event.error is not None:
                raise event.error


def _load(
    engine: Engine,
    names: tuple[str, ...],
    max_queue: int,
    sequences: int | None,
    step_s: float,
    drafts: bool,
    folder: Path | None,
) -> Loaded:
    from mlcpipe.errors import BundleError
    from mlcpipe.json_files import read_json_object
    from mlcpipe.runtime.serving.open_engine import open_engine
    from mlcpipe.server.prefix_store import PrefixStore
    from mlcpipe.server.run import Loaded
    from mlcpipe.server.service import Facts

    manifest, path = engine.manifest, engine.path / "generation_config.json"
    about = {
        "model_type": manifest.model.model_type,
        "quantization": manifest.quantization,
        "target": manifest.target.name,
        "device": engine.device,
    }
    defaults = read_json_object(path, limit=16 << 20, error=BundleError) if path.is_file() else {}
    tokenizer = engine.tokenizer
    serving = open_engine(engine.model, max_queue=max_queue, sequences=sequences, step_s=step_s, drafts=drafts)
    store = None
    if folder is not None:
        serving.check_savable()
        store = PrefixStore(folder, manifest, serving.context_length)
    return Loaded(serving, tokenizer, Facts(names, about, defaults), store)


def _name_of(model: str | None, manifest: Manifest) -> str:
    """The last part of a checkpoint's folder, all of a hub's name but the revision; a bundle knows its checkpoint's."""
    if model is None:
        return "mlcpipe-demo"
    for scheme in (HUB_SCHEME, OLLAMA_SCHEME):
        if model.startswith(scheme):
            return model.removeprefix(scheme).partition("@")[0]
    path = Path(model).resolve()
    return manifest.name or path.name if is_bundle(path) else path.name
