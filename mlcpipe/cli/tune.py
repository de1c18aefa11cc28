"""`mlcpipe tune`: measure which knobs make a model's kernels faster on this device, and keep what wins."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.bundles import DEFAULT_QUANTIZATION, DEFAULT_TARGET
from mlcpipe.cli.console import print_json, say, stderr_console, stdout_console
from mlcpipe.env import env
from mlcpipe.errors import UsageError
from mlcpipe.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.targets import Target, Variant
    from mlcpipe.tuning.records import Record
    from mlcpipe.tuning.session import Plan, State
    from mlcpipe.tuning.tasks import Task

FAMILIES = ("attention", "gemv", "gemm", "experts", "norm", "sampling")
_UNITS = {"s": 1, "m": 60, "h": 3600}


def tune_command(
    model: Annotated[str, typer.Argument(help="A bundle, a checkpoint folder or hf://org/name[@revision].")],
    target: Annotated[
        str | None, typer.Option(help=f"What to tune for (default: a bundle's own, {DEFAULT_TARGET} for a checkpoint).")
    ] = None,
    quantization: Annotated[
        str, typer.Option(help="Of a checkpoint; a bundle has its own.")
    ] = DEFAULT_QUANTIZATION,
    trials: Annotated[int, typer.Option(help="Candidates for each kernel and range of rows.")] = 32,
    budget: Annotated[str, typer.Option(help="The most time to take: 90s, 10m, 1h (default: no limit).")] = "",
    kernels: Annotated[
        str, typer.Option(help="Only these families: attention,gemv,gemm,experts,norm,sampling.")
    ] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the records of this model again; drop those that lose.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run measured.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="Keep records in this file (default: the one that compile reads).")
    ] = None,
    rpc: Annotated[
        str, typer.Option(help="Measure on the CPU of a server of TVM's RPC: HOST:PORT or tracker:HOST:PORT.")
    ] = "",
    rpc_key: Annotated[str, typer.Option(help="The key that the server was started with.")] = "",
    device: Annotated[str, typer.Option(help="With --rpc: the CPU's name as `mlcpipe doctor` shows it there.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Make a model's kernels faster on this device: try other knobs, measure, keep what wins.

    Default and candidate are measured by turns, with cold weights; a record is kept only if it wins by more than the
    noise. `mlcpipe compile` uses records by itself, `mlcpipe inspect --kernels` shows them. Ctrl-C stops; the same
    command goes on.

    Examples:

    `mlcpipe tune ./my-bundle --budget 10m`

    `mlcpipe tune ./Qwen3-0.6B --target cpu --kernels gemv --trials 16`

    `mlcpipe tune ./my-bundle --verify`
    """
    if trials < 1:
        raise UsageError("--trials", expected="an integer >= 1", found=trials)
    families, seconds = _families(kernels), _seconds(budget)
    from mlcpipe.targets import load_target
    from mlcpipe.tuning.devices import measured_device
    from mlcpipe.tuning.records import files_of, read_records
    from mlcpipe.tuning.session import Plan

    target = target or own_target(Path(model))
    wanted = load_target(target)
    remote = _remote(wanted, rpc, rpc_key, device)
    device = device if remote else measured_device(wanted)
    variant = _variant(wanted)
    path = records or files_of(wanted, env().cache_dir)[-1]
    read_records(path)  # a broken file is told before anything is measured
    tasks = [task for task in _tasks(model, quantization, wanted, variant) if task.space.family in families]
    plan = Plan(trials, seconds, device, target, variant.name, remote)
    if not tasks:
        raise UsageError("the model has no kernel with knobs", where=target, expected=f"one of {', '.join(families)}")
    states, finished = _run(tasks, plan, wanted, path, verify=verify, fresh=fresh)
    _report(states, plan, path, as_json=as_json, here=wanted.link == "shared" and remote is None)
    if not finished:
        say(stderr_console(), "\nStopped; the same command goes on.")
        raise KeyboardInterrupt


