"""`mlcpipe doctor`: what this computer can do, and what is missing."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from mlcpipe.bandwidth import last_cache_bytes, read_bandwidth_gb_s
from mlcpipe.cli import machine
from mlcpipe.cli.bundles import DEFAULT_TARGET
from mlcpipe.cli.console import byte_size, cell, new_table, print_json, stderr_console, stdout_console
from mlcpipe.cpu_name import cpu_model
from mlcpipe.env import env
from mlcpipe.errors import CompileError, MlcpipeError
from mlcpipe.version import PINNED, __version__

# Vulkan's features that make models faster or smaller -> what they are for.
_VULKAN_FEATURES = {
    "shaderFloat16": "float16",
    "shaderInt8": "int8",
    "shaderIntegerDotProduct": "integer dot products",
    "subgroupArithmetic": "subgroup sums",
    "cooperativeMatrix": "cooperative matrices",
}
_MARKS = {"ok": "[green]ok[/]", "note": "", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}


# What a target links with -> the finding that says whether it is here.
_LINKERS = {"shared": "linker", "wasm": "emcc", "device": "linker", "cuda": "nvrtc"}
# Those that are compiled here for other machines, too.
_ELSEWHERE = ("wasm", "cuda", "metal", "metal-archive")


@dataclass(frozen=True)
class Finding:
    """One fact: `state` is "ok", "note", "missing" or "broken"; `advice` is what to type, "" if nothing."""

    name: str
    state: str
    value: str
    advice: str = ""


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
    findings = [*_packages(), *_linker(), *_wasm_compiler(), *_cuda_compiler(), *_machine(bandwidth)]
    broken = [finding.name for finding in findings if finding.state in ("broken", "missing")]
    if "tvm" not in broken:
        findings += _vulkan()
        findings += _cuda()
        findings += _metal()
    findings += _targets(broken)
    usable = any(f.name == f"target {DEFAULT_TARGET}" and f.state == "ok" for f in findings)
    if as_json:
        print_json({"cpu_usable": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings)
    if not usable:
        raise typer.Exit(1)


def _packages() -> Iterator[Finding]:
    yield Finding("mlcpipe", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {machine.system_name()}")
    pair = " ".join(f"{name}=={version}" for name, version in PINNED.items())
    found = {name: machine.package_version(name) for name in PINNED}
    value = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if found != PINNED:
        yield Finding("tvm", "broken", f"{value}; only one pair works together", f"pip install {pair}")
    elif problem := _import_problem():
        yield Finding("tvm", "broken", f"{value}; {problem}", f"pip install --force-reinstall {pair}")
    else:
        yield Finding("tvm", "ok", value)


def _import_problem() -> str:
    """Why TVM does not load, in a line; "" if it does."""
    try:
        import tvm
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "" if tvm.runtime.enabled("llvm") else "it was built without LLVM"


def _linker() -> Iterator[Finding]:
    from mlcpipe.compiler.link import find_linker

    try:
        linker = find_linker()
    except CompileError as error:
        yield Finding("linker", "missing", error.what, error.next_step or "")
    else:
        yield Finding("linker", "ok", f"{linker.name}: {linker.version}")


def _wasm_compiler() -> Iterator[Finding]:
    """What builds libraries for browsers."""
    from mlcpipe.compiler.emscripten import find_emcc

    try:
        emcc = find_emcc()
    except CompileError as error:
        yield Finding("emcc", "missing", f"{error.what}: it builds libraries for browsers", error.next_step or "")
    else:
        yield Finding("emcc", "ok", emcc.version)


def _cuda_compiler() -> Iterator[Finding]:
    """What compiles kernels for NVIDIA's GPUs."""
    from mlcpipe.compiler.cuda.nvrtc import find_nvrtc

    try:
        yield Finding("nvrtc", "ok", f"NVRTC {find_nvrtc().version}")
    except CompileError as error:
        yield Finding("nvrtc", "missing", f"{error.what}: it builds kernels for CUDA", error.next_step or "")


def _machine(bandwidth: bool) -> Iterator[Finding]:
    import psutil

    yield Finding("cpu", "note", f"{cpu_model()}: {' '.join(machine.cpu_features()) or 'features unknown'}")
    yield from _variants()
    physical, logical = machine.core_counts()
    threads = env().threads
    chosen = f"MLCPIPE_THREADS asks for {threads}" if threads else f"{physical} threads are used"
    yield Finding("cores", "note", f"{physical} physical, {logical} logical; {chosen}")
    if cache := last_cache_bytes():
        yield Finding("last cache", "note", byte_size(cache))
    memory = psutil.virtual_memory()
    yield Finding("memory", "note", f"{byte_size(memory.total)}, {byte_size(memory.available)} free")
    if bandwidth:
        speed = read_bandwidth_gb_s(threads or physical)
        yield Finding("read bandwidth", "note", f"{speed:.1f} GB/s with {threads or physical} threads")
    folder = env().cache_dir
    yield Finding("cache", "note", f"{folder}, {byte_size(_tree_bytes(folder))}")


