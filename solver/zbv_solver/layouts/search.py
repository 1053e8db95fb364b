"""The best of all layouts: bounded from below, planned best-first, and proved.

Every layout has a lower bound of its step. The layout with the least bound comes first: if its bound can be
made tighter, it is, and the layout waits again; otherwise its pipeline is planned. When the layout with the
least bound is a planned one, no other can be better (branch and bound with best-first order; Land and Doig
1960).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.layouts.estimated_layout import SECONDS, EstimatedLayout, Setting
from zbv_solver.layouts.layout import Layout
from zbv_solver.plans.plan import Plan
from zbv_solver.search.layered import first_plan, plan_layers
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search_state import Cancelled

PROMISING = 0.05
"""Layouts whose first plan is longer than the best by at most this share get a full search."""
MOST_PROMISING = 4


@dataclass(frozen=True, eq=False)
class PlannedLayout:
    """A layout with the plan of its pipeline.

    Attributes
    ----------
    step_time
        Seconds.
    lower_bound
        Of the step, over all cuts, placements and orders of this layout.
    """

    estimated: EstimatedLayout
    plan: Plan
    step_time: float
    lower_bound: float

    @property
    def layout(self) -> Layout:
        """The degrees."""
        return self.estimated.layout


@dataclass(frozen=True, eq=False)
class Ranking:
    """The best layouts, and what is known about the others.

    Attributes
    ----------
    best
        Best first.
    considered
        Number of layouts that were enumerated.
    planned
        Of these, layouts whose pipeline was planned.
    no_layout_below
        Seconds; no layout has a shorter step under the model of costs.
    """

    best: tuple[PlannedLayout, ...]
    considered: int
    planned: int
    no_layout_below: float

    @property
    def pruned(self) -> int:
        """Layouts that were ruled out without a plan: too slow, or too large for the memory."""
        return self.considered - self.planned


class _Waiting(NamedTuple):
    """A layout in the queue; ``number`` makes the order of equal bounds that of the enumeration."""

    bound: float
    number: int
    of: Layout | EstimatedLayout | PlannedLayout
    is_tight: bool


def best_layouts(
    layouts: Iterable[Layout],
    setting: Setting,
    top: int = 1,
    options: SearchOptions | None = None,
    cancelled: Cancelled | None = None,
) -> Ranking:
    """The ``top`` layouts with the shortest steps, proved.

    Parameters
    ----------
    options
        With them, the most promising layouts get a full search in the end.
    cancelled
        Asked between layouts. After a cancellation, the ranking has the planned layouts, best first, and
        ``no_layout_below`` is that of all layouts.

    Raises
    ------
    NoLayoutFits
        When no layout fits in memory.
    """
    search = LayoutSearch(setting)
    queue = [
        _Waiting(setting.least_work(layout), number, layout, False) for number, layout in enumerate(layouts)
    ]
    heapq.heapify(queue)
    considered, ended = len(queue), 0
    while queue and ended < top and not (cancelled is not None and cancelled()):
        bound, number, of, is_tight = heapq.heappop(queue)
        if isinstance(of, PlannedLayout):
            ended += 1
        elif (tighter := search.tighter(bound, number, of, is_tight)) is not None:
            heapq.heappush(queue, tighter)
    if not search.planned:
        raise NoLayoutFits(considered, setting.cluster.memory)
    below = [each.lower_bound for each in search.planned]
    below += [waiting.bound for waiting in queue if not isinstance(waiting.of, PlannedLayout)]
    best = search.ranked(options, cancelled)[:top]
    return Ranking(tuple(best), considered, len(search.planned), min(below))


@dataclass
class LayoutSearch:
    """The state of a search: plans by what they depend on, because layouts often differ in nothing else."""

    setting: Setting
    planned: list[PlannedLayout] = field(default_factory=list)
    known: dict[Hashable, PlannedLayout] = field(default_factory=dict)

    def tighter(
        self, bound: float, number: int, of: Layout | EstimatedLayout, is_tight: bool
    ) -> _Waiting | None:
        """The layout with a better bound or planned; None if it does not fit."""
        try:
            if isinstance(of, Layout):
                estimated = EstimatedLayout.of(of, self.setting)
                if not estimated.has_room_for_states:
                    return None
                bound = max(bound, estimated.mean_bound, estimated.memory_bound)
                return _Waiting(bound, number, estimated, False)
            if not is_tight:
                return _Waiting(max(bound, of.load_bound), number, of, True)
            found = self._planned(of)
        except InfeasibleMemory:
            return None
        self.planned.append(found)
        return _Waiting(found.step_time, number, found, True)

    def _planned(self, estimated: EstimatedLayout) -> PlannedLayout:
        key = (estimated.problem, estimated.estimate)
        if key not in self.known:
            self.known[key] = plan_layout(estimated)
        return replace(self.known[key], estimated=estimated)

    def ranked(self, options: SearchOptions | None, cancelled: Cancelled | None) -> list[PlannedLayout]:
        """The planned layouts, best first; with options, the most promising ones are planned again."""
        ranked = sorted(self.planned, key=lambda each: each.step_time)
        if options is None:
            return ranked
        longest = ranked[0].step_time * (1 + PROMISING)
        again: dict[int, PlannedLayout] = {}  # by the plan, which layouts share
        for each in ranked:
            if each.step_time > longest or len(again) == MOST_PROMISING or (cancelled and cancelled()):
                break
            if id(each.plan) not in again:
                again[id(each.plan)] = plan_layout(each.estimated, options)
        found = [
            replace(again[id(each.plan)], estimated=each.estimated) if id(each.plan) in again else each
            for each in ranked
        ]
        return sorted(found, key=lambda each: each.step_time)


def plan_layout(estimated: EstimatedLayout, options: SearchOptions | None = None) -> PlannedLayout:
    """Plan the pipeline of a layout, without options by constructing orders alone.

    Raises :class:`InfeasibleMemory` when no cut fits.
    """
    problem = estimated.problem
    plan = first_plan(problem) if options is None else plan_layers(problem, options)
    model, placement = plan.problem.model, plan.problem.placement
    if model is None or plan.cut is None:  # for type checkers: layers have both
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    partition = model.partition
    own = [tuple(name for s in stages for name in partition[s]) for stages in placement.stages_of]
    bound = max(plan.cut.lower_bound * SECONDS + estimated.least_once, estimated.memory_bound)
    return PlannedLayout(estimated, plan, plan.objective * SECONDS + estimated.once(own), bound)
