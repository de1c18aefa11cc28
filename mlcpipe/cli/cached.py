"""`mlcpipe list`, `pull` and `rm`: the models in the cache, compiled and downloaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import (
    BestOption,
    CheckpointArgument,
    DeviceOption,
    JsonOption,
    QuantizationOption,
    TargetOption,
)
from mlcpipe.cli.terminal import cell, new_table, print_json, say, stderr_console, stdout_console
from mlcpipe.errors import UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.loading import prepare_bundle
from mlcpipe.support.closest import closest
from mlcpipe.support.defaults import AUTO, SERVE
from mlcpipe.support.env import env
from mlcpipe.support.files import HUB_SCHEME
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.bundle.cached import CachedModel

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def list_command(as_json: JsonOption = False) -> None:
    """List the models in the cache: compiled ones with their target and quantization, and downloads.

    Compiled models are in mlcpipe's cache (MLCPIPE_CACHE), downloads in the hub's, which other programs use too
    (HF_HOME). `mlcpipe rm` removes both.

    Examples:

    `mlcpipe list`

    `mlcpipe list --json`
    """
    models = models_in_cache()
    if as_json:
        print_json([_entry(model) for model in models])
        return
    from mlcpipe.bundle.cached import DEMO
    from mlcpipe.support.generated import shell_word

    console, now = stdout_console(), time.time()
    if not models:
        return say(console, "The cache has no models. Now type:  mlcpipe pull hf://org/name")
    table = new_table("name", "target", "quantization", "size", "last use")
    for column in table.columns[1:]:
        column.no_wrap = True
    for model in models:
        kind = (model.target, model.quantization) if model.bundle else ("download", "")
        table.add_row(*map(cell, (_name(model), *kind, byte_size(model.nbytes), age(now - model.used))))
    console.print(table)
    total = f"{byte_size(sum(model.nbytes for model in models))} in all"
    name = _name(models[0])
    say(console, f"\n{total}. Now type:  mlcpipe chat {'' if name == DEMO else shell_word(name)}".rstrip(), style="dim")


def pull_command(
    model: CheckpointArgument,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    best: BestOption = False,
    device: DeviceOption = AUTO,
) -> None:
    """Download and compile a model, so that a later `mlcpipe chat` with the same options starts at once.

    Examples:

    `mlcpipe pull hf://Qwen/Qwen3-0.6B`

    `mlcpipe pull hf://Qwen/Qwen3-0.6B --device vulkan --quantization q8f16_1`
    """
    with console_progress(stderr_console()) as progress:
        bundle = prepare_bundle(model, device, quantization, best=best, target=target, task=SERVE, progress=progress)
    from mlcpipe.bundle import read_manifest
    from mlcpipe.support.generated import shell_word

    about = read_manifest(bundle).model
    verb, text = ("chat", "") if about.embedding is None else ("embed", ' "a text"')
    verb = "transcribe FILE --model" if about.speech is not None else verb
    options = {"device": None if device == AUTO else device, "target": target, "quantization": quantization}
    words = [f"--{name} {shell_word(value)}" for name, value in options.items() if value is not None]
    words += ["--best"] * best
    say(stdout_console(), f"Now type:  {' '.join(['mlcpipe', verb, shell_word(model), *words])}{text}")


def rm_command(
    model: Annotated[str | None, typer.Argument(help="A name that `mlcpipe list` shows.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all models that `mlcpipe list` shows.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model from the cache: what was compiled of it, and its download.

    Folders of your own, bundles that `mlcpipe compile` wrote elsewhere, and Ollama's files stay.

    Examples:

    `mlcpipe rm hf://Qwen/Qwen3-0.6B`

    `mlcpipe rm --all --yes`
    """
    if (model is None) != everything:
        raise UsageError("what to remove", expected="a name that `mlcpipe list` shows, or --all",
                         found="neither" if model is None else "both")  # fmt: skip
    models = models_in_cache()
    chosen = models if model is None else called(models, model)
    if not chosen and model is not None:
        names = [_name(one) for one in models]
        raise UsageError(
            "no such model in the cache", expected=closest(model, names) if names else "none: the cache is empty",
            found=repr(model), next_step="`mlcpipe list` shows all",
        )  # fmt: skip
    console = stderr_console()
    for one in chosen:
        kind = f"{one.target}, {one.quantization}" if one.bundle else "download, which other programs may share"
        say(console, f"{_name(one)}  ({kind}, {byte_size(one.nbytes)})")
    if chosen and not yes and not _confirmed(len(chosen)):
        raise UsageError("nothing was removed", next_step="answer y, or add --yes")
    for one in chosen:
        remove_model(one)
    say(stdout_console(), f"removed {byte_size(sum(one.nbytes for one in chosen))}")


def age(seconds: float) -> str:
    """A time ago, for people."""
    for unit, length in _UNITS:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def models_in_cache() -> list[CachedModel]:
    """The bundles and downloads in the caches, the latest used first."""
    from mlcpipe.bundle.cached import cached_models
    from mlcpipe.checkpoint.hub_cache import download_bytes, downloaded

    models = cached_models(env().cache_dir)
    for model in models:
        if model.bundle is None:
            model.nbytes = download_bytes(downloaded(model.names[0]))
    return [model for model in models if model.bundle is not None or model.nbytes]


def _name(model: CachedModel) -> str:
    return model.names[0] if model.names else model.bundle.name if model.bundle else ""


def _is_called(model: CachedModel, name: str) -> bool:
    """Whether a user means this model: by a name, with or without `@main`, the path of a checkpoint, or the key."""
    from mlcpipe.bundle.cached import typed_name

    if model.bundle is not None and name == model.bundle.name:
        return True
    asked = {name, typed_name(name)}
    return any(_plain(one) in {_plain(text) for text in asked} for one in model.names)


def _plain(name: str) -> str:
    return name.replace("@main", "") if name.startswith(HUB_SCHEME) else name


def called(models: Sequence[CachedModel], name: str) -> list[CachedModel]:
    """Those that a user means by a name, see `mlcpipe rm`."""
    return [one for one in models if _is_called(one, name)]


def remove_model(model: CachedModel) -> None:
    """Remove a bundle, or a download. Raises MlcpipeError for one that is in use, and OSError."""
    from mlcpipe.bundle.cached import forget, remove_bundle
    from mlcpipe.checkpoint.hub_cache import downloaded, remove_download

    cache = env().cache_dir
    if model.bundle is not None:
        return remove_bundle(cache, model.bundle)
    remove_download(downloaded(model.names[0]))
    forget(cache, key="", name=model.names[0])


def _confirmed(count: int) -> bool:
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(f"Remove {'it' if count == 1 else f'these {count}'}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _entry(model: CachedModel) -> dict[str, object]:
    used = datetime.fromtimestamp(model.used, timezone.utc).isoformat(timespec="seconds")
    return {
        "name": _name(model),
        "names": model.names,
        "bundle": None if model.bundle is None else str(model.bundle),
        "target": model.target or None,
        "quantization": model.quantization or None,
        "bytes": model.nbytes,
        "last_use": used,
    }
