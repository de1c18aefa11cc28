"""`mlcpipe bench`: measures a model's speed here, and its share of the machine's bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import (
    DeviceOption,
    JsonOption,
    KvCacheDtypeOption,
    ModelArgument,
    QuantizationOption,
    TargetOption,
    ThreadsOption,
    check_at_least_one,
)
from mlcpipe.cli.terminal import stderr_console
from mlcpipe.errors import UsageError
from mlcpipe.loading import engine_device, prepare_bundle
from mlcpipe.support.defaults import AUTO
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.compiler.automatic import Place


def bench_command(
    model: ModelArgument = None,
    prefill: Annotated[str, typer.Option(help="Prompt lengths, in tokens.")] = "16,512,2048",
    decode_depth: Annotated[str, typer.Option(help="How many tokens precede the decoded ones.")] = "0,1024,4096",
    decode_tokens: Annotated[int, typer.Option(help="Tokens to decode in each repeat.")] = 32,
    batch: Annotated[
        str, typer.Option(help="Decode so many sequences together as `serve` does, after prompts of 128 tokens.")
    ] = "",
    repeats: Annotated[int, typer.Option(help="How often each number is measured.")] = 5,
    threads: ThreadsOption = None,
    target: TargetOption = None,
    quantization: QuantizationOption = None,
    kv_cache_dtype: KvCacheDtypeOption = None,
    device: DeviceOption = AUTO,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder with a LoRA adapter that PEFT saved; of several, the sequences of a batch take turns."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure prefill and decode speed, memory and load time; medians, after a warm-up that does not count.

    Decoding reads all weights for each token, so it is compared with the read bandwidth of the memory, which
    is measured in the same run, before and after each repeat.

    Peak memory has three parts: the weights, which are a mapped file; the used part of the KV cache; and everything
    else that is private to the process, Python included. The last number is the peak of all resident memory.

    Examples:

    `mlcpipe bench ./my-bundle`

    `mlcpipe bench ./my-bundle --prefill 128,1024 --decode-depth 0,2048 --threads 4 --json`

    `mlcpipe bench ./my-bundle --batch 1,2,4,8,16,32`
    """
    check_at_least_one(decode_tokens=decode_tokens, repeats=repeats, threads=threads)
    lengths = _numbers("--prefill", prefill, low=1)
    depths = _numbers("--decode-depth", decode_depth, low=0)
    batches = _numbers("--batch", batch, low=1)
    console = stderr_console()
    places: list[Place] = []
    with console_progress(console) as progress:
        bundle = prepare_bundle(
            model, device, quantization, target=target, kv_cache_dtype=kv_cache_dtype,
            adapters=bool(adapter), placed=places.append, progress=progress,
        )  # fmt: skip
    from mlcpipe.cli.bench.report import print_report
    from mlcpipe.cli.bench.results import BenchOptions
    from mlcpipe.cli.bench.run import measure

    opts = BenchOptions(
        bundle,
        lengths,
        depths,
        decode_tokens,
        repeats,
        threads,
        engine_device(device, *places),
        batches,
        tuple(adapter or ()),
    )
    with console_progress(console, lasting=False) as progress:
        report = measure(opts, progress)
    print_report(report, as_json=as_json)


def _numbers(option: str, text: str, *, low: int) -> tuple[int, ...]:
    """A list such as "16,512"; an empty text is an empty list."""
    numbers = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if not word.isascii() or not word.isdigit() or not low <= int(word) < 2**31:
            raise UsageError(option, expected=f"integers >= {low} with commas between", found=repr(word)[:60])
        numbers.append(int(word))
    return tuple(dict.fromkeys(numbers))
