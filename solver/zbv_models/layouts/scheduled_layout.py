"""A layout under one schedule of an executor: its cuts, the bounds of its step, and its step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np
from zbv_solver.errors import InvalidInput
from zbv_solver.partition.modules import Modules
from zbv_solver.partition.runs import First
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.assemble import OwnUnit
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import Effort

from zbv_models.fixed_orders.best_cut import BestCut, answer_of
from zbv_models.fixed_orders.executor_cut import stage_letters
from zbv_models.fixed_orders.megatron_layout import Stages
from zbv_models.fixed_orders.order_search import OrderSearch, order_search
from zbv_models.fixed_orders.regular_cut import Once
from zbv_models.fixed_orders.schedules import Schedule, schedules_of
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.layout import Layout, Recompute
from zbv_models.layouts.setting import SECONDS, Setting


@dataclass(eq=False)
class ExecutorLayers:
    """Layers as an executor cuts them, and the searches of their cuts.

    Layouts with equal layers share these, so every step of a search happens once.
    """

    executor: str
    unit: OwnUnit
    modules: Modules | None
    """What the executor calls the layers, if it names them."""
    recompute: First | None
    """What the search may recompute; None if costs already are those of the layout."""
    schedules: tuple[Schedule, ...]
    """Empty if the executor refuses the number of ranks and microbatches."""
    searches: dict[Schedule, OrderSearch | None] = field(default_factory=dict)
    """None where no cut keeps the rules."""
    done: set[tuple[Schedule, str]] = field(default_factory=set)
    """Steps of searches that are over."""

    @classmethod
    def of(cls, problem: LayeredProblem, executor: str, layers: int | None) -> ExecutorLayers:
        """The layers of a problem.

        ``layers`` is how many first layers of every stage are recomputed, if that is fixed. Raises
        :class:`InvalidInput` when the executor does not take such layers.
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
        unit = OwnUnit.of(problem if modules is None else modules.kept_whole(problem))
        return cls(executor, unit, modules, first, schedules)

    @property
    def allow_empty(self) -> bool:
        """Whether stages may be empty, as those of Megatron-LM."""
        return self.executor == "megatron"

    def search(self, schedule: Schedule, effort: Effort, cancelled: Cancelled | None) -> OrderSearch | None:
        """The search of cuts under a schedule; None if no cut keeps the rules."""
        if schedule not in self.searches:
            late = self.modules.late if self.modules is not None and self.allow_empty else None
            chosen = self.recompute or (0,) * schedule.placement.n_stages
            arguments = self.unit, schedule, chosen
            try:
                made = order_search(*arguments, allow_empty=self.allow_empty, late=late, effort=effort)
            except InvalidInput:
                self.searches[schedule] = None
            else:
                made.cancelled = cancelled
                self.searches[schedule] = made
        return self.searches[schedule]


