"""`mlcpipe doctor`: this computer's abilities, and missing parts."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from mlcpipe.cli.terminal import cell, new_table, print_json, stderr_console, stdout_console
from mlcpipe.compiler.link import linker_finding
from mlcpipe.errors import MlcpipeError
from mlcpipe.host.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.host.cpu import core_counts
from mlcpipe.host.finding import Finding, byte_size
from mlcpipe.host.memory import free_memory
from mlcpipe.host.versions import package_version, system_name
from mlcpipe.support.defaults import DEFAULT_TARGET
from mlcpipe.support.disk import folder_bytes
from mlcpipe.support.env import env
from mlcpipe.version import PINNED, __version__

_MARKS = {"ok": "[green]ok[/]", "note": "", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


def doctor_command(
    bandwidth: Annotated[
        bool, typer.Option("--bandwidth", help="Measure how fast the memory can be read (a second or two).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this computer: packages, linker, targets, memory, GPUs. What is missing comes with a command to get it.

    The exit code is 0 if models can be compiled for the CPU and run, else 1.

    Examples:

    `mlcpipe doctor`

    `mlcpipe doctor --bandwidth --json`
    """
    findings = [*_packages()]
    works = all(finding.state == "ok" for finding in findings)
    findings += _machine(bandwidth)
    if works:
        tools = _tools()
        findings += dict.fromkeys(finding for found in tools.values() for finding in found)
        findings += [*_devices(), *_targets(tools)]
    else:
        findings += [linker_finding(), Finding("targets", "missing", "TVM does not work (see above)")]
    usable = any(f.name == f"target {DEFAULT_TARGET}" and f.state == "ok" for f in findings)
    if as_json:
        print_json({"cpu_usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
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
    yield Finding("cores", "note", f"{physical} physical, {logical} logical; {chosen}")
    if cache := last_cache_bytes():
        yield Finding("last cache", "note", byte_size(cache))
    yield Finding("memory", "note", f"{byte_size(psutil.virtual_memory().total)}, {free_memory()}")
    if bandwidth:
        speed = read_bandwidth_gb_s(threads or physical)
        yield Finding("read bandwidth", "note", f"{speed:.1f} GB/s with {threads or physical} threads")
    folder = env().cache
    yield Finding("cache", "note", f"{folder}, {byte_size(folder_bytes(folder))}" if folder else "none: no home folder")


def _tools() -> dict[str, list[Finding]]:
    """The tools of each backend."""
    from mlcpipe.compiler.backends import backend, backends

    return {name: list(backend(name).tools()) for name in backends()}


def _devices() -> Iterator[Finding]:
    """The devices of each kind, or one line with the reason for having none."""
    from mlcpipe import devices

    with stderr_console().status("looking for devices"):
        for name in devices.kinds():
            try:
                yield from devices.kind(name).findings()
            except MlcpipeError as error:
                yield Finding(name, "missing", error.what, error.next_step or "")
            except OSError as error:  # of folders that this user may not read
                yield Finding(name, "broken", str(error))


def _targets(tools: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Each target that can be compiled for here; for the others one line per missing tool."""
    from mlcpipe.targets import compiled_variants, load_target, target_names, tvm_target

    lacking: dict[str, list[str]] = {}
    for name in target_names():
        try:
            target = load_target(name)
            tvm_target(target, compiled_variants(target)[0])
        except MlcpipeError as error:
            yield Finding(f"target {name}", "broken", str(error))
            continue
        if missing := " and ".join(tool.name for tool in tools[target.backend] if tool.state != "ok"):
            lacking.setdefault(missing, []).append(name)
        else:
            yield Finding(f"target {name}", "ok", target.description)
    for missing, names in lacking.items():
        yield Finding("targets", "missing", f"{', '.join(names)}: install {missing} (see above)")


def _show(findings: list[Finding]) -> None:
    table = new_table()
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        table.add_row(cell(finding.name), _MARKS[finding.state], cell(finding.value))
        if finding.advice:
            table.add_row("", "", cell(f"try: {finding.advice}"))
    stdout_console().print(table)
