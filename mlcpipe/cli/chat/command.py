"""`mlcpipe chat`: talk to a model, once or for as long as you like."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlcpipe.cli.chat.settings import Settings
from mlcpipe.cli.chat.stats import SpeedLine
from mlcpipe.cli.options import (
    AdapterOption,
    BestOption,
    ContextOption,
    ContextShiftOption,
    DeviceMemoryOption,
    DeviceOption,
    JsonOption,
    KvCacheDtypeOption,
    MmprojOption,
    ModelArgument,
    PictureRowsOption,
    QuantizationOption,
    StagesOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
    option_name,
    sampling_options,
    stages_of,
)
from mlcpipe.cli.terminal import say, stderr_console
from mlcpipe.errors import UsageError, naming
from mlcpipe.loading import engine_device, prepare_bundle
from mlcpipe.support.defaults import AUTO, CHAT, THINKING_EFFORTS, WRITE
from mlcpipe.support.env import env
from mlcpipe.support.progress import console_progress
from mlcpipe.support.resources import model_title, seeing_model_path

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe import Engine
    from mlcpipe.cli.chat.session import Session
    from mlcpipe.compiler.automatic import Place

_IN_BROWSER = "In the browser"


@sampling_options
def chat_command(
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this, print the answer and exit.")] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Show a picture with the first question (JPEG, PNG, WebP or GIF); may be repeated. "
            "Without MODEL, it is shown to the embedded model that sees."
        ),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(help="Show frames of a video with the first question (MP4, WebM, AVI, …); may be repeated."),
    ] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    best: BestOption = False,
    mmproj: MmprojOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    device: DeviceOption = AUTO,
    stages: StagesOption = None,
    device_memory_bytes: DeviceMemoryOption = None,
    threads: ThreadsOption = None,
    context: ContextOption = None,
    context_shift: ContextShiftOption = False,
    picture_rows: PictureRowsOption = None,
    adapter: AdapterOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    allow_control_tokens: Annotated[
        bool,
        typer.Option(
            "--allow-control-tokens",
            help="Let control tokens that a message writes, such as <|im_end|>, act as such; by default they are text.",
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option("--session", help="Continue the chat in this file, if it exists, and save it there at the end."),
    ] = None,
    as_json: JsonOption = False,
    stats: Annotated[bool, typer.Option(help="Show speeds after each answer.")] = True,
    hide_thinking: Annotated[
        bool,
        typer.Option("--hide-thinking", help="Show answers without the thoughts before them, which are dim."),
    ] = False,
    reasoning_effort: Annotated[
        str | None,
        typer.Option(help="How much a model that takes an effort, such as gpt-oss, thinks: low, medium or high."),
    ] = None,
    *,
    sampling: dict[str, float | bool],
    web: Annotated[
        bool,
        typer.Option("--web", help="Chat in the browser, on its GPU.", rich_help_panel=_IN_BROWSER),
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="The port on 127.0.0.1.", min=0, max=65535, rich_help_panel=_IN_BROWSER),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the browser.", rich_help_panel=_IN_BROWSER)] = True,
) -> None:
    """Talk to a model. A checkpoint is compiled on first use and kept in the cache; a bundle starts at once.

    A bundle is a program: its native code runs. If you neither compiled it nor trust its signer (`mlcpipe trust`), a
    line on stderr says so.

    On a terminal it is a conversation (`/help` lists its commands). With `--prompt`, or text on stdin, it answers once:
    all lines of stdin are one prompt, which follows that of `--prompt`. The answer goes to stdout, speeds to stderr.

    Examples:

    `mlcpipe chat`

    `mlcpipe chat hf://Qwen/Qwen3-0.6B --prompt "Why is the sky blue?" --temperature 0`

    `cat notes.txt | mlcpipe chat ./my-bundle --prompt "Summarize:"`

    `mlcpipe chat ./Qwen3-0.6B --no-think`

    `mlcpipe chat ./Qwen3-0.6B --device vulkan`

    `mlcpipe chat ./Qwen3-30B-A3B --device vulkan,cpu`

    `mlcpipe chat --image examples/shapes.png --prompt "What is in this picture?"`

    `mlcpipe chat hf://HuggingFaceTB/SmolVLM2-500M-Video-Instruct --image photo.jpg --prompt "What is this?"`

    `mlcpipe chat --session long.chat`

    `mlcpipe chat --web`
    """
    if web:
        from mlcpipe.cli.web import chat_in_browser

        others = {"prompt": prompt, "image": image, "video": video, "system": system, "context": context,
                  "mmproj": mmproj, "kv_cache_dtype": kv_cache_dtype, "context-shift": context_shift,
                  "picture-rows": picture_rows,
                  "raw": raw, "session": file, "json": as_json,
                  "allow-control-tokens": allow_control_tokens,
                  "no-stats": not stats, "hide-thinking": hide_thinking, "reasoning-effort": reasoning_effort,
                  "threads": threads, "device": engine_device(device), "adapter": adapter,
                  "stages": stages, "device-memory-bytes": device_memory_bytes}  # fmt: skip
        if sampling.get("think") is False:
            others["no-think"] = True
        given = {option_name(key): value for key, value in (sampling | others).items()}
        return chat_in_browser(model, target, quantization, best=best, port=port, show=browser, given=given)
    from mlcpipe.cli.chat.session import Session
    from mlcpipe.cli.chat.single_prompt import ask_once, question_of  # needs pydantic

    if port is not None or not browser:
        raise UsageError("--port and --no-browser are for --web", next_step="add --web")
    check_at_least_one(context=context, threads=threads, picture_rows=picture_rows)
    values = _with_effort(sampling, reasoning_effort)
    Settings().with_values(values)  # checked before anything is compiled
    if raw and system:
        raise UsageError("--raw has no place for a --system message", next_step="leave one of them out")
    if file is not None and adapter is not None:
        raise UsageError("--session saves no chats with an --adapter", next_step="leave one of them out")
    if raw and (image or video):
        name = "an --image" if image else "a --video"
        raise UsageError(f"--raw has no place for {name}", next_step="leave one of them out")
    if raw and "think" in values:
        raise UsageError("--raw has no thinking to switch", next_step="leave one of them out")
    if raw and allow_control_tokens:
        raise UsageError("--raw allows control tokens anyway", next_step="leave --allow-control-tokens out")
    console = stderr_console()
    if model is None and image:
        model = str(seeing_model_path())
        say(console, "Without MODEL, a toy answers that knows a few shapes, colours and digits.", style="dim")
    question = question_of(prompt, as_json=as_json, console=console)
    places: list[Place] = []
    reasons: list[Place] = []  # for what `auto` chose
    with console_progress(console) as progress:
        bundle = prepare_bundle(
            model, device, quantization, best=best, target=target, kv_cache_dtype=kv_cache_dtype,
            adapters=adapter is not None, mmproj=mmproj, task=WRITE if raw else CHAT, context=context,
            stages=stages_of(stages), device_memory_bytes=device_memory_bytes,
            chosen=reasons.append if question is None else None, placed=places.append, progress=progress,
        )  # fmt: skip
    with naming(model_title(model), bundle):
        engine = _open(
            bundle, console, context_length=context, threads=threads, device=engine_device(device, *places),
            adapter=adapter, context_shift=context_shift, picture_rows=picture_rows,
        )  # fmt: skip
        if not raw:
            engine.tokenizer.chat_template()  # raises without one
    session = Session(
        engine,
        Settings(engine.default_sampling).with_values(values),
        system=system,
        raw=raw,
        model=model_title(model),
        allow_control_tokens=allow_control_tokens,
    )
    if file is not None:
        session.resume(file, values, system)
    for kind, paths in (("pictures", image), ("videos", video)):
        for path in paths or ():
            session.show(path, kind)
    describe = SpeedLine(engine, console)
    if question is None:
        about = _about(engine, model, device, target, *reasons)
        _converse(session, engine.context_length, about, describe, show_stats=stats, hide_thinking=hide_thinking)
    else:
        ask_once(session, question, describe if stats else None, as_json=as_json, hide_thinking=hide_thinking)
    if file is not None:
        session.save(file)


def _with_effort(sampling: Mapping[str, float | bool], effort: str | None) -> dict[str, float | str]:
    if effort is None:
        return {**sampling}
    if effort not in THINKING_EFFORTS:
        expected = f"one of {', '.join(THINKING_EFFORTS)}"
        raise UsageError("--reasoning-effort", expected=expected, found=repr(effort)[:60])
    if "think" in sampling:
        raise UsageError("--reasoning-effort says that the model thinks", next_step="leave --think or --no-think out")
    return {**sampling, "think": effort}


def _open(bundle: Path, console: Console, **options: Any) -> Engine:
    from mlcpipe import Engine

    if not console.is_terminal:
        return Engine(bundle, **options)
    with console_progress(console, lasting=False) as progress:
        progress.stage("loading")
        return Engine(bundle, **options, progress=progress)


def _about(
    engine: Engine, model: str | None, device: str, target: str | None, place: Place | None = None
) -> list[tuple[str, str]]:
    """The model, and where it runs and why; `place` was chosen for a checkpoint."""
    manifest = engine.manifest
    why = "what the bundle is for" if place is None else place.why
    if device != AUTO or target is not None:
        why = f"as {'--target' if device == AUTO else '--device'} says"
    threads = f" ({engine.threads} thread{'' if engine.threads == 1 else 's'})" if engine.on_host else ""
    return [
        ("model", f"{model_title(model)} · {manifest.model.model_type} · {manifest.quantization}"),
        ("runs on", f"{engine.device}{threads}: {why}"),
    ]


def _converse(
    session: Session,
    context_length: int,
    about: list[tuple[str, str]],
    describe: SpeedLine,
    *,
    show_stats: bool,
    hide_thinking: bool,
) -> None:
    from mlcpipe.cli.chat.repl import Repl

    if show_stats:
        describe.measure()
    title, where = (text for _, text in about)
    repl = Repl(
        session,
        env().cached("chat_history"),
        describe,
        show_stats=show_stats,
        hide_thinking=hide_thinking,
        about=about,
    )
    keys = "Enter sends, /help shows the commands, Ctrl-D leaves."
    repl.run(f"{title} · context {context_length} tokens\n{where}\n{keys}\n")
