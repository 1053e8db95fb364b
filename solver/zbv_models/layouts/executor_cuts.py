"""A layout under the schedules of an executor: its cuts, bounds and steps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.partition.runs import First
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.layered_unit import OwnUnit
from zbv_solver.search.options import Effort
from zbv_solver.search.search_state import Cancelled

from zbv_models.fixed_orders.best_cut import BestCut, answer_of, order_search
from zbv_models.fixed_orders.executor_cut import schedules_of, stage_letters
from zbv_models.fixed_orders.megatron_layout import Stages
from zbv_models.fixed_orders.order_search import OrderSearch
from zbv_models.fixed_orders.regular_cut import Once
from zbv_models.fixed_orders.schedules import Schedule
from zbv_models.layouts.estimated_layout import SECONDS, EstimatedLayout, Setting
from zbv_models.layouts.layout import Layout, Recompute


class ExecutorCandidate(NamedTuple):
    """A layout for an executor; ``number`` is that of the enumeration."""

    number: int
    executor: str
    layout: Layout


@dataclass(frozen=True, eq=False)
class LayoutVariant:
    """A candidate with one choice of recomputation, and its estimate.

    ``per-stage`` stands for as many first layers of every stage, which the cut decides.
    """

    candidate: ExecutorCandidate
    estimated: EstimatedLayout

    @cached_property
    def least_once(self) -> float:
        """Lower bound in seconds of what the busiest rank does once per step.

        It does at least the mean of all ranks, and what any layer needs; and it sums the gradients of tables.
        """
        estimate = self.estimated.estimate
        largest = max(layer.step.total for layer in estimate.layers) * SECONDS
        return max(self.estimated.least_once, largest) + estimate.table_reduction * SECONDS


@dataclass(eq=False)
class SharedSearch:
    """The search of cuts for layers and a schedule, which several layouts may share.

    Attributes
    ----------
    steps
        How often it was advanced.
    has_sought
        Whether a good cut was sought.
    is_finished
        Whether it was searched in full.
    """

    search: OrderSearch
    steps: int = 0
    has_sought: bool = False
    is_finished: bool = False

    def advance(self) -> None:
        """First, bound the loads; then, bound the objective."""
        if self.steps == 0:
            self.search.bound_loads()
        else:
            self.search.estimate()
        self.steps += 1

    def seek(self, below: float) -> None:
        """Seek a good cut if the objective may be below a value, which differs between layouts."""
        if not self.has_sought and self.search.bound < below:
            self.has_sought = True
            self.search.seek_cut()


@dataclass(frozen=True, eq=False)
class OwnLayers:
    """The layers of a variant as an executor cuts them.

    Attributes
    ----------
    modules
        What the executor calls the layers, if it names them.
    allow_empty
        Whether stages may be empty, as those of Megatron-LM.
    recompute
        What the search may recompute; None if costs already are those of the variant.
    """

    unit: OwnUnit
    modules: Modules | None
    allow_empty: bool
    schedules: tuple[Schedule, ...]
    recompute: First | None

    @classmethod
    def of(cls, problem: LayeredProblem, executor: str, layers: int | None = None) -> OwnLayers:
        """The layers of a problem; without schedules if the executor refuses its ranks and microbatches.

        ``layers`` is how many first layers of every stage are recomputed, if that is fixed.

        Raises :class:`InvalidInput` when the executor does not take such layers.
        """
        modules = None if executor == "torch" else Modules.of(problem.model)
        try:
            # One rank has nothing to interleave.
            chunks = (1,) if problem.pp_degree == 1 else None
            schedules = tuple(schedules_of(problem, executor, chunks))
        except InvalidInput:
            schedules = ()
        first = None
        if problem.model.can_recompute and modules is not None:
            first = modules.first_blocks(problem)
        if first is not None and layers is not None:
            first = replace(first, least=layers, most=layers)
        return cls(
            OwnUnit.of(problem if modules is None else modules.kept_whole(problem)),
            modules,
            executor == "megatron",
            schedules,
            first,
        )


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A variant under one schedule.

    Attributes
    ----------
    steps
        How often its search must have been advanced before this node has its bound.
    """

    variant: LayoutVariant
    own: OwnLayers
    shared: SharedSearch
    steps: int = 0

    @property
    def schedule(self) -> Schedule:
        """The executor's order."""
        return self.shared.search.schedule

    @property
    def _seconds(self) -> float:
        """Seconds of the search's unit."""
        return self.own.unit.length * SECONDS

    @property
    def bound(self) -> float:
        """Lower bound of the step in seconds, over all cuts; inf if it is proved that none fits."""
        return self.shared.search.bound * self._seconds + self.variant.least_once

    @property
    def has_cut(self) -> bool:
        """Whether a cut that fits is known."""
        return self.shared.search.best is not None

    @property
    def is_open(self) -> bool:
        """Whether a full search may find a shorter pipeline, or prove that there is none."""
        search = self.shared.search
        return not self.shared.is_finished and search.bound < search.value * (1 - OPTIMAL_GAP)

    @property
    def step_time(self) -> float:
        """Seconds of the step with the best known cut."""
        search = self.shared.search
        if search.best is None:
            return inf
        bounds, chosen = search.best
        return search.value * self._seconds + self._once(search.space.cut(bounds, tuple(map(bool, chosen))))

    def _once(self, cut: Cut) -> float:
        """Seconds that the busiest rank of a cut needs once per step."""
        names = self.own.unit.given.model.names
        stages = [names[begin:end] for begin, end in pairwise(cut.bounds)]
        return self.variant.estimated.once(
            [tuple(name for s in of_rank for name in stages[s]) for of_rank in self._stages_of]
        )

    @property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        return self.schedule.placement.stages_of

    @property
    def size(self) -> int:
        """Actions times ranks: what it takes to find the longest path from every rank to every other one."""
        orders = self.shared.search.order.orders
        return len(orders) * self.schedule.placement.pp_degree

    def advanced(self, below: float = inf) -> Scheduled:
        """The node with a tighter bound; a cut is sought only if its step may be below this, in seconds."""
        if self.shared.steps == self.steps:
            self.shared.advance()
        if self.steps > 0:
            self.shared.seek((below - self.variant.least_once) / self._seconds)
        return replace(self, steps=self.steps + 1)

    def finish(self, below: float) -> None:
        """Search cuts in full, and prove a bound up to a step of ``below`` seconds."""
        most = (below - self.variant.least_once) / self._seconds
        self.shared.is_finished = True
        self.shared.search.finish(max(0.0, most), 1.0)

    def answer(self) -> tuple[BestCut, float]:
        """A regular cut with a step that is hardly longer than the best known one, and its seconds."""
        best = answer_of(self.own.unit, [self.shared.search], self.own.allow_empty, self._once_of_parts)
        model = best.problem.model
        return best, best.objective * SECONDS + (0.0 if model is None else self._once(model.cut))

    @property
    def _once_of_parts(self) -> Once:
        """What a step needs once, in the search's unit."""
        estimated, unit = self.variant.estimated, self.own.unit
        of = {name: layer.step.total for layer in estimated.estimate.layers for name in layer.names}
        each = np.array([of[name] for name in unit.given.model.names]) / unit.length
        fixed = (estimated.estimate.table_reduction + estimated.latency) / unit.length
        return Once(np.add.reduceat(each, self.shared.search.problem.places[:-1]), fixed)

    def letters(self, best: BestCut) -> Stages | None:
        """The modules of every stage of a cut, if the executor names them."""
        return None if self.own.modules is None else stage_letters(best.problem, self.own.modules)