@dataclass(frozen=True, eq=False)
class ScheduledLayout:
    """A layout under one schedule of an executor."""

    estimated: EstimatedLayout
    layers: ExecutorLayers
    search: OrderSearch

    @property
    def layout(self) -> Layout:
        """The degrees."""
        return self.estimated.layout

    @property
    def schedule(self) -> Schedule:
        """The executor's order."""
        return self.search.schedule

    @cached_property
    def least_once(self) -> float:
        """Lower bound in seconds of what the busiest rank does once per step.

        It does at least the mean of all ranks, and what any layer needs; and it sums the gradients of tables.
        """
        estimate = self.estimated.estimate
        largest = max(layer.step.total for layer in estimate.layers) * SECONDS
        return max(self.estimated.least_once, largest) + estimate.table_reduction * SECONDS

    @property
    def _unit(self) -> float:
        """Seconds of the search's unit."""
        return self.layers.unit.length * SECONDS

    @property
    def bound(self) -> float:
        """Lower bound of the step in seconds, over all cuts; inf if it is proved that none fits."""
        return self.search.bound * self._unit + self.least_once

    @property
    def is_open(self) -> bool:
        """Whether a full search may find a shorter pipeline, or prove that there is none."""
        is_finished = (self.schedule, "finish") in self.layers.done
        return not is_finished and self.search.bound < self.search.value * (1 - OPTIMAL_GAP)

    @property
    def step_time(self) -> float:
        """Seconds of the step with the best known cut."""
        if self.search.best is None:
            return inf
        bounds, chosen = self.search.best
        cut = self.search.space.cut(bounds, tuple(map(bool, chosen)))
        return self.search.value * self._unit + self._once(cut)

    @property
    def size(self) -> int:
        """Actions times ranks: what it takes to find the longest path from every rank to every other one."""
        return len(self.search.order.orders) * self.schedule.placement.pp_degree

    def bound_loads(self) -> None:
        """Tighten the bound by the loads and the memory of ranks."""
        if self._is_due("loads"):
            self.search.bound_loads()

    def bound_paths(self, below: float) -> None:
        """Tighten the bound by critical paths; seek a cut if its step may be below this, in seconds."""
        if self._is_due("paths"):
            self.search.estimate()
        if self.search.bound < (below - self.least_once) / self._unit and self._is_due("cut"):
            self.search.seek_cut()

    def finish(self, below: float) -> None:
        """Search cuts in full, and prove a bound up to a step of ``below`` seconds."""
        if self._is_due("finish"):
            self.search.finish(max(0.0, (below - self.least_once) / self._unit), 1.0)

    def _is_due(self, step: str) -> bool:
        """Whether this is the first time that a step of the shared search is asked for."""
        is_due = (self.schedule, step) not in self.layers.done
        self.layers.done.add((self.schedule, step))
        return is_due

    def answer(self) -> tuple[BestCut, float]:
        """A regular cut with a step that is hardly longer than the best known one, and its seconds."""
        arguments = self.layers.unit, [self.search], self.layers.allow_empty
        best = answer_of(*arguments, self._once_of_parts)
        model = best.problem.model
        return best, best.objective * SECONDS + (0.0 if model is None else self._once(model.cut))

    def letters(self, best: BestCut) -> Stages | None:
        """The modules of every stage of a cut, if the executor names them."""
        modules = self.layers.modules
        return None if modules is None else stage_letters(best.problem, modules)

    def _once(self, cut: Cut) -> float:
        """Seconds that the busiest rank of a cut needs once per step."""
        names = self.layers.unit.given.model.names
        stages = [names[begin:end] for begin, end in pairwise(cut.bounds)]
        of_ranks = self.schedule.placement.stages_of
        return self.estimated.once([tuple(name for s in own for name in stages[s]) for own in of_ranks])

    @property
    def _once_of_parts(self) -> Once:
        """What a step needs once, in the search's unit."""
        estimate, unit = self.estimated.estimate, self.layers.unit
        of = {name: layer.step.total for layer in estimate.layers for name in layer.names}
        steps = np.array([of[name] for name in unit.given.model.names]) / unit.length
        fixed = (estimate.table_reduction + self.estimated.latency) / unit.length
        return Once(np.add.reduceat(steps, self.search.problem.places[:-1]), fixed)


@dataclass
class ScheduledLayouts:
    """Layouts under the schedules of executors; equal layers are cut once."""

    setting: Setting
    effort: Effort
    cancelled: Cancelled | None = None
    _layers: dict[tuple[LayeredProblem, str, int | None], ExecutorLayers] = field(default_factory=dict)

    def estimated(self, executor: str, layout: Layout) -> Iterator[EstimatedLayout]:
        """A layout with every recomputation of its executor, as far as the layout allows.

        ``per-stage`` stands for as many first layers of every stage, which the cut decides.
        """
        setting = self.setting.of_executor(executor)
        estimated = EstimatedLayout.of(layout, setting)
        if not estimated.has_room_for_states:
            return
        if layout.recompute == "selective":
            for modules in self.setting.modules_of(executor):
                yield EstimatedLayout.of(replace(layout, recompute_modules=modules), setting)
            return
        can_recompute = any(layer.full is not None for layer in estimated.estimate.layers)
        for recompute in self._recomputed(executor, layout):
            if recompute == "none" or can_recompute or layout.recompute == "full":
                yield replace(estimated, layout=replace(layout, recompute=recompute))

    def _recomputed(self, executor: str, layout: Layout) -> tuple[Recompute, ...]:
        """None or all; or as many first layers of every stage, which may be none or all but MTP's."""
        if layout.recompute != "per-stage" or layout.recompute_layers is not None:
            return (layout.recompute,)
        if executor != "megatron":
            return ("none", "full")
        return ("per-stage", "full") if self.setting.model.prediction_layers else ("per-stage",)

    def scheduled(self, executor: str, estimated: EstimatedLayout) -> Iterator[ScheduledLayout]:
        """A layout under every schedule of its executor that has a cut."""
        problem, layout = estimated.problem, estimated.layout
        for schedule in self._layers_of(problem, executor, layout.recompute_layers).schedules:
            held = estimated.with_buffers(executor, schedule.placement.chunks)
            layers = self._layers_of(held, executor, layout.recompute_layers)
            search = layers.search(schedule, self.effort, self.cancelled)
            if search is not None:
                yield ScheduledLayout(estimated, layers, search)

    def _layers_of(self, problem: LayeredProblem, executor: str, recomputed: int | None) -> ExecutorLayers:
        key = problem, executor, recomputed
        if key not in self._layers:
            self._layers[key] = ExecutorLayers.of(*key)
        return self._layers[key]
