"""`mlcpipe tune`: measure which knobs make a model's kernels faster on this device, and keep the winners."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.options import TARGET_HELP, JsonOption, QuantizationOption, check_at_least_one
from mlcpipe.cli.terminal import print_json, say, stderr_console, stdout_console
from mlcpipe.errors import TargetError, UsageError
from mlcpipe.loading import bundle_of
from mlcpipe.support.defaults import DEFAULT_TARGET
from mlcpipe.support.env import env
from mlcpipe.support.progress import console_progress

if TYPE_CHECKING:
    from mlcpipe.targets import Target, Variant
    from mlcpipe.tuned.records import Record
    from mlcpipe.tuning.run import State, TuneOptions
    from mlcpipe.tuning.ssh import Board
    from mlcpipe.tuning.tasks import Task

FAMILIES = ("attention", "gemv", "gemm", "experts", "norm", "sampling")
_UNITS = {"s": 1, "m": 60, "h": 3600}


def tune_command(
    model: Annotated[
        str, typer.Argument(help="A bundle, a checkpoint folder, a GGUF file or hf://org/name[@revision].")
    ],
    target: Annotated[
        str | None, typer.Option(help=f"{TARGET_HELP} (default: the bundle's, else {DEFAULT_TARGET})")
    ] = None,
    quantization: QuantizationOption = None,
    trials: Annotated[int, typer.Option(help="Candidates for each kernel and range of rows.")] = 32,
    budget: Annotated[str, typer.Option(help="The most time to take: 90s, 10m, 1h. (default: no limit)")] = "",
    kernels: Annotated[str, typer.Option(help="Only these families: attention,gemv,gemm,experts,norm,sampling.")] = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the records of this model again; drop those that lose.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what an earlier run measured.")] = False,
    records: Annotated[
        Path | None, typer.Option(help="Keep records in this file. (default: the one that compile reads)")
    ] = None,
    ssh: Annotated[
        str, typer.Option(help="Measure on the CPU of this Linux machine, which needs only ssh: pi@board.local.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Make a model's kernels faster on this device: try other knobs, measure, keep the winners.

    Default and candidate are measured interleaved, with cold weights; a record is kept only if it wins by more than the
    noise. `mlcpipe compile` uses records automatically, `mlcpipe inspect --kernels` shows them. Ctrl-C stops; the same
    command resumes.

    Examples:

    `mlcpipe tune ./my-bundle --budget 10m`

    `mlcpipe tune ./Qwen3-0.6B --target cpu --kernels gemv --trials 16`

    `mlcpipe tune ./my-bundle --verify`

    `mlcpipe tune ./Qwen3-0.6B --ssh pi@board.local --records pi.json`
    """
    check_at_least_one(trials=trials)
    if verify and budget:
        raise UsageError("--budget has no effect with --verify", next_step="leave one of them out")
    families, seconds = _families(kernels), _seconds(budget)
    from mlcpipe.targets import load_target
    from mlcpipe.tuned.records import files_of, read_records
    from mlcpipe.tuning.devices import measured_device
    from mlcpipe.tuning.run import TuneOptions
    from mlcpipe.tuning.ssh import look_at, target_there

    target, quantization = target_and_quantization(model, target, quantization)
    wanted = load_target(target)
    board = look_at(ssh) if ssh else None
    wanted = target_there(wanted, board.arch) if board else wanted
    device = wanted.device or board.cpu if board else measured_device(wanted)
    variant = _variant(wanted, board)
    path = records or files_of(wanted, env().cache_dir)[-1]
    known = [r for r in read_records(path) if (r.device, r.variant) == (device, variant.name)]
    tasks = [task for task in _tasks(model, quantization, target, wanted, variant) if task.space.family in families]
    if not tasks:
        raise UsageError("the model has no kernel with knobs", where=target, expected=f"one of {', '.join(families)}")
    if verify:
        tasks = _with_records(tasks, known, path)
    there = {"host": board.host, "arch": board.arch} if board else None
    opts = TuneOptions(trials, seconds, device, target, variant.name, there)
    states, finished = _run(tasks, opts, wanted, path, known if verify else None, fresh=fresh)
    _report(states, opts, path, as_json=as_json, here=bool(wanted.variants) and board is None)
    if not finished:
        say(stderr_console(), "\nStopped; the same command resumes.")
        raise KeyboardInterrupt
    problems = [state.problem for state in states if state.problem and not state.invalid]
    if problems and all(state.default_s is None for state in states):
        raise TargetError("no kernel could be measured", where=device, found=problems[0])


def _with_records(tasks: Sequence[Task], records: Sequence[Record], path: Path) -> list[Task]:
    """The tasks that have a record; prints how many have none. Raises UsageError if no task has one."""
    found = [task for task in tasks if any(task.is_of(record) for record in records)]
    if not found:
        raise UsageError(
            "no kernel of this model has a record for this device", where=path, next_step="tune first, without --verify"
        )
    if len(found) < len(tasks):
        missing = len(tasks) - len(found)
        say(stderr_console(), f"{missing} of {len(tasks)} kernels have no record to verify.", style="dim")
    return found


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