def _variants() -> Iterator[Finding]:
    """Which variant of a bundle's kernels this CPU runs, and what it lacks for better ones."""
    from mlcpipe.cpu_features import architecture, host_features
    from mlcpipe.targets import host_variants, load_target

    variants, here = host_variants(load_target(DEFAULT_TARGET)), host_features()
    best = next((variant for variant in variants if here.issuperset(variant.features)), None)
    if best is None:
        yield Finding("cpu variant", "missing", f"mlcpipe has no kernels for {architecture()}")
        return
    better = variants[: variants.index(best)]
    lacks = "; ".join(f"{v.name} needs {' '.join(f for f in v.features if f not in here)}" for v in better)
    others = ", ".join(v.name for v in variants if v not in (best, *better))
    parts = [
        best.name,
        f"better ones: {lacks}" if lacks else "the best there is",
        f"also runs {others}" if others else "",
    ]
    yield Finding("cpu variant", "note", "; ".join(part for part in parts if part))
    if (wanted := env().cpu_variant) is not None:
        runs = any(v.name == wanted and here.issuperset(v.features) for v in variants)
        advice = "" if runs else "unset MLCPIPE_CPU_VARIANT"
        yield Finding("MLCPIPE_CPU_VARIANT", "note" if runs else "broken", f"asks for {wanted}", advice)


def _vulkan() -> Iterator[Finding]:
    """The plugin, compiled now if it was not (some ten seconds, once), and the devices that it finds."""
    from mlcpipe.runtime import vulkan, vulkan_plugin
    from mlcpipe.targets import matrix_target, suited_target

    try:
        with stderr_console().status("compiling the Vulkan plugin, once"):
            yield Finding("vulkan plugin", "ok", str(vulkan_plugin.build()))
        devices = vulkan.devices()
    except MlcpipeError as error:
        yield Finding("vulkan", "missing", error.what, error.next_step or "")
        return
    for device in devices:
        if device.index is None:
            yield Finding("vulkan device", "broken", f"{device.title}: {device.problem}", "update its driver")
            continue
        limits = device.limits
        matrices = matrix_target(device.vendor_id, limits, device.features)
        subgroups = dict.fromkeys((limits["min_subgroup_size"], limits["max_subgroup_size"]))
        parts = [
            f"{device.title}, {device.kind}, Vulkan {device.api_version}",
            f"{byte_size(device.memory_bytes)} memory, {byte_size(device.free_bytes)} free",
            f"a tensor has at most {byte_size(limits['max_buffer_bytes'])}",
            f"{limits['max_threads']} threads share {byte_size(limits['max_shared_memory_bytes'])}",
            f"subgroups of {' to '.join(map(str, subgroups))}",
            f"has {', '.join(name for f, name in _VULKAN_FEATURES.items() if f in device.features) or 'no extras'}",
            f"compile with --target {suited_target(device.vendor_id, limits)}",
            *([f"--target {matrices} uses its matrices, untried on any GPU"] if matrices else []),
            "preferred" if device.index == 0 else f"taken by --device {device.spec}",
        ]
        yield Finding(device.spec, "ok", "; ".join(parts))


def _cuda() -> Iterator[Finding]:
    """The devices that CUDA finds; without a driver one line."""
    from mlcpipe.runtime import cuda

    try:
        for device in cuda.devices():
            sizes = f"{byte_size(device.memory_bytes)} memory, {byte_size(device.free_bytes())} free"
            yield Finding(device.spec, "ok", f"{device.title}; {sizes}")
    except MlcpipeError as error:
        yield Finding("cuda", "missing", error.what, error.next_step or "")


def _metal() -> Iterator[Finding]:
    """The devices that Metal finds; elsewhere than on a Mac one line."""
    from mlcpipe.runtime import metal
    from mlcpipe.targets import target_names

    try:
        for device in metal.devices():
            sizes = f"{byte_size(device.memory_bytes)} memory, {byte_size(device.free_bytes())} free"
            target = metal.suited_target(device, target_names())
            advice = f"compile with --target {target}, untried on any GPU"
            yield Finding(device.spec, "ok", f"{device.name}; {sizes}; {advice}")
    except MlcpipeError as error:
        yield Finding("metal", "missing", str(error))


def _targets(broken: list[str]) -> Iterator[Finding]:
    """Each target and, where it cannot be used here, why."""
    from mlcpipe.targets import load_target, target_names

    for name in target_names():
        try:
            target = load_target(name)
            reason = _unusable("tvm" in broken, _LINKERS.get(target.link, "") in broken, name)
        except MlcpipeError as error:
            yield Finding(f"target {name}", "broken", str(error))
            continue
        yield Finding(f"target {name}", "missing" if reason else "ok", reason or target.description)


def _unusable(no_tvm: bool, no_linker: bool, name: str) -> str:
    if no_tvm:
        return "TVM does not work (see above)"
    if no_linker:
        return "there is no linker (see above)"
    import tvm

    from mlcpipe.targets import compiled_variants, load_target, tvm_target

    described = load_target(name)
    if described.link in _ELSEWHERE:
        return ""
    target = tvm_target(described, compiled_variants(described)[0])
    try:
        device = tvm.runtime.device(target.get_target_device_type(), 0)
    except (ValueError, RuntimeError) as error:
        return f"this TVM has no runtime for {target.kind.name} ({str(error).strip().splitlines()[-1]})"
    return "" if device.exist else f"no {target.kind.name} device on this machine"


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
        except OSError:  # another program removes it meanwhile
            continue
    return total


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
