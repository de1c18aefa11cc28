"""Which layers of a model run on which device: from free memory and measured bandwidth, or as a user says.

A decode step reads the weights of its layers once, so its time on a device is at least their bytes over the device's
bandwidth. The fastest device therefore gets as many layers as its memory holds, the next one as many of the rest. Of a
mixture of experts it keeps all layers, and the other one gets experts of the last ones: a token reads few of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlcpipe import devices
from mlcpipe.bundle.memory import USEFUL_CONTEXT, conversation_units, least_running_bytes
from mlcpipe.bundle.stages import Experts, runs_of
from mlcpipe.checkpoint import Checkpoint
from mlcpipe.checkpoint.draft_heads import NO_HEAD, with_draft_head
from mlcpipe.compiler.automatic import host_gb_s
from mlcpipe.compiler.export import MAX_BATCH
from mlcpipe.compiler.job import attention_bytes, lengths, stored_weights
from mlcpipe.compiler.stages import check_model, stage_models, targets_of
from mlcpipe.devices.base import Device
from mlcpipe.devices.support.speeds import KeptSpeed, copied_gb_s
from mlcpipe.errors import ResourceError, UsageError
from mlcpipe.host.finding import byte_size
from mlcpipe.nn.causal_lm import CausalLM
from mlcpipe.nn.language_model import LanguageModel, blocks_of
from mlcpipe.nn.moe import Mixture
from mlcpipe.quantization.recipe import QuantizationRecipe, load_recipe
from mlcpipe.support.env import env
from mlcpipe.weights.table import Weight

_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:.*\.(experts_gate_up|experts_down)\.)?")
_EMBEDDING = ("model.embed_",)
_MARGIN = 64 << 20  # for code, and what workspaces take beyond the estimate


@dataclass(frozen=True)
class Cost:
    """Bytes that a run of layers takes: its weights, `read` of them for a decoded token, and its states."""

    weights: int = 0
    read: int = 0
    states: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.weights + other.weights, self.read + other.read, self.states + other.states)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.weights - other.weights, self.read - other.read, self.states - other.states)

    @property
    def nbytes(self) -> int:
        """What memory must hold."""
        return self.weights + self.states


@dataclass(frozen=True)
class Costs:
    """What each layer takes on a device; the embedding is in the first stage, norm and output in the last.

    `running`: everything else of a run, an estimate before it is compiled. `experts`: what those of each layer take of
    it; none of a model that cannot leave them to another device.
    """

    layers: tuple[Cost, ...]
    embedding: Cost
    output: Cost
    running: int
    experts: tuple[Cost, ...] = ()

    def experts_of(self, layers: Iterable[int]) -> Cost:
        """What the experts of some layers take."""
        return sum((self.experts[index] for index in layers if self.experts), Cost())

    def of(self, layers: range, away: range = range(0)) -> Cost:
        """What a stage takes without the experts of the layers `away`."""
        cost = sum((self.layers[index] for index in layers), Cost())
        cost -= self.experts_of(index for index in layers if index in away)
        cost = cost if layers.start else cost + self.embedding
        return cost + self.output if layers.stop == len(self.layers) else cost


@dataclass(frozen=True)
class Room:
    """A device for a stage: bytes that are free for it, in which memory, and how fast it reads them."""

    spec: str
    title: str
    target: str
    free: int
    memory: str
    gb_s: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan, or the experts of its layers `alone`."""

    room: Room
    layers: range
    cost: Cost
    running: int
    alone: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.cost.nbytes + self.running

    @property
    def token_s(self) -> float:
        """Seconds that a decoded token takes at least."""
        return self.cost.read / (self.room.gb_s * 1e9)


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model in order, for a context in tokens. `hidden_size` numbers a row cross each border."""

    stages: tuple[PlannedStage, ...]
    context: int
    hidden_size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage; of the last one perhaps `Experts`."""
        sizes = [(len(stage.layers), stage.alone) for stage in self.stages]
        return tuple(Experts(count) if alone else count for count, alone in sizes)

    @property
    def targets(self) -> str:
        """The targets as `mlcpipe compile` takes them."""
        return ",".join(stage.room.target for stage in self.stages)

    @property
    def row_bytes(self) -> int:
        """Bytes that cross each border for a token."""
        return 4 * self.hidden_size

    @property
    def token_s(self) -> float:
        """Seconds that a decoded token takes at least, stage after stage."""
        return sum(stage.token_s for stage in self.stages)


