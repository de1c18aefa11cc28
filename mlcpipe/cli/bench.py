"""`mlcpipe bench`: how fast a model is here, and how much of the machine that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.cli.bundles import Wanted, prepare_bundle
from mlcpipe.cli.console import stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.progress import console_progress


def bench_command(
    model: Annotated[
        str | None,
        typer.Argument(help="A bundle, checkpoint folder or hf://org/name; without it the demo model."),
    ] = None,
    prefill: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "16,512,2048",
    decode_depth: Annotated[str, typer.Option(help="How many tokens precede the decoded ones.")] = "0,1024,4096",
    decode_tokens: Annotated[int, typer.Option(help="Tokens to decode in each repeat.")] = 32,
    repeats: Annotated[int, typer.Option(help="How often each number is measured.")] = 5,
    threads: Annotated[int | None, typer.Option(help="Threads (default: the physical cores).")] = None,
    target: Annotated[str | None, typer.Option(help="What to compile for (default: cpu).")] = None,
    quantization: Annotated[str | None, typer.Option(help="How to store the weights (default: q4f16_1).")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, vulkan (the best GPU), vulkan:1 (another), cuda, metal.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure prefill and decode speed, memory and load time; medians, after a warm-up that does not count.

    Decoding reads all weights for each token, so it is compared with the read bandwidth of the memory, which
    is measured in the same run, before and after each repeat.

    Memory is the most that was seen after a measurement: the weights, which are a mapped file; the part of the KV
    cache that was written; and everything else that is private to the process, Python included. The last number is
    the peak of all that is resident, mapped code included.

    Examples:

    `mlcpipe bench ./my-bundle`

    `mlcpipe bench ./my-bundle --prefill 128,1024 --decode-depth 0,2048 --threads 4 --json`
    """
    for name, value in (
        ("--decode-tokens", decode_tokens),
        ("--repeats", repeats),
        ("--threads", threads or 1),
    ):
        if value < 1:
            raise UsageError(name, expected="an integer >= 1", found=value)
    lengths = _numbers("--prefill", prefill, low=1)
    depths = _numbers("--decode-depth", decode_depth, low=0)
    console = stderr_console()
    bundle = prepare_bundle(Wanted(model, target, quantization, device), console_progress(console))
    from mlcpipe.cli.bench_report import print_report
    from mlcpipe.cli.bench_run import Plan, measure

    plan = Plan(Path(bundle), lengths, depths, decode_tokens, repeats, threads, device)
    with console_progress(console, lasting=False) as progress:
        report = measure(plan, progress)
    print_report(report, as_json=as_json)


def _numbers(option: str, text: str, *, low: int) -> tuple[int, ...]:
    """A list such as "16,512"; an empty text is an empty list."""
    numbers = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if not word.isascii() or not word.isdigit() or not low <= int(word) < 2**31:
            raise UsageError(option, expected=f"integers >= {low} with commas between", found=repr(word)[:60])
        numbers.append(int(word))
    return tuple(dict.fromkeys(numbers))
