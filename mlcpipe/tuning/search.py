"""Proposes choices with TVM's MetaSchedule: evolutionary search with an XGBoost cost model, over our design spaces.

Our kernels are generated from knobs, not by transforming loops, so the search works on a stand-in with one block.
`sch.sample_categorical` draws every knob and `sch.annotate` stores it. Our postprocessor drops invalid choices, and
our mutator moves one knob (TVM's mutators skip such categories). The cost model sees sizes and knobs instead of loops.
TVM's builder and runner are not used: they measure warm caches, and each candidate alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule
from tvm.s_tir.meta_schedule.cost_model import CostModel, RandomModel, XGBModel
from tvm.s_tir.meta_schedule.database import MemoryDatabase, TuningRecord
from tvm.s_tir.meta_schedule.feature_extractor import PyFeatureExtractor
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.meta_schedule.mutator import PyMutator
from tvm.s_tir.meta_schedule.postproc import PyPostproc
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import EvolutionarySearch
from tvm.s_tir.meta_schedule.space_generator import ScheduleFn
from tvm.script import tirx as T

from tir_schedules.space import Choice, Space

_BLOCK = "kernel"
_BATCH = 8  # candidates per generation, and before the cost model is used
_POPULATION = 64
_NEVER = 1e10  # seconds of a failed candidate, as in TVM's cost model


def cost_model_name() -> str:
    """The cost model used here: XGBoost if it is installed."""
    return "xgboost" if find_spec("xgboost") is not None else "none"


def new_cost_model(threads: int) -> CostModel:
    """A cost model shared by all kernels of a run, so they learn from each other."""
    logging.getLogger("tvm.s_tir.meta_schedule").setLevel(logging.WARNING)
    if cost_model_name() == "none":
        return RandomModel()
    return XGBModel(extractor=_Features(), num_warmup_samples=_BATCH, num_tuning_cores=threads)


@cache
def _one_block() -> Any:
    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
    def main(handle: T.handle):  # type: ignore[no-untyped-def]
        out = T.match_buffer(handle, (1,), "int32")
        for i in T.serial(1):
            with T.sblock("kernel"):
                v = T.axis.spatial(1, i)
                out[v] = 0

    return main


def _stand_in(title: str) -> tvm.IRModule:
    return tvm.IRModule({"main": _one_block().with_attr({"global_symbol": "main", "mlcpipe.kernel": title})})


class _Context(meta_schedule.TuneContext):  # type: ignore[misc]
    """TVM's context for one task without GPU intrinsics, which its own constructor takes seconds to parse."""

    def __init__(self, mod: tvm.IRModule, generator: Any, strategy: Any, title: str, seed: int) -> None:
        target = tvm.target.Target({"kind": "llvm", "num-cores": 1})
        log, threads = get_logging_func(logging.getLogger("tvm.s_tir.meta_schedule")), 1  # our parts are Python
        make = tvm.get_global_func("s_tir.meta_schedule.TuneContext")
        self.__init_handle_by_constructor__(make, mod, target, generator, strategy, title, threads, seed, log)
        tvm.get_global_func("s_tir.meta_schedule.TuneContextInitialize")(self)


