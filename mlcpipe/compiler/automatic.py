"""`--device auto` for a checkpoint: a GPU where it is clearly faster than the CPU, by a measurement that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from mlcpipe import devices
from mlcpipe.bundle.memory import Need
from mlcpipe.devices.base import Device
from mlcpipe.devices.support.speeds import KeptSpeed, Speed, identity_of
from mlcpipe.errors import MlcpipeError, last_line
from mlcpipe.host.bandwidth import cached_read_bandwidth_gb_s
from mlcpipe.host.cpu import core_counts
from mlcpipe.host.finding import byte_size
from mlcpipe.host.memory import FreeMemory
from mlcpipe.support.env import env
from mlcpipe.support.progress import Progress

# Decode reads 82 % of a CPU's bandwidth and 53 % of a GPU's rate of copies (docs/benchmarks.md): at 1.5 times the CPU's
# they decode alike, and the GPU is faster at prompts, which are bound by arithmetic.
GAIN = 1.5
STAGES_GAIN = 1.2  # of a GPU for some of the layers, whose states cross over, beside the CPU alone
STEP_S = 1e-3  # of launches and small kernels in a decode step of a GPU, however small the model


@dataclass(frozen=True)
class Place:
    """What a checkpoint is compiled for, and why; `saw_gpu`: there was a choice. `gb_s` is how fast a GPU reads.

    With several `devices`, values of `--device`, `target` has as many targets, with commas between them, and the model
    is cut into stages of so many layers: `stages`, once they are planned. A plan may leave one of the devices.
    """

    target: str
    why: str = ""
    saw_gpu: bool = False
    gb_s: float = 0.0
    devices: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()


def choose(needs: Callable[[str], Iterable[Need]], progress: Progress, *, cuts: bool = False) -> Place:
    """The place for a model: the first kind of GPU that is clearly faster and holds it, or the CPU.

    Where a later kind is taken, `why` has the reason against the first. With `cuts`, a model that a GPU does not hold
    is for both in stages, where that is clearly faster than the CPU. `needs` are estimates of what the model takes
    with a target, the cheap ones first; it may raise an error that tells why the target does not do.
    """
    reasons: list[str] = []
    for name in devices.gpu_kinds():
        try:
            place = _on_gpu(name, needs, progress, cuts)
        except MlcpipeError as error:
            place = "; ".join(filter(None, (error.what, error.next_step)))
        except (OSError, RuntimeError) as error:  # of a broken driver
            place = last_line(error)
        if isinstance(place, Place):
            return replace(place, why=f"{place.why} ({reasons[0]})") if reasons else place
        reasons += [place] if place else []
    target = devices.choose("cpu").best_target()
    return Place(target, reasons[0] if reasons else "no GPU was found", bool(reasons))


def _on_gpu(name: str, needs: Callable[[str], Iterable[Need]], progress: Progress, cuts: bool) -> Place | str:
    """The place on the first GPU of a kind, or why it is not taken, "" if there is none. Raises MlcpipeError."""
    kept = KeptSpeed.of(name, env().cache_dir)
    if kept is None:
        return ""
    speed = kept.read()
    if speed is None:
        progress.stage("look at the GPU")
        speed = kept.measure(_check_tools)
    if not speed.identity:
        return ""
    cpu_gb_s = host_gb_s()
    if speed.gb_s < GAIN * cpu_gb_s:
        return _compared(speed, cpu_gb_s)
    device = kept.kind.choose()
    if identity_of(device) != speed.identity:  # another one is the first now
        speed = kept.measure(_check_tools)
        if not speed.identity:
            return ""
    target = device.best_target()
    for need in needs(target):
        with device.errors():
            free = device.free_memory()
        if lack := refusal(need, speed, free, cpu_gb_s):
            cpu = devices.choose("cpu")
            if not cuts or device.in_host_memory or not gains_in_stages(need, speed, free, cpu_gb_s):
                return lack
            return Place(f"{target},{cpu.best_target()}", lack, True, speed.gb_s, (device.spec, cpu.spec))
    return Place(target, _compared(speed, cpu_gb_s), True, speed.gb_s)


def refusal(need: Need, speed: Speed, free: FreeMemory, cpu_gb_s: float) -> str:
    """Why a model is not run on a GPU, or ""."""
    name = speed.identity[0]
    if need.nbytes > free.nbytes:
        return f"{name} has {free}, and the model takes {byte_size(need.nbytes)}"
    if token_s(need, cpu_gb_s) < GAIN * token_s(need, speed.gb_s, STEP_S):
        return f"{name} gains nothing for a model of {byte_size(need.read)}"
    return ""


def gains_in_stages(need: Need, speed: Speed, free: FreeMemory, cpu_gb_s: float) -> bool:
    """Whether a model that a GPU does not hold decodes clearly faster with as many of its layers there as fit."""
    if need.nbytes <= free.nbytes or not need.weights:
        return False
    share = max(0.0, free.nbytes - need.running) / (need.weights + need.states)
    apart = [replace(need, read=int(need.read * part)) for part in (share, 1 - share)]
    in_stages = token_s(apart[0], speed.gb_s, STEP_S) + token_s(apart[1], cpu_gb_s)
    return token_s(need, cpu_gb_s) >= STAGES_GAIN * in_stages


def token_s(need: Need, gb_s: float, step_s: float = 0.0) -> float:
    """Seconds that a decoded token takes at least."""
    return need.read / (gb_s * 1e9) + step_s


def host_gb_s() -> float:
    """The CPU's read bandwidth, measured once per boot. Raises ResourceError without memory to measure it."""
    return cached_read_bandwidth_gb_s(env().threads or core_counts()[0], env().cache_dir)


def _check_tools(device: Device) -> None:
    """Raises CompileError if nothing here compiles for a device."""
    from mlcpipe.compiler.backends import find_writer  # loads TVM
    from mlcpipe.targets import load_target

    find_writer(load_target(device.best_target()))


def _compared(speed: Speed, cpu_gb_s: float) -> str:
    return f"{speed.identity[0]} reads {_rate(speed.gb_s)}, the CPU {_rate(cpu_gb_s)}"


def _rate(gb_s: float) -> str:
    return f"{gb_s / 1000:.1f} TB/s" if gb_s >= 1000 else f"{gb_s:.0f} GB/s"
