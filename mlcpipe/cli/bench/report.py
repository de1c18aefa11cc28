"""Shows the results of `bench`: a table for people, JSON for programs."""

from __future__ import annotations

import statistics
from dataclasses import asdict

from mlcpipe.cli.bench.results import Memory, Report, Result
from mlcpipe.cli.terminal import cell, new_table, print_json, print_rows, stdout_console
from mlcpipe.host.finding import byte_size


def print_report(report: Report, *, as_json: bool) -> None:
    """Write the report to stdout."""
    if as_json:
        print_json(_as_json(report))
        return
    console = stdout_console()
    plan = report.plan
    read = sorted(report.read_gb_s)
    kv = byte_size(report.kv_bytes_per_token)
    versions = ", ".join(f"{name} {number or 'absent'}" for name, number in report.versions.items())
    print_rows(
        console,
        [
            ("bundle", str(plan.bundle)),
            ("model", f"{report.model_type}, {report.quantization}, context {report.context_length} tokens"),
            ("cpu", f"{report.cpu}, {report.threads} threads"),
            *([] if report.on_host else [("device", report.device)]),
            ("versions", versions),
            ("weights", f"{byte_size(report.weights_bytes)}, and {kv} of KV cache a token"),
            ("read bandwidth", f"{statistics.median(read):.1f} GB/s ({read[0]:.1f} - {read[-1]:.1f})"),
            (
                "load",
                f"{report.first_token_s.median:.2f} s to a token, after {report.import_s:.2f} s of imports",
            ),
            ("peak memory", _memory(report.memory)),
        ],
    )
    table = new_table("", "tokens", "median tok/s", "lowest - highest", "GB/s", "of bandwidth")
    for column in table.columns[1:]:
        column.justify = "right"
    for result in report.results:
        table.add_row(*map(cell, _row(report, result)))
    console.print()
    console.print(table)
    for result in report.results:
        if result.skipped:
            console.print(f"\n{result.kind} {result.tokens} was skipped: {result.skipped}")
    repeats = f"{plan.repeats} repeats after a warm-up, {plan.decode_tokens} tokens each for decode"
    console.print(f"\n{repeats}; 1 GB is 10^9 bytes", style="dim")


def _memory(memory: Memory) -> str:
    """Resident memory, and the part that is neither a mapped file nor KV cache."""
    if memory.beyond is None:
        return f"{byte_size(memory.resident)}, mapped files included"
    return (
        f"{byte_size(memory.weights)} of weights + {byte_size(memory.kv)} of KV cache + {byte_size(memory.beyond)};"
        f" {byte_size(memory.resident)} resident with all mapped files"
    )


def _row(report: Report, result: Result) -> tuple[str, ...]:
    if result.speed is None:
        return result.kind, str(result.tokens), "skipped", "", "", ""
    speed = result.speed
    share = report.share(result)
    in_cache = report.on_host and result.gb_s is not None and share is None
    return (
        result.kind,
        str(result.tokens),
        f"{speed.median:,.1f}",
        f"{speed.low:,.1f} - {speed.high:,.1f}",
        "" if result.gb_s is None else f"{result.gb_s:.1f}",
        "in cache" if in_cache else "" if share is None else f"{100 * share:.0f} %",
    )


def _as_json(report: Report) -> dict[str, object]:
    content = asdict(report)
    content["plan"]["bundle"] = str(report.plan.bundle)
    content["memory"]["beyond"] = report.memory.beyond
    content["results"] = [
        {**asdict(result), "share_of_read_bandwidth": report.share(result)} for result in report.results
    ]
    return content