def target_and_quantization(model: str | Path, target: str | None, quantization: str | None) -> tuple[str, str | None]:
    """The target and quantization to tune: as named, else the bundle's, else the defaults.

    Raises BundleError, UsageError.
    """
    bundle = bundle_of(model)
    if bundle is None:
        return target or DEFAULT_TARGET, quantization
    from mlcpipe.bundle import read_manifest

    manifest = read_manifest(bundle, check_abi=False)
    if quantization not in (None, manifest.quantization):
        raise UsageError(
            "the bundle has another quantization", where=bundle, expected=manifest.quantization, found=quantization,
            next_step="leave --quantization out",
        )  # fmt: skip
    return target or manifest.target.name, manifest.quantization


def _variant(target: Target, board: Board | None) -> Variant:
    """The variant of a target that this machine or a board runs. Raises TargetError if a board runs none."""
    from mlcpipe.host.cpu_features import host_features
    from mlcpipe.targets import compiled_variants

    found, features = compiled_variants(target), board.features if board else host_features()
    best = next((one for one in found if features.issuperset(one.features)), None)
    if best is None and board is not None:
        lacks = ", ".join(feature for feature in found[-1].features if feature not in features)
        raise TargetError("the board's CPU is older than the target", where=target.name, expected=lacks)
    return best or found[-1]


def _tasks(model: str, quantization: str | None, name: str, target: Target, variant: Variant) -> list[Task]:
    """The tunable tasks, the most work first; `name` is the target's."""
    from mlcpipe.checkpoint import resolve
    from mlcpipe.compiler.preflight import Purpose
    from mlcpipe.tuning.tasks import lower, model_of, tasks_of

    with console_progress(stderr_console(), lasting=False) as progress:
        path = resolve(model, progress, check=Purpose(name, quantization, title=model).check)
        progress.stage("find the kernels")
        tasks = tasks_of(lower(model_of(path, quantization), target), variant)
    return sorted(tasks, key=lambda task: -task.work)


def _run(
    tasks: Sequence[Task], opts: TuneOptions, target: Target, path: Path, known: Sequence[Record] | None, *, fresh: bool
) -> tuple[list[State], bool]:
    """Tune, or verify the `known` records -> the last state of every task, and whether all were decided.

    Each record is written at once.
    """
    from mlcpipe.cli.tune.view import View
    from mlcpipe.tuning import run as session
    from mlcpipe.tuning.journal import Journal
    from mlcpipe.tuning.pool import WorkerProcess

    journal = Journal(env().cache_dir / "tuning", target.tuned, opts.variant, opts.device)
    if fresh:
        journal.forget()
    with View(stderr_console(), tasks, opts) as view, WorkerProcess() as worker:
        try:
            if known is not None:
                decided: Iterable[State] = session.verify(tasks, known, opts, worker, view.show)
            else:
                decided = session.tune(tasks, opts, journal, worker, view.show)
            for state in decided:
                _keep(path, state)
                view.done(state)
        except KeyboardInterrupt:
            return view.states, False
    return view.states, True


def _keep(path: Path, state: State) -> None:
    """Replace the record of a state's task, or delete it if the state has none."""
    from mlcpipe.tuned.records import merged, read_records, write_records

    if state.final is None and not state.invalid:
        return  # nothing was decided
    new = [] if state.record is None else [state.record]
    known = read_records(path)
    kept = [record for record in known if not _same(record, state)]
    if new or len(kept) < len(known):
        write_records(path, merged(kept, new))


def _same(record: Record, state: State) -> bool:
    return state.task.is_of(record) and (state.device, state.variant) == (record.device, record.variant)


def _report(states: Sequence[State], opts: TuneOptions, path: Path, *, as_json: bool, here: bool) -> None:
    """Print the result and the records' file, with the memory floor if this machine's CPU was measured."""
    from mlcpipe.cli.tune.view import print_result, summary
    from mlcpipe.devices.support.threads import use_threads
    from mlcpipe.host.bandwidth import cached_read_bandwidth_gb_s

    times = [(s.nbytes, s.final.candidate_s if s.final else s.default_s) for s in states]
    seen = max((nbytes / seconds / 1e9 for nbytes, seconds in times if seconds), default=0.0)
    bandwidth = cached_read_bandwidth_gb_s(use_threads(), env().cache_dir, seen_gb_s=seen) if here else None
    if as_json:
        print_json({**summary(states, opts, bandwidth), "records": str(path)})
        return
    print_result(stdout_console(), states, opts, bandwidth)
    if path.is_file():
        say(stdout_console(), f"Records of this target are in {path}.")