def _families(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise UsageError("--kernels", expected=", ".join(FAMILIES), found=unknown[0])
    return names or FAMILIES


def _seconds(text: str) -> float | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,6})([smh]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError("--budget", expected="a time such as 90s, 10m or 1h", found=repr(text)[:40])
    return float(match[1]) * _UNITS[match[2] or "s"]


def _remote(target: Target, rpc: str, key: str, device: str) -> dict[str, object] | None:
    """Where to measure if not here. Raises UsageError."""
    if not rpc:
        if key or device:
            raise UsageError("--rpc-key and --device say something about --rpc", expected="--rpc HOST:PORT with them")
        return None
    from mlcpipe.targets import compiled_variants
    from mlcpipe.tuning.remote import parse_address

    address = parse_address(rpc, key)
    if not device or len(device) > 200 or not device.isprintable():
        raise UsageError("--device", expected="the CPU's name, as `mlcpipe doctor` shows it", found=repr(device)[:80])
    if target.link != "shared" or len(compiled_variants(target)) != 1:
        raise UsageError(
            "--rpc", where=target.name, expected="a target for one CPU: a file with base = \"cpu\", mtriple and mcpu"
        )
    return vars(address)


def own_target(path: Path) -> str:
    """The target of a bundle, the usual one of what is none. Raises BundleError."""
    from mlcpipe.bundle import read_manifest
    from mlcpipe.bundle.manifest import MANIFEST

    return read_manifest(path, check_abi=False).target.name if (path / MANIFEST).is_file() else DEFAULT_TARGET


def _variant(target: Target) -> Variant:
    """The variant of a target that this machine runs."""
    from mlcpipe.cpu_features import host_features
    from mlcpipe.targets import compiled_variants

    found = compiled_variants(target)
    return next((one for one in found if host_features().issuperset(one.features)), found[-1])


def _tasks(model: str, quantization: str, target: Target, variant: Variant) -> list[Task]:
    """What can be tuned, the most work first."""
    from mlcpipe.checkpoint import resolve
    from mlcpipe.tuning.tasks import lower, model_of, tasks_of

    with console_progress(stderr_console(), lasting=False) as progress:
        path = Path(model) if Path(model).is_dir() else resolve(model, progress)
        progress.stage("find the kernels")
        tasks = tasks_of(lower(model_of(path, quantization), target), variant)
    return sorted(tasks, key=lambda task: -task.work)


def _run(
    tasks: Sequence[Task], plan: Plan, target: Target, path: Path, *, verify: bool, fresh: bool
) -> tuple[list[State], bool]:
    """Tune or verify, records written as they come -> the last state of every task, and whether all were decided."""
    from mlcpipe.cli.tune_view import live_view
    from mlcpipe.tuning import session
    from mlcpipe.tuning.journal import Journal
    from mlcpipe.tuning.pool import WorkerProcess
    from mlcpipe.tuning.records import read_records

    journal = Journal(env().cache_dir / "tuning", target.tuned, plan.variant, plan.device)
    if fresh:
        journal.forget()
    with live_view(stderr_console(), tasks, plan) as view, WorkerProcess() as worker:
        try:
            if verify:
                mine = [r for r in read_records(path) if (r.device, r.variant) == (plan.device, plan.variant)]
                decided: Iterable[State] = session.verify(tasks, mine, plan, worker, view.show)
            else:
                decided = session.tune(tasks, plan, journal, worker, view.show)
            for state in decided:
                _keep(path, state)
                view.done(state)
        except KeyboardInterrupt:
            return view.states, False
    return view.states, True


def _keep(path: Path, state: State) -> None:
    """Write the record of a state in the place of the one that was there, which goes where the state has none."""
    from mlcpipe.tuning.records import merged, read_records, write_records

    if state.final is None and not state.invalid:
        return  # nothing was decided
    new = [] if state.record is None else [state.record]
    known = read_records(path)
    kept = [record for record in known if not _same(record, state)]
    if new or len(kept) < len(known):
        write_records(path, merged(kept, new))


def _same(record: Record, state: State) -> bool:
    return state.task.is_of(record) and (state.device, state.variant) == (record.device, record.variant)


def _report(states: Sequence[State], plan: Plan, path: Path, *, as_json: bool, here: bool) -> None:
    """Print the result and where records are, with the floor of this machine's memory where its CPU was measured."""
    from mlcpipe.bandwidth import cached_read_bandwidth_gb_s
    from mlcpipe.cli.tune_view import print_result, summary
    from mlcpipe.runtime.threads import use_threads

    times = [(s.nbytes, s.final.candidate_s if s.final else s.default_s) for s in states]
    seen = max((nbytes / seconds / 1e9 for nbytes, seconds in times if seconds), default=0.0)
    bandwidth = cached_read_bandwidth_gb_s(use_threads(), env().cache_dir, seen_gb_s=seen) if here else None
    if as_json:
        print_json({**summary(states, plan, bandwidth), "records": str(path)})
        return
    print_result(stdout_console(), states, plan, bandwidth)
    if path.is_file():
        say(stdout_console(), f"Records of this target are in {path}.")
