"""The best of all layouts: bounded from below, planned best-first, and proved.

Every layout has a lower bound of its step. The layout with the least bound comes first: if its bound can be
made tighter, it is, and the layout waits again; otherwise its pipeline is planned. When the layout with the
least bound is a planned one, no other can be better (branch and bound with best-first order; Land and Doig
1960).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.layered import first_plan, plan_layers
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search_state import Cancelled

from zbv_models.layouts.enumeration import LayoutFamily
from zbv_models.layouts.estimated_layout import SECONDS, EstimatedLayout, Setting
from zbv_models.layouts.first_plans import FirstPlans
from zbv_models.layouts.layer_costs import EVERYWHERE, recomputed
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.progress import LayoutProgress, News, Poll

PROMISING = 0.05
"""Layouts whose first plan is longer than the best by at most this share get a full search."""
MOST_PROMISING = 4
MANY_LAYOUTS = 1_000
"""Layouts for which it is worthwhile to start processes."""


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

    @property
    def recomputed(self) -> frozenset[str]:
        """The names of the layers that the plan recomputes, in full or selectively."""
        model, layout = self.plan.problem.model, self.layout
        if model is None or layout.recompute == "none":
            return frozenset()
        able = {
            name
            for layer in self.estimated.estimate.layers
            if recomputed(layer, layout.recompute) is not None
            for name in layer.names
        }
        # Modules of multi-token prediction are not counted among the layers of a stage.
        blocks = {name for name in able if not name.startswith("prediction")}
        found: set[str] = set()
        for stage, is_again in zip(model.partition, model.cut.recompute, strict=True):
            if layout.recompute_layers is not None:
                found.update([name for name in stage if name in blocks][: layout.recompute_layers])
            elif is_again or layout.recompute in EVERYWHERE:
                found.update(stage)
        return frozenset(found & able)


class Waiting(NamedTuple):
    """A layout in the queue; ``number`` makes the order of equal bounds that of the enumeration.

    A family has the number of its first layout.
    """

    bound: float
    number: int
    of: LayoutFamily | Layout | EstimatedLayout | PlannedLayout
    is_tight: bool

    @property
    def size(self) -> int:
        """Number of layouts."""
        return len(self.of) if isinstance(self.of, LayoutFamily) else 1

    def members(self) -> Iterator[Waiting]:
        """Every layout by itself."""
        if not isinstance(self.of, LayoutFamily):
            yield self
            return
        for number, layout in enumerate(self.of, self.number):
            yield Waiting(self.bound, number, layout, False)


@dataclass(frozen=True, eq=False)
class Ranking:
    """The best layouts, and what is known about the others.

    Attributes
    ----------
    best
        Best first; the first ones of ``every``, which are all planned layouts.
    considered
        Number of layouts that were enumerated.
    planned
        Of these, layouts whose pipeline was planned.
    unsettled
        Of these, other layouts that may have a shorter step than the best ones: the search ended before.
    no_layout_below
        Seconds; no layout has a shorter step under the model of costs. 0 if the search ended before all
        layouts were enumerated.
    waiting, too_large
        The other layouts: with a bound of the step, and those that do not fit.
    """

    best: tuple[PlannedLayout, ...]
    considered: int
    planned: int
    no_layout_below: float
    every: tuple[PlannedLayout, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    too_large: tuple[Waiting, ...] = ()
    unsettled: int = 0

    @property
    def pruned(self) -> int:
        """Layouts that were ruled out without a plan: too slow, or too large for the memory."""
        return self.considered - self.planned - self.unsettled


def best_layouts(
    layouts: Iterable[Layout | LayoutFamily],
    setting: Setting,
    top: int = 1,
    options: SearchOptions | None = None,
    cancelled: Cancelled | None = None,
    report: Callable[[LayoutProgress], None] | None = None,
    most_plans: int | None = None,
    workers: int = 1,
    processes: int = 1,
) -> Ranking:
    """The ``top`` layouts with the shortest steps, proved.

    Parameters
    ----------
    options
        With them, the most promising layouts get a full search in the end.
    cancelled
        Asked between layouts, also during the enumeration. After a cancellation, the ranking has the
        planned layouts, best first, perhaps none, and ``no_layout_below`` is that of all layouts.
    report
        Called for every better layout, and otherwise from time to time.
    most_plans
        Different pipelines to plan; the search then ends like a cancelled one.
    workers, processes
        Threads for the plan of a pipeline; processes that plan pipelines, if there are many layouts. With
        these, a script needs ``if __name__ == "__main__"``.

    Raises
    ------
    NoLayoutFits
        When no layout fits in memory.
    """
    queue, considered, is_whole = _enumerated(layouts, setting, cancelled)
    has_many = is_whole and considered >= MANY_LAYOUTS
    with FirstPlans(workers, processes if has_many else 1) as plans:
        search, ended, is_cancelled = LayoutSearch(setting, cancelled, plans), 0, not is_whole
        while queue and ended < top and not is_cancelled:
            first = heapq.heappop(queue)
            if isinstance(first.of, PlannedLayout):
                ended += 1
            elif isinstance(first.of, LayoutFamily):
                for member in first.members():
                    heapq.heappush(queue, member)
            elif (tighter := search.pursue(first, queue)) is not None:
                heapq.heappush(queue, tighter)
            if report is not None and queue and search.news.has(search.best):
                report(search.progress(considered, queue, top))
            is_cancelled = (cancelled is not None and cancelled()) or len(plans.known) == most_plans
    waiting = tuple(search.waiting(queue))
    if not search.planned and is_whole and not (is_cancelled and waiting):
        raise NoLayoutFits(considered, setting.cluster.size, len(search.unresolved))
    bounds = [*(each.lower_bound for each in search.planned), *(each.bound for each in waiting)]
    below = min(bounds) if is_whole else 0.0
    every = tuple(search.ranked(options, cancelled))
    longest = every[top - 1].step_time if len(every) >= top else math.inf
    unsettled = sum(each.size for each in waiting if each.bound < longest * (1 - OPTIMAL_GAP))
    too_large = tuple(search.too_large)
    return Ranking(every[:top], considered, len(every), below, every, waiting, too_large, unsettled)


def _enumerated(
    layouts: Iterable[Layout | LayoutFamily], setting: Setting, cancelled: Cancelled | None
) -> tuple[list[Waiting], int, bool]:
    """The queue of all layouts, their number, and whether these are all; they are not if cancelled."""
    queue: list[Waiting] = []
    count, poll = 0, Poll(cancelled)
    for of in layouts:
        if poll():
            return queue, count, False
        first = of.first if isinstance(of, LayoutFamily) else of
        queue.append(Waiting(setting.least_work(first), count, of, False))
        count += queue[-1].size
    heapq.heapify(queue)
    return queue, count, True


@dataclass
class LayoutSearch:
    """The state of a search.

    Attributes
    ----------
    plans
        Makes the plans of pipelines.
    planned
        Layouts with plans.
    too_large, unresolved
        Layouts that do not fit, and those without a cut that fits and without a proof that there is none.
    ahead
        What looking ahead computed, by a layout's number and whether it was not estimated before.
    best
        Seconds of the shortest step.
    """

    setting: Setting
    cancelled: Cancelled | None = None
    plans: FirstPlans = field(default_factory=FirstPlans)
    planned: list[PlannedLayout] = field(default_factory=list)
    too_large: list[Waiting] = field(default_factory=list)
    unresolved: list[Waiting] = field(default_factory=list)
    ahead: dict[tuple[int, bool], Waiting | None] = field(default_factory=dict)
    best: float = math.inf
    news: News = field(default_factory=News)

    def progress(self, considered: int, queue: Collection[Waiting], top: int) -> LayoutProgress:
        """What is known now."""
        with self.news.telling(self.best):
            steps = sorted(each.step_time for each in self.planned)
            longest = steps[top - 1] if len(steps) >= top else math.inf
            left, below = 0, min((each.lower_bound for each in self.planned), default=math.inf)
            for each in self.waiting(queue):
                left += each.size if each.bound < longest else 0
                below = min(below, each.bound)
        best = steps[0] if steps else None
        return LayoutProgress(considered, considered - len(steps) - left, len(steps), best, float(below))

    def waiting(self, queue: Iterable[Waiting]) -> Iterator[Waiting]:
        """The layouts without plans, other than those that are too large."""
        yield from (each for each in queue if not isinstance(each.of, PlannedLayout))
        yield from self.unresolved

    def pursue(self, first: Waiting, queue: list[Waiting] | None = None) -> Waiting | None:
        """A layout with a better bound, or planned; None if it leaves the queue.

        Before it is planned, plans of the next ones in the queue begin.
        """
        if first.is_tight and queue is not None and isinstance(first.of, EstimatedLayout):
            self.plans.begin(first.of.problem)
            self._look_ahead(queue)
        try:
            tighter = self.tighter(first)
        except InfeasibleMemory:
            self.unresolved.append(first)
            return None
        if tighter is None:
            self.too_large.append(first)
        return tighter

    def _look_ahead(self, queue: list[Waiting]) -> None:
        """Begin plans of the layouts that are probably next, once their bounds are tight.

        The queue stays as it is, so a search with other processes finds the same bounds.
        """
        ahead = list(queue)
        while self.plans.can_begin and ahead and ahead[0].bound < self.best:
            first = heapq.heappop(ahead)
            if isinstance(first.of, PlannedLayout) or (self.cancelled is not None and self.cancelled()):
                return
            if isinstance(first.of, LayoutFamily):
                for member in first.members():
                    heapq.heappush(ahead, member)
                continue
            if first.is_tight and isinstance(first.of, EstimatedLayout):
                self.plans.begin(first.of.problem)
                continue
            key = first.number, isinstance(first.of, Layout)
            if key not in self.ahead:
                self.ahead[key] = self._bounded(first)
            tighter = self.ahead[key]
            if tighter is not None:
                heapq.heappush(ahead, tighter)

    def tighter(self, first: Waiting) -> Waiting | None:
        """A layout with a better bound, or planned; None if it does not fit.

        Raises :class:`InfeasibleMemory` when no cut was found that fits, without a proof that there is none.
        """
        bound, number, of, is_tight = first
        if not is_tight:
            key = number, isinstance(of, Layout)
            return self.ahead.pop(key) if key in self.ahead else self._bounded(first)
        if not isinstance(of, EstimatedLayout):
            return first
        try:
            found = self._planned(of)
        except InfeasibleMemory as error:
            if error.is_proved:
                return None
            raise
        found = replace(found, lower_bound=max(bound, found.lower_bound))
        self.planned.append(found)
        self.best = min(self.best, found.step_time)
        return Waiting(found.step_time, number, found, True)

    def _bounded(self, first: Waiting) -> Waiting | None:
        """A layout with the next better bound; None if it does not fit."""
        bound, number, of, _ = first
        if isinstance(of, Layout):
            estimated = EstimatedLayout.of(of, self.setting)
            if not estimated.has_room_for_states:
                return None
            bound = max(bound, estimated.mean_bound, estimated.memory_bound)
            return Waiting(bound, number, estimated, False)
        if not isinstance(of, EstimatedLayout):
            return first
        bound = max(bound, of.load_bound)
        return None if bound == math.inf else Waiting(bound, number, of, True)

    def _planned(self, estimated: EstimatedLayout) -> PlannedLayout:
        return with_plan(estimated, self.plans.plan(estimated.problem, self.cancelled))

    def ranked(self, options: SearchOptions | None, cancelled: Cancelled | None) -> list[PlannedLayout]:
        """The planned layouts, best first; with options, the most promising ones are planned again."""
        ranked = sorted(self.planned, key=lambda each: each.step_time)
        if options is None or not ranked:
            return ranked
        longest = ranked[0].step_time * (1 + PROMISING)
        again: dict[LayeredProblem, Plan] = {}
        for each in ranked:
            if each.step_time > longest or len(again) == MOST_PROMISING or (cancelled and cancelled()):
                break
            problem = each.estimated.problem
            if problem not in again:
                again[problem] = plan_layers(problem, options, None, cancelled)
        found = [_better(each, again.get(each.estimated.problem)) for each in ranked]
        return sorted(found, key=lambda each: each.step_time)


def _better(planned: PlannedLayout, plan: Plan | None) -> PlannedLayout:
    """A layout with the plan of a fuller search; every bound that was proved holds."""
    if plan is None:
        return planned
    again = with_plan(planned.estimated, plan)
    bound = max(planned.lower_bound, again.lower_bound)
    return replace(min(planned, again, key=lambda each: each.step_time), lower_bound=bound)


def plan_layout(
    estimated: EstimatedLayout, options: SearchOptions | None = None, cancelled: Cancelled | None = None
) -> PlannedLayout:
    """Plan the pipeline of a layout, without options by constructing orders alone.

    Raises :class:`InfeasibleMemory` when no cut fits.
    """
    problem = estimated.problem
    plan = (
        first_plan(problem, cancelled) if options is None else plan_layers(problem, options, None, cancelled)
    )
    return with_plan(estimated, plan)


def with_plan(estimated: EstimatedLayout, plan: Plan) -> PlannedLayout:
    """A layout with a plan of its pipeline: adds what happens once per step."""
    model, placement = plan.problem.model, plan.problem.placement
    if model is None or plan.cut is None:  # for type checkers: layers have both
        raise TypeError("a plan of layers has no cut; this is a bug in zbv, please report it.")
    partition = model.partition
    own = [tuple(name for s in stages for name in partition[s]) for stages in placement.stages_of]
    bound = max(plan.cut.lower_bound * SECONDS + estimated.least_once, estimated.memory_bound)
    return PlannedLayout(estimated, plan, plan.objective * SECONDS + estimated.once(own), bound)