@dataclass
class ScheduleSource:
    """The schedules of variants, made once for equal layers."""

    setting: Setting
    effort: Effort
    cancelled: Cancelled | None = None
    _layers: dict[Hashable, OwnLayers] = field(default_factory=dict)
    _searches: dict[Hashable, SharedSearch | None] = field(default_factory=dict)

    def variants(self, candidate: ExecutorCandidate) -> Iterator[LayoutVariant]:
        """A candidate with every recomputation of its executor, as far as its layout allows."""
        setting = self.setting.of_executor(candidate.executor)
        estimated = EstimatedLayout.of(candidate.layout, setting)
        if not estimated.has_room_for_states:
            return
        if candidate.layout.recompute == "selective":
            for modules in self.setting.modules_of(candidate.executor):
                layout = replace(candidate.layout, recompute_modules=modules)
                yield LayoutVariant(candidate, EstimatedLayout.of(layout, setting))
            return
        can_recompute = any(layer.recomputed is not None for layer in estimated.estimate.layers)
        for recompute in self._choices(candidate):
            if recompute == "none" or can_recompute or candidate.layout.recompute == "full":
                layout = replace(candidate.layout, recompute=recompute)
                yield LayoutVariant(candidate, replace(estimated, layout=layout))

    def _choices(self, candidate: ExecutorCandidate) -> tuple[Recompute, ...]:
        """None or all; or as many first layers of every stage, which may be none or all but MTP's."""
        layout = candidate.layout
        if layout.recompute != "per-stage" or layout.recompute_layers is not None:
            return (layout.recompute,)
        if candidate.executor != "megatron":
            return ("none", "full")
        return ("per-stage", "full") if self.setting.model.predictions else ("per-stage",)

    def scheduled(self, variant: LayoutVariant) -> Iterator[Scheduled]:
        """A variant under every schedule of its executor."""
        estimated, executor = variant.estimated, variant.candidate.executor
        recomputed = variant.candidate.layout.recompute_layers
        for schedule in self._own(estimated.problem, executor, recomputed).schedules:
            problem = estimated.with_buffers(executor, schedule.placement.chunks)
            own = self._own(problem, executor, recomputed)
            search = self._search(problem, own, schedule)
            if search is not None:
                yield Scheduled(variant, own, search)

    def _own(self, problem: LayeredProblem, executor: str, recomputed: int | None) -> OwnLayers:
        key = problem, executor, recomputed
        if key not in self._layers:
            self._layers[key] = OwnLayers.of(problem, executor, recomputed)
        return self._layers[key]

    def _search(self, problem: LayeredProblem, own: OwnLayers, schedule: Schedule) -> SharedSearch | None:
        key = problem, schedule, own.allow_empty, own.recompute
        if key not in self._searches:
            late = own.modules.late if own.modules is not None and own.allow_empty else None
            chosen = own.recompute or (0,) * schedule.placement.n_stages
            try:
                made = order_search(
                    own.unit, schedule, chosen, allow_empty=own.allow_empty, late=late, effort=self.effort
                )
            except InvalidInput:
                self._searches[key] = None
            else:
                made.cancelled = self.cancelled
                self._searches[key] = SharedSearch(made)
        return self._searches[key]
