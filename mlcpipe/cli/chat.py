"""`mlcpipe chat`: talk to a model, once or for as long as you like."""

from __future__ import annotations

import select
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.bandwidth import cached_read_bandwidth_gb_s, last_cache_bytes
from mlcpipe.cli.bundles import Wanted, prepare_bundle
from mlcpipe.cli.console import Screen, print_json, say, stderr_console
from mlcpipe.cli.markdown import PlainRenderer
from mlcpipe.cli.session import Answer, Session
from mlcpipe.cli.settings import Settings
from mlcpipe.cli.stats import stats_line
from mlcpipe.env import env
from mlcpipe.errors import MlcpipeError, ResourceError, UsageError
from mlcpipe.progress import console_progress

if TYPE_CHECKING:
    from rich.console import Console

    from mlcpipe import Engine
    from mlcpipe.runtime.sampling_params import Stats

MAX_STDIN_BYTES = 64 << 20
SILENCE_S = 0.5


def chat_command(
    model: Annotated[
        str | None,
        typer.Argument(help="A checkpoint folder, hf://org/name or a bundle; without it the demo model."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Ask this, print the answer and exit.")] = None,
    system: Annotated[str, typer.Option(help="A system message.")] = "",
    target: Annotated[str | None, typer.Option(help="What to compile for (default: cpu).")] = None,
    quantization: Annotated[str | None, typer.Option(help="How to store the weights (default: q4f16_1).")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, vulkan (the best GPU), vulkan:1 (another), cuda, metal.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="How freely tokens are drawn; 0 takes the likeliest.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens that hold this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from this many tokens; 0 is all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer, in tokens.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 avoids tokens seen before.")] = None,
    context: Annotated[
        int | None, typer.Option(help="How many tokens the chat may have (default: the model's).")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the one answer as JSON, with statistics.")] = False,
    stats: Annotated[bool, typer.Option(help="Show speeds after each answer.")] = True,
    web: Annotated[
        bool, typer.Option("--web", help="Chat in the browser, on its GPU, served from this computer.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="With --web: the port on 127.0.0.1.", min=0, max=65535)] = None,
    browser: Annotated[bool, typer.Option(help="With --web: open the browser.")] = True,
) -> None:
    """Talk to a model. A checkpoint is compiled on first use and kept in the cache; a bundle starts at once.

    On a terminal it is a conversation (`/help` lists its commands). With `--prompt`, or text on stdin, it
    answers once: the answer goes to stdout, statistics to stderr.

    Examples:

    `mlcpipe chat`

    `mlcpipe chat hf://Qwen/Qwen3-0.6B --prompt "Why is the sky blue?" --temperature 0`

    `cat notes.txt | mlcpipe chat ./my-bundle --prompt "Summarize:"`

    `mlcpipe chat ./Qwen3-0.6B --device vulkan`

    `mlcpipe chat --web`
    """
    given = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed,
        "max_tokens": max_tokens, "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    if web:
        from mlcpipe.cli.web import chat_in_browser

        others = {
            "prompt": prompt,
            "system": system,
            "context": context,
            "raw": raw,
            "json": as_json,
            "no-stats": not stats,
            "device": device,
        }
        names = {f"--{key.replace('_', '-')}": value for key, value in (given | others).items()}
        return chat_in_browser(Wanted(model, target, quantization), port=port, show=browser, given=names)
    if port is not None or not browser:
        raise UsageError("--port and --no-browser are for --web", next_step="add --web")
    settings = Settings().with_values({key: value for key, value in given.items() if value is not None})
    if context is not None and context < 1:
        raise UsageError("--context", expected="an integer >= 1", found=context)
    if raw and system:
        raise UsageError("--raw has no place for a --system message", next_step="leave one of them out")
    question = _question(prompt)
    if question is None:
        _require_terminal(as_json)
    wanted = Wanted(model, target, quantization, device)
    console = stderr_console()
    bundle = prepare_bundle(wanted, console_progress(console))
    engine = _load(bundle, context, device, console)
    session = Session(engine, settings, system=system, raw=raw, model=wanted.title)
    describe = _Describe(engine, console)
    if question is None:
        from mlcpipe.cli.repl import Repl

        if stats:
            describe.measure()
        Repl(session, env().cache_dir / "chat_history", describe, show_stats=stats).run(_banner(wanted, engine))
    elif as_json:
        _answer_json(session, question)
    else:
        _answer_text(session, question, describe if stats else None, console)


class _Describe:
    """Makes the line of statistics; the bandwidth it compares with is measured once per boot."""

    def __init__(self, engine: Engine, console: Console) -> None:
        self._threads = engine.threads
        self._on_host = engine.on_host
        self._weights = engine.manifest.memory_plan.weights_bytes
        self._console = console
        self._peak: float | None = None

    def measure(self, seen_gb_s: float = 0.0) -> None:
        """Measure, or recall, the read bandwidth; not at all for a model in the cache or on a device of its own."""
        if not self._on_host or (self._peak or 0.0) > seen_gb_s or self._weights < last_cache_bytes():
            return
        try:
            with self._console.status("measuring the memory (once per boot)"):
                peak = cached_read_bandwidth_gb_s(self._threads, env().cache_dir, seen_gb_s=seen_gb_s)
                self._peak = max(peak, self._peak or 0.0)
        except ResourceError:
            return  # no room to measure: the speeds are shown without the share

    def __call__(self, stats: Stats) -> str:
        self.measure(stats.decode_gb_s)
        return stats_line(stats, self._peak, self._weights, last_cache_bytes())


def _load(bundle: Path, context: int | None, device: str | None, console: Console) -> Engine:
    if not console.is_terminal:
        from mlcpipe import Engine

        return Engine(bundle, context_length=context, device=device)
    with console_progress(console, lasting=False) as progress:
        progress.stage("loading")
        from mlcpipe import Engine

        return Engine(bundle, context_length=context, device=device, progress=progress)


def _banner(wanted: Wanted, engine: Engine) -> str:
    manifest = engine.manifest
    where = f"{engine.threads} threads" if engine.on_host else engine.device
    return (
        f"{wanted.title} · {manifest.model.model_type} · {manifest.quantization} · "
        f"context {engine.context_length} tokens · {where}\n"
        "Enter sends, /help shows the commands, Ctrl-D leaves.\n"
    )


def _question(prompt: str | None) -> str | None:
    """What to ask once: --prompt, stdin, or both in this order; None for a conversation."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _read_stdin(wait=prompt is None)
    if prompt is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    question = "\n\n".join(part for part in (prompt, piped) if part)
    if not question.strip():
        raise UsageError("there is nothing to ask", expected="--prompt TEXT, text on stdin, or a terminal")
    return question


def _read_stdin(wait: bool) -> str:
    """All of stdin. Without `wait`, nothing of a pipe that stays silent: a script may have left it open."""
    if not wait and sys.platform != "win32" and not select.select([sys.stdin], [], [], SILENCE_S)[0]:
        return ""
    raw = sys.stdin.buffer.read(MAX_STDIN_BYTES + 1)
    if len(raw) > MAX_STDIN_BYTES:
        raise UsageError("the text on stdin is too long", expected=f"at most {MAX_STDIN_BYTES >> 20} MiB")
    return raw.decode("utf-8", "replace").rstrip("\r\n")


def _require_terminal(as_json: bool) -> None:
    if as_json:
        raise UsageError("--json answers once", expected="--prompt TEXT or text on stdin")
    if not sys.stdout.isatty():
        raise UsageError(
            "a conversation needs a terminal",
            found="stdout that is none",
            next_step="ask once with --prompt TEXT",
        )


def _answer_text(session: Session, question: str, describe: _Describe | None, console: Console) -> None:
    screen = Screen()
    try:
        answer = session.ask(question, screen.renderer())
    except MlcpipeError:
        screen.fresh_line()
        raise
    screen.fresh_line()
    if describe is not None and answer.stats is not None:
        say(console, describe(answer.stats), style="dim")
    _end(answer)


def _answer_json(session: Session, question: str) -> None:
    answer = session.ask(question, PlainRenderer(lambda text: None))  # the text is printed at the end
    stats = answer.stats
    speeds = ("prefill_tok_s", "decode_tok_s", "decode_gb_s")
    print_json(
        {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "settings": session.settings.values(),
            "stats": None if stats is None else asdict(stats) | {name: getattr(stats, name) for name in speeds},
        }
    )
    _end(answer)


def _end(answer: Answer) -> None:
    """An answer that was stopped is what Ctrl-C makes of any other command."""
    if answer.finish_reason == "interrupted":
        raise KeyboardInterrupt