class Search:
    """The search for one row range of one kernel; `learn` adds earlier measurements.

    `facts` are the kernel's sizes, which the cost model sees along with the knobs. `model` is shared by all kernels
    with such a space.
    """

    def __init__(self, space: Space, title: str, facts: Mapping[str, int], model: CostModel, seed: int) -> None:
        self._space, self._facts, self._model = space, facts, model
        self._mod, self._database = _stand_in(title), MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._tried: set[tuple[int, ...]] = {tuple(space.default[name] for name in space.knobs)}
        generator = ScheduleFn(
            self._sample, sch_rules=[], postprocs=[_Compilable(space)], mutator_probs={_MoveOne(seed): 1.0}
        )
        strategy = EvolutionarySearch(population_size=_POPULATION, init_min_unmeasured=_BATCH, genetic_num_iters=3)
        self._context = _Context(self._mod, generator, strategy, title, seed + 1)
        self._trace = self._context.generate_design_space()[0].trace
        self._started = False

    def _sample(self, sch: Any) -> None:
        block = sch.get_sblock(_BLOCK)
        for name, value in self._facts.items():
            sch.annotate(block, f"fact.{name}", value)
        for name, values in self._space.knobs.items():
            sch.annotate(block, name, sch.sample_categorical(list(values), [1.0 / len(values)] * len(values)))

    def propose(self, count: int) -> list[dict[str, int]]:
        """Up to `count` untried choices; fewer if the space is exhausted."""
        choices: list[dict[str, int]] = []
        for candidate in self._generate():
            self._offer(choices, _choice(self._space, candidate.sch), count)
        if len(choices) < count:  # a small space: choices that evolution did not draw
            rest = list(self._space.choices())
            random.Random(len(self._tried)).shuffle(rest)
            for choice in rest:
                self._offer(choices, choice, count)
        return choices

    def _generate(self) -> Sequence[Any]:
        if not self._started:  # late, so that the database has earlier `learn` results
            spaces = self._context.generate_design_space()
            self._context.pre_tuning(1 << 20, _BATCH, spaces, self._database, self._model)
            self._started = True
        return self._context.generate_measure_candidates() or ()

    def _offer(self, choices: list[dict[str, int]], choice: dict[str, int], count: int) -> None:
        key = tuple(choice.values())
        if len(choices) < count and key not in self._tried:
            self._tried.add(key)
            choices.append(choice)

    def learn(self, results: Sequence[tuple[Choice, float | None]]) -> None:
        """Add the seconds of choices, None for failed ones."""
        candidates, outcomes = [], []
        for choice, seconds in results:
            sch = self._scheduled(choice)
            candidates.append(meta_schedule.MeasureCandidate(sch, []))
            outcomes.append(RunnerResult([_NEVER if seconds is None else seconds], None))
            self._tried.add(tuple(choice[name] for name in self._space.knobs))
            self._database.commit_tuning_record(
                TuningRecord(sch.trace, self._workload, outcomes[-1].run_secs, self._context.target, [])
            )
        if candidates:
            self._model.update(self._context, candidates, outcomes)

    def _scheduled(self, choice: Choice) -> Any:
        """The stand-in's schedule with these knobs."""
        trace = self._trace
        for (name, values), draw in zip(self._space.knobs.items(), _draws(trace)):
            trace = trace.with_decision(draw, values.index(choice[name]), True)
        sch = tvm.s_tir.Schedule(self._mod)
        trace.apply_to_schedule(sch, remove_postproc=False)
        return sch


def _draws(trace: Any) -> list[Any]:
    return [inst for inst in trace.insts if inst.kind.name == "SampleCategorical"]


def _annotations(sch: Any) -> dict[str, int]:
    """The knobs drawn by a stand-in schedule, and its facts."""
    return {str(name): int(value) for name, value in sch.get(sch.get_sblock(_BLOCK)).annotations.items()}


def _choice(space: Space, sch: Any) -> dict[str, int]:
    annotations = _annotations(sch)
    return {name: annotations[name] for name in space.knobs}


@derived_object
class _Compilable(PyPostproc):  # type: ignore[misc]
    """Drops choices that the space rejects."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self._space = space

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Needs nothing from the context."""

    def apply(self, sch: Any) -> bool:
        return not self._space.problem(_choice(self._space, sch))

    def clone(self) -> Any:
        return _Compilable(self._space)


@derived_object
class _MoveOne(PyMutator):  # type: ignore[misc]
    """Changes one knob to another of its values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._draw = seed, random.Random(seed)

    def _initialize_with_tune_context(self, context: Any) -> None:
        """Needs nothing from the context."""

    def apply(self, trace: Any, _: Any) -> Any:
        draws = [draw for draw in _draws(trace) if len(draw.attrs[0]) > 1]
        if not draws:
            return None
        draw = self._draw.choice(draws)
        now, other = int(trace.decisions[draw]), self._draw.randrange(len(draw.attrs[0]) - 1)
        return trace.with_decision(draw, other + (other >= now), True)

    def clone(self) -> Any:
        return _MoveOne(self._seed)


@derived_object
class _Features(PyFeatureExtractor):  # type: ignore[misc]
    """A candidate's knobs and facts, ordered by name."""

    def extract_from(self, context: Any, candidates: Sequence[Any]) -> list[Any]:
        rows = ([value for _, value in sorted(_annotations(candidate.sch).items())] for candidate in candidates)
        return [tvm.runtime.tensor(np.array([row], "float64")) for row in rows]