def plan(
    rooms: Sequence[Room], costs: Sequence[Costs], counts: Sequence[int] | None = None, *, even: bool = False
) -> tuple[PlannedStage, ...]:
    """Stages for rooms in the order of the layers; `costs` are those with the target of each room.

    `counts` are layers of each, instead of a choice. One room that holds the whole model, and is the fastest, is the
    only stage; if `even`, all rooms have stages that take about equally long. Raises ResourceError where something does
    not fit, UsageError for counts that are not the model's.
    """
    total = len(costs[0].layers)
    if counts is not None:
        if len(counts) != len(rooms):
            found = f"{len(counts)} for {len(rooms)} devices"
            raise UsageError("--stages", expected="a number of layers for each device", found=found)
        return _checked(rooms, costs, runs_of(counts, total), alone=isinstance(counts[-1], Experts))
    if total < len(rooms):
        raise UsageError("--device", expected=f"at most {total} devices, as the model has layers", found=len(rooms))
    if even:
        return _checked(rooms, costs, _even(rooms, costs))
    order = sorted(range(len(rooms)), key=lambda index: (-rooms[index].gb_s, index))
    alone = order[0]
    whole = PlannedStage(rooms[alone], range(total), costs[alone].of(range(total)), costs[alone].running)
    if whole.nbytes <= rooms[alone].free and len({room.memory for room in rooms}) > 1:
        return (whole,)
    if (apart := _with_experts_apart(rooms, costs)) is not None:
        return apart
    chosen, left, used = [0] * len(rooms), total, dict.fromkeys((room.memory for room in rooms), 0)
    for place, index in enumerate(order):
        waiting = len(order) - place - 1
        most = left - waiting
        room, cost = rooms[index], costs[index]
        edges = (cost.embedding if index == 0 else Cost()) + (cost.output if index == len(rooms) - 1 else Cost())
        free = room.free - used[room.memory] - cost.running - edges.nbytes
        largest = max(layer.nbytes for layer in cost.layers)  # whichever layers these will be
        fits = most if not largest else min(most, max(0, free) // largest)
        if waiting:
            chosen[index] = fits
        else:
            chosen[index] = most
        if not chosen[index]:
            raise _full(room, largest + edges.nbytes + cost.running, "one layer")
        used[room.memory] += chosen[index] * largest + edges.nbytes + cost.running
        left -= chosen[index]
    return _checked(rooms, costs, runs_of(chosen, total))


def _even(rooms: Sequence[Room], costs: Sequence[Costs]) -> tuple[range, ...]:
    """Runs of layers for all rooms, each in a memory of its own, of which the slowest takes as short as possible.

    Where the model does not fit, the last room has what is too much.
    """
    total = len(costs[0].layers)

    def ends(limit_s: float) -> list[int]:
        """Where the runs end if each takes at most `limit_s` for a token, and what its memory holds."""
        found: list[int] = []
        for index, (room, cost) in enumerate(zip(rooms, costs)):
            begin = found[-1] if found else 0
            end = begin + 1
            while end < total - (len(rooms) - index - 1):
                more = PlannedStage(room, range(begin, end + 1), cost.of(range(begin, end + 1)), cost.running)
                if more.token_s > limit_s or more.nbytes > room.free:
                    break
                end += 1
            found.append(end)
        return found

    whole = [PlannedStage(room, range(total), cost.of(range(total)), cost.running) for room, cost in zip(rooms, costs)]
    low, high = 0.0, max(one.token_s for one in whole)
    for _ in range(40):  # halving: to a trillionth of the whole
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == total else (middle, high)
    chosen = [*ends(high)[:-1], total]
    return tuple(range(begin, end) for begin, end in zip([0, *chosen], chosen))


def _with_experts_apart(rooms: Sequence[Room], costs: Sequence[Costs]) -> tuple[PlannedStage, ...] | None:
    """All layers on the first of two devices, the faster one, with the experts of as few as possible on the other.

    None where the model has none, or the devices have no room for it so.
    """
    if len(rooms) != 2 or rooms[0].memory == rooms[1].memory or rooms[0].gb_s < rooms[1].gb_s:
        return None
    total = len(costs[0].layers)
    for first in reversed(range(total)):
        if costs[0].experts_of([first]) != Cost():
            try:
                return _checked(rooms, costs, (range(total), range(first, total)), alone=True)
            except ResourceError:
                continue
    return None


def _checked(
    rooms: Sequence[Room], costs: Sequence[Costs], runs: Sequence[range], *, alone: bool = False
) -> tuple[PlannedStage, ...]:
    """The stages; with `alone` the last run is of experts. Raises ResourceError for one that its memory does not hold
    beside the others in it, and UsageError for experts of a model that has none.
    """
    away = runs[-1] if alone else range(0)
    taken = [cost.of(run, away) for cost, run in zip(costs, runs)]
    if alone:
        taken[-1] = costs[-1].experts_of(away)
        if taken[-1] == Cost():
            raise UsageError(
                "--stages", expected="layers with one mixture of experts each, for experts on a device of their own",
                found="none", next_step="say how many layers each device gets",
            )  # fmt: skip
    stages = tuple(
        PlannedStage(room, run, cost, of.running, alone and run is away)
        for room, run, cost, of in zip(rooms, runs, taken, costs)
    )
    used: dict[str, int] = {}
    for stage in stages:
        used[stage.room.memory] = used.get(stage.room.memory, 0) + stage.nbytes
        if used[stage.room.memory] > stage.room.free:
            words = f"layers {stage.layers.start} to {stage.layers.stop - 1}"
            words = f"experts of {words}" if stage.alone else words
            raise _full(stage.room, used[stage.room.memory], words)
    return stages


def _full(room: Room, needed: int, what: str) -> ResourceError:
    return ResourceError(
        f"{what} of the model do not fit" if what != "one layer" else f"{what} of the model does not fit",
        where=f"{room.spec}, {room.title}", expected=f"{byte_size(needed)} free", found=f"{byte_size(room.free)} free",
        next_step="take a shorter --context, fewer layers there, a smaller model or a --quantization of fewer bits",
    )  # fmt: skip


def room_of(spec: str, target: str | None, limit: int | None, measure: Callable[[Device], float]) -> Room:
    """A device of `--device`. `limit` bounds the memory of one that has its own, or is no CPU."""
    device = devices.choose(spec)
    with device.errors():
        free = device.free_memory().nbytes
    if limit is not None and not device.on_host:
        free = min(free, limit)
    shared = device.in_host_memory and (device.on_host or limit is None)
    memory = "" if shared else device.spec
    return Room(device.spec, device.title, target or device.best_target(), free, memory, measure(device))


def gb_s_of(device: Device) -> float:
    """How fast a device reads its memory, in GB/s (10^9 bytes): measured once and kept, where that is possible."""
    if device.on_host or not device.is_hardware:
        return host_gb_s()
    kept = KeptSpeed.of(device.KIND, env().cache_dir)
    if device.index or kept is None:
        return copied_gb_s(device)
    speed = kept.read() or kept.measure(lambda device: None)
    return speed.gb_s or copied_gb_s(device)


def plan_stages(
    checkpoint: Checkpoint,
    rooms: Sequence[Room],
    quantization: str | QuantizationRecipe,
    kv_cache_dtype: str,
    context: int | None = None,
    counts: Sequence[int] | None = None,
    *,
    even: bool = False,
) -> StagePlan:
    """A plan for a checkpoint, with room for `context` tokens, by default a useful number of them; `even` as in `plan`.

    Raises what `plan` raises, and ConfigError or TargetError for a model or target that has no stages.
    """
    check_model(checkpoint)
    checkpoint = with_draft_head(checkpoint, NO_HEAD)
    recipe = load_recipe(quantization) if isinstance(quantization, str) else quantization
    targets = targets_of(",".join(room.target for room in rooms))
    models = stage_models(checkpoint, targets, recipe, kv_cache_dtype)
    sizes = [lengths(model, target, checkpoint, None) for model, target in zip(models, targets)]
    most, chunk = (min(several) for several in zip(*sizes))
    tokens = min(most, context or USEFUL_CONTEXT)
    known: dict[str, Costs] = {}
    for model, target in zip(models, targets):
        if target.name not in known:
            table = stored_weights(checkpoint, target, recipe)
            known[target.name] = _costs(model, table, tokens, chunk)
    costs = [known[target.name] for target in targets]
    return StagePlan(plan(rooms, costs, counts, even=even), tokens, models[0].facts.hidden_size)


def _costs(model: LanguageModel, table: Sequence[Weight], context: int, chunk: int) -> Costs:
    """What the layers of a model take with such stored weights, for a conversation."""
    facts = model.facts
    layers, experts = [Cost()] * facts.num_layers, [Cost()] * facts.num_layers
    embedding = output = Cost()
    widest = facts.hidden_size
    for weight in table:
        cost = Cost(0 if weight.gathered else weight.nbytes, weight.decode_nbytes)
        if (match := _LAYER.match(weight.name)) is not None:
            layers[int(match[1])] += cost
            experts[int(match[1])] += cost if match[2] else Cost()
            widest = max((widest, *weight.shape[-2:-1]))
        elif weight.name.startswith(_EMBEDDING):
            row = Cost(cost.weights, weight.nbytes // weight.shape[0])
            embedding += row
            output += cost if facts.tied and weight.name == "model.embed_tokens.weight" else Cost()
        else:
            output += cost
    states = model.states()
    units = conversation_units(states, chunk, MAX_BATCH, context)
    for state in states:
        layers[min(state.layers)] += Cost(states=units.nbytes(states, [state]))
    work = attention_bytes(model, chunk) + 4 * chunk * (4 * facts.hidden_size + 2 * widest)
    running = least_running_bytes(facts.vocab_size) + work + _MARGIN
    apart = isinstance(model, CausalLM) and all(
        sum(1 for _ in blocks_of(layer, Mixture)) < 2 for layer in model.model.layers
    )
    return Costs(tuple(layers), embedding, output, running, tuple(experts) if apart else ())


def described(found: StagePlan) -> list[Mapping[str, object]]:
    """A row of each stage for JSON: bytes, and seconds of a token at least."""
    return [
        {
            "device": stage.room.spec,
            "name": stage.room.title,
            "target": stage.room.target,
            "layers": [stage.layers.start, stage.layers.stop],
            "experts_alone": stage.alone,
            "weights_bytes": stage.cost.weights,
            "read_bytes": stage.cost.read,
            "states_bytes": stage.cost.states,
            "running_bytes": stage.running,
            "free_bytes": stage.room.free,
            "gb_s": stage.room.gb_s,
            "token_s": stage.token_s,
        }
        for stage in found.stages
    ]
