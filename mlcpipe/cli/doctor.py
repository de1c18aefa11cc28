"""`mlcpipe doctor`: this computer's abilities, and missing parts."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from mlcpipe.cli.terminal import cell, new_table, print_json, say, stderr_console, stdout_console
from mlcpipe.compiler.link import linker_finding
from mlcpipe.devices import gpu_kinds
from mlcpipe.errors import CompileError, MlcpipeError, UsageError
from mlcpipe.host.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.host.cpu import core_counts
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.host.versions import package_version, system_name
from mlcpipe.support.defaults import DEFAULT_TARGET
from mlcpipe.support.disk import folder_bytes
from mlcpipe.support.env import env
from mlcpipe.version import PINNED, RAY, __version__

if TYPE_CHECKING:
    from rich.table import Table

_MARKS = {"ok": "[green]ok[/]", "note": "", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


def doctor_command(
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure how fast the memory can be read (a second or two).")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Say instead whether and how this model runs: a checkpoint folder, a GGUF file or hf://org/name.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this computer: packages, targets, memory, GPUs. What is missing comes with a command to get it.

    The first line is the verdict. The exit code is 0 if models can be compiled for the CPU and run, else 1.

    With --model: what the model is and does, why it is refused if it is, the memory that each quantization takes, what
    `--device auto` compiles for, and how many tokens a second the memory allows. Weights are not downloaded. The exit
    code is 0 if the model runs, else 1.

    Examples:

    `mlcpipe doctor`

    `mlcpipe doctor --model hf://Qwen/Qwen3-0.6B`

    `mlcpipe doctor --bandwidth --json`
    """
    if bandwidth and model is not None:
        raise UsageError("--bandwidth measures the computer, not a --model", next_step="leave one of them out")
    findings = [*_packages()]
    broken = next((finding for finding in findings if finding.state != "ok"), None)
    if model is not None and broken is None:
        from mlcpipe.cli.doctor_model import doctor_model

        if not doctor_model(model, as_json=as_json):
            raise typer.Exit(1)
        return
    findings += _machine(bandwidth)
    if broken is None:
        devices, (tools, targets) = _devices(), _targets()
        cpu = targets[DEFAULT_TARGET]
        findings.insert(0, _uses(devices))
        findings += [tools, *chain.from_iterable(devices.values()), *_lines(targets)]
        verdict = _verdict(cpu, {name: devices[name] for name in gpu_kinds()}, targets)
    else:
        cpu = broken
        findings.append(linker_finding())
        verdict = _verdict(cpu, {}, {})
    usable = cpu.state == "ok"
    if as_json:
        print_json({"verdict": verdict, "cpu_usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(verdict, findings)
    if not usable:
        raise typer.Exit(1)


def _packages() -> Iterator[Finding]:
    yield Finding("mlcpipe", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {system_name()}")
    pair = " ".join(f"{name}=={version}" for name, version in PINNED.items())
    found = {name: package_version(name) for name in PINNED}
    value = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if found != PINNED:
        yield Finding("tvm", "broken", f"{value}; only one pair works together", f"pip install {pair}")
    elif problem := _import_problem():
        yield Finding("tvm", "broken", f"{value}; {problem}", f"pip install --force-reinstall {pair}")
    else:
        yield Finding("tvm", "ok", value)


def _import_problem() -> str:
    """The reason why TVM does not load, in one line; "" if it loads."""
    try:
        import tvm
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "" if tvm.runtime.enabled("llvm") else "it was built without LLVM"


def _machine(bandwidth: bool) -> Iterator[Finding]:
    import psutil

    physical, logical = core_counts()
    threads = env().threads
    chosen = f"MLCPIPE_THREADS asks for {threads}" if threads else f"{physical} threads are used"
    yield Finding("cores", "note", f"{physical} that it may use, {logical} logical; {chosen}")
    if cache := last_cache_bytes():
        yield Finding("last cache", "note", byte_size(cache))
    yield Finding("memory", "note", f"{byte_size(psutil.virtual_memory().total)}, {free_memory()}")
    if bandwidth:
        speed = read_bandwidth_gb_s(threads or physical)
        yield Finding("read bandwidth", "note", f"{speed:.1f} GB/s with {threads or physical} threads")
    if (ray := package_version("ray")) is not None:
        fits = ray.startswith(f"{RAY}.")
        advice = "" if fits else "pip install 'mlcpipe[ray]'"
        yield Finding("ray", "note", f"{ray}; `mlcpipe serve --ray` takes {RAY}", advice)
    folder = env().cache
    yield Finding("cache", "note", f"{folder}, {byte_size(folder_bytes(folder))}" if folder else "none: no home folder")


def _devices() -> dict[str, list[Finding]]:
    """The devices of each kind, or one line with the reason for having none."""
    from mlcpipe import devices

    found: dict[str, list[Finding]] = {}
    with stderr_console().status("looking for devices"):
        for name in devices.kinds():
            try:
                found[name] = [*devices.kind(name).findings()]
            except MlcpipeError as error:
                found[name] = [_lack(name, error)]
            except OSError as error:  # of folders that this user may not read
                found[name] = [Finding(name, "broken", str(error))]
    return found


def _uses(devices: Mapping[str, Sequence[Finding]]) -> Finding:
    """What `--device auto` and compiling take on this machine, in one line."""
    found = [one for several in devices.values() for one in several if one.state == "ok"]
    gpus = [one.name for one in found if one.name.partition(":")[0] in gpu_kinds() and ":" in one.name]
    parts = [f"{gpus[0]} for models that it runs clearly faster, else the CPU" if gpus else "the CPU"]
    for one in found:
        kind, _, rest = one.name.partition(" ")
        if rest == "plugin":
            origin = "of the wheel" if one.value.startswith("of the wheel") else "compiled here"
            parts.append(f"the {kind.capitalize()} plugin {origin}")
    linker = linker_finding()
    parts.append(f"linker {linker.value}" if linker.state == "ok" else "no linker")
    return Finding("uses", "note", "; ".join(parts))


def _lack(name: str, error: MlcpipeError) -> Finding:
    lacks = f"; it takes {error.expected}" if error.expected else ""
    return Finding(name, "missing", f"{error.what}{lacks}", error.next_step or "")


def _targets() -> tuple[Finding, dict[str, Finding]]:
    """The tools that write libraries, and whether each target can be compiled for here."""
    from mlcpipe.compiler.backends import find_writer
    from mlcpipe.targets import compiled_variants, load_target, target_names, tvm_target

    tools: dict[str, None] = {}
    found: dict[str, Finding] = {}
    for name in target_names():
        try:
            target = load_target(name)
            tvm_target(target, compiled_variants(target)[0])
            writer = find_writer(target)
        except CompileError as error:
            found[name] = _lack(name, error)
        except MlcpipeError as error:
            found[name] = Finding(name, "broken", str(error))
        else:
            version = writer.version
            tools[version if version.startswith(writer.name) else f"{writer.name} {version}"] = None
            found[name] = Finding(name, "ok", target.description)
    return Finding("tools", "ok" if tools else "missing", "; ".join(tools) or "none"), found


def _lines(targets: Mapping[str, Finding]) -> Iterator[Finding]:
    """A line for each target that can be compiled for, and for the others one for each command to type."""
    lacking: dict[str, list[Finding]] = {}
    for name, finding in targets.items():
        if finding.state == "missing":
            lacking.setdefault(finding.advice, []).append(finding)
        else:
            yield replace(finding, name=f"target {name}")
    for same in lacking.values():
        names, why = ", ".join(finding.name for finding in same), {finding.value for finding in same}
        yield Finding("targets", "missing", f"{names}: {why.pop()}" if len(why) == 1 else names, same[0].advice)


def _verdict(cpu: Finding, gpus: Mapping[str, Sequence[Finding]], targets: Mapping[str, Finding]) -> str:
    """What can compile and run models here, and the commands that add a GPU.

    `cpu`: the target, or a broken part; `gpus`: what each kind of GPU that this system may have was found to be.
    """
    if cpu.state != "ok":
        return f"Not ready: {cpu.value}. {f'Try: {cpu.advice}' if cpu.advice else ''}".rstrip()
    ready, advice = ["the CPU"], []
    for kind, findings in gpus.items():
        found = [one for one in findings if one.state == "ok" and one.name.startswith(f"{kind}:")]
        if found and targets[kind].state == "ok":
            ready += [f"{one.name} ({one.value.partition(';')[0]})" for one in found]
        else:
            steps = [one.advice for one in ([targets[kind]] if found else findings) if one.advice]
            advice += [f"{step} ({kind})" for step in steps[:1]]
    text = f"Ready: {' and '.join(ready)}."
    return f"{text} For a GPU: {'; or '.join(advice)}." if advice and len(ready) == 1 else text


def _show(verdict: str, findings: list[Finding]) -> None:
    console = stdout_console()
    say(console, verdict, style="bold")
    say(console, "")
    console.print(_table([one for one in findings if one.state != "missing"]))
    if missing := [one for one in findings if one.state == "missing"]:
        say(console, "\nMissing, and needed only for what the line names:")
        console.print(_table(missing))


def _table(findings: list[Finding]) -> Table:
    table = new_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(cell(finding.name), _MARKS[finding.state], cell(finding.value))
        if finding.advice:
            table.add_row("", "", cell(f"try: {finding.advice}"))
    return table
