"""The best of all layouts for executors with fixed orders.

The search is best-first by lower bounds, like that of :mod:`zbv_models.layouts.search`. A layout becomes a
variant for every recomputation that its executor offers; a variant becomes one node per schedule of the
executor. A schedule's bound gets tighter in two steps: loads and memory of its
ranks over all cuts, then a few linear programs over its critical paths, with a first cut. In the end the most
promising cuts are searched in full.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import starmap, takewhile
from math import inf
from typing import NamedTuple

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.options import SearchOptions
from zbv_solver.search.search_state import Cancelled

from zbv_models.fixed_orders.best_cut import BestCut
from zbv_models.fixed_orders.free_order import improved_plan
from zbv_models.layouts.estimated_layout import EstimatedLayout, Setting
from zbv_models.layouts.executor_cuts import ExecutorCandidate, LayoutVariant, Scheduled, ScheduleSource
from zbv_models.layouts.executor_memory import in_order
from zbv_models.layouts.executor_rules import FREE, layouts_of_executors, left_out
from zbv_models.layouts.executor_settings import layout_settings
from zbv_models.layouts.first_plans import FirstPlans
from zbv_models.layouts.layout import Layout, Recompute
from zbv_models.layouts.progress import LayoutProgress, News, Poll
from zbv_models.layouts.search import (
    LayoutSearch,
    PlannedLayout,
    Ranking,
    Waiting,
    plan_layout,
    with_plan,
)

FULL_SEARCHES = {"quick": 8, "standard": 24, "thorough": 200}
"""Cuts that are searched in full in the end, by effort."""
LARGE = 5_000_000
"""Actions times ranks of large orders: their bounds take seconds, and find few cuts."""
MOST_BOUNDED = {"quick": 1.5e9, "standard": 6e9, "thorough": 60e9}
"""Actions times ranks that the bounds of large orders may time in all, by effort."""
ESTIMATE = 10.0
"""What an estimate of the objective costs, in bounds of the loads of ranks."""


@dataclass(frozen=True, eq=False)
class ExecutorLayout(PlannedLayout):
    """A layout with the best cut for an executor.

    Attributes
    ----------
    lower_bound
        Of the step, over all cuts and all schedules of the executor that were tried.
    settings
        What the executor takes; None if it has no settings, for the reason in ``remark``.
    free
        The plan of the same layout in a free order; None if none was found that fits.
    """

    executor: str
    best: BestCut
    settings: str | None
    remark: str
    free: PlannedLayout | None


class _Node(NamedTuple):
    """A candidate in the queue; ``number`` makes the order of equal bounds that of their creation."""

    bound: float
    number: int
    candidate: ExecutorCandidate
    of: ExecutorCandidate | LayoutVariant | Scheduled | EstimatedLayout | PlannedLayout
    is_tight: bool = False
    is_planned: bool = False


def executor_layouts(
    layouts: Iterable[Layout],
    setting: Setting,
    executor: str,
    top: int = 1,
    options: SearchOptions | None = None,
    cancelled: Cancelled | None = None,
    report: Callable[[LayoutProgress], None] | None = None,
    workers: int = 1,
) -> Ranking:
    """The ``top`` layouts with the shortest steps under the orders of an executor, or of all (``any``).

    Every pair of a layout and an executor that can run it counts as a layout.

    Parameters
    ----------
    options
        Their effort says how many cuts are searched in full, and how long. Without them, it is quick, and
        free orders are constructed only.
    cancelled, report, workers
        As in :func:`~zbv_models.layouts.search.best_layouts`.

    Raises
    ------
    InvalidInput
        When there is no such executor, or it can run none of the layouts.
    NoLayoutFits
        When no layout fits in memory.
    """
    is_over = Poll(cancelled)
    layouts = list(takewhile(lambda _: not is_over(), layouts))
    found = layouts_of_executors(executor, setting, layouts, is_over)
    candidates = list(starmap(ExecutorCandidate, found))
    search = _ExecutorSearch(setting, options, cancelled, report, len(candidates), top, workers)
    for candidate in takewhile(lambda _: not is_over(), candidates):
        search.add(candidate)
    if is_over.is_over:
        return Ranking((), len(candidates), 0, 0.0, unsettled=len(candidates))
    search.run()
    if not search.found and not search.queue and not (search.late and search.is_cancelled()):
        rules = left_out(executor, setting.model, layouts)
        raise NoLayoutFits(len(candidates), setting.cluster.size, search.open_candidates(), rules)
    search.finish()
    return search.ranking()


@dataclass
class _ExecutorSearch:
    """The state of a search.

    Attributes
    ----------
    queue
        A heap by bounds. Planned nodes have their steps as bounds.
    found
        All planned nodes, with lower bounds.
    unresolved
        Nodes without a cut that fits, and without a proof that there is none.
    late
        A heap of nodes with large orders, which wait until a smaller one with a shorter step cannot be found.
    left
        Actions times ranks that the bounds of these may still time.
    """

    setting: Setting
    options: SearchOptions | None
    cancelled: Cancelled | None
    report: Callable[[LayoutProgress], None] | None
    considered: int
    top: int
    workers: int
    queue: list[_Node] = field(default_factory=list)
    found: list[_Node] = field(default_factory=list)
    unresolved: list[_Node] = field(default_factory=list)
    late: list[_Node] = field(default_factory=list)
    left: float = 0.0
    made: int = 0
    best: float = inf
    news: News = field(default_factory=News)

    def __post_init__(self) -> None:
        self.effort = "quick" if self.options is None else self.options.effort
        self.left = MOST_BOUNDED[self.effort]
        self.schedules = ScheduleSource(replace(self.setting, has_loops=True), self.effort, self.cancelled)
        self.free = LayoutSearch(self.setting, self.cancelled, FirstPlans(self.workers))

    def add(self, candidate: ExecutorCandidate) -> None:
        """Queue a candidate."""
        self._push(self.setting.least_work(candidate.layout), candidate, candidate)

    def run(self) -> None:
        """Bound and cut, best first, until the best ``top`` candidates are planned."""
        ended: set[ExecutorCandidate] = set()
        while len(ended) < self.top and not self.is_cancelled():
            node = self._next()
            if node is None:
                return
            if node.is_planned:
                ended.add(node.candidate)
            elif node.candidate.executor == FREE:
                self._refine_free(node)
            else:
                self._refine(node)
            self._tell()

    def _next(self) -> _Node | None:
        """The node with the least bound; one with a large order only if it is less than a planned step."""
        first = self.queue[0] if self.queue else None
        is_due = first is None or (first.is_planned and self.late and self.late[0].bound < first.bound)
        if self.late and self.left > 0 and is_due:
            node = heapq.heappop(self.late)
            if isinstance(node.of, Scheduled):
                self.left -= node.of.size * (ESTIMATE if node.of.steps > 0 else 1.0)
            return node
        return heapq.heappop(self.queue) if self.queue else None

    def _tell(self) -> None:
        """Report what is known, if it is time."""
        bounds = self._bounds() if self.report is not None and self.news.has(self.best) else {}
        if self.report is None or not bounds:
            return
        with self.news.telling(self.best):
            steps = [step for step, _ in self._steps()]
            longest = steps[self.top - 1] if len(steps) >= self.top else inf
            planned = {node.candidate for node in self.found}
            left = sum(1 for each, bound in bounds.items() if bound < longest and each not in planned)
        step = steps[0] if steps else None
        ruled_out = self.considered - len(steps) - left
        self.report(LayoutProgress(self.considered, ruled_out, len(steps), step, min(bounds.values())))

    def _push(
        self,
        bound: float,
        candidate: ExecutorCandidate,
        of: LayoutVariant | Scheduled | ExecutorCandidate,
        tight: bool = False,
    ) -> None:
        is_large = (tight or isinstance(of, Scheduled)) and _size(of) > LARGE
        heap = self.late if is_large else self.queue
        heapq.heappush(heap, _Node(bound, self.made, candidate, of, tight))
        self.made += 1

    def _plan(self, node: _Node, step_time: float) -> None:
        self.found.append(node)
        self.best = min(self.best, step_time)
        heapq.heappush(self.queue, node._replace(bound=step_time, number=self.made, is_planned=True))
        self.made += 1

    def _refine_free(self, node: _Node) -> None:
        """Replace a node of a free order by one with a tighter bound."""
        of = node.of.layout if isinstance(node.of, ExecutorCandidate) else node.of
        if isinstance(of, Layout | EstimatedLayout):
            try:
                tighter = self.free.tighter(Waiting(node.bound, node.number, of, node.is_tight))
            except InfeasibleMemory:
                self.unresolved.append(node)
                return
            if tighter is None:
                return
            if isinstance(tighter.of, PlannedLayout):
                self._plan(node._replace(bound=tighter.of.lower_bound, of=tighter.of), tighter.bound)
            elif isinstance(tighter.of, EstimatedLayout):
                fresh = node._replace(bound=tighter.bound, of=tighter.of, is_tight=tighter.is_tight)
                heapq.heappush(self.queue, fresh)

    def _refine(self, node: _Node) -> None:
        """Replace a node by others with tighter bounds, or by a plan."""
        bound, candidate, of = node.bound, node.candidate, node.of
        if isinstance(of, ExecutorCandidate):
            for variant in self.schedules.variants(of):
                estimated = variant.estimated
                self._push(max(bound, estimated.mean_bound, estimated.memory_bound), candidate, variant)
        elif isinstance(of, LayoutVariant) and not node.is_tight:
            if of.estimated.load_bound < inf:
                self._push(max(bound, of.estimated.load_bound), candidate, of, tight=True)
        elif isinstance(of, LayoutVariant):
            for scheduled in self.schedules.scheduled(of):
                self._push(max(bound, scheduled.bound), candidate, scheduled)
        elif isinstance(of, Scheduled):
            fresh = of.advanced(self._longest() if _size(of) > LARGE else inf)
            tighter = max(bound, fresh.bound)
            if tighter == inf:
                return
            if fresh.steps == 1:
                self._push(tighter, candidate, fresh)
            elif fresh.has_cut:
                self._plan(node._replace(bound=tighter, of=fresh), fresh.step_time)
            else:
                self.unresolved.append(node._replace(bound=tighter, of=fresh))

    def finish(self) -> None:
        """Search in full what may have the shortest steps."""
        if self.options is not None:
            again = {each.layout: each for each in self.free.ranked(self.options, self.cancelled)}
            self.found = [
                node._replace(of=again[node.candidate.layout]) if node.candidate.executor == FREE else node
                for node in self.found
            ]
        self._search_cuts()
        self._compare_free()

    def _compare_free(self) -> None:
        """Let no layout in a free order have a longer step than in the order of an executor."""
        shortest: dict[Layout, Scheduled] = {}
        for node in self.found:
            of, layout = node.of, node.candidate.layout
            if isinstance(of, Scheduled) and (
                layout not in shortest or of.step_time < shortest[layout].step_time
            ):
                shortest[layout] = of
        for number, node in enumerate(self.found):
            if self.is_cancelled():
                return
            free, scheduled = node.of, shortest.get(node.candidate.layout)
            if isinstance(free, PlannedLayout) and scheduled is not None:
                best, _ = scheduled.answer()
                better = self._not_longer(free, scheduled, best)
                self.found[number] = node._replace(of=better, bound=min(node.bound, better.lower_bound))

    def _search_cuts(self) -> None:
        """Search the cuts with the shortest steps in full, then those with the least bounds."""
        most = FULL_SEARCHES[self.effort] if self.found else 0
        for number in range(most):
            longest = self._longest()
            open_cuts = [
                node.of
                for node in self.found
                if isinstance(node.of, Scheduled)
                and node.of.is_open
                and _bound(node) < longest * (1 - OPTIMAL_GAP)
            ]
            if not open_cuts or self.is_cancelled():
                return
            is_first = 2 * number < most
            chosen = min(open_cuts, key=lambda each: each.step_time if is_first else each.bound)
            chosen.finish(longest)
            self.best = min(self.best, chosen.step_time)
            self._tell()

    def _longest(self) -> float:
        """The longest step that an answer would list now."""
        steps = self._steps()
        return steps[self.top - 1][0] if len(steps) >= self.top else inf

    def _steps(self) -> list[tuple[float, _Node]]:
        """Step and best node of every planned candidate, best first."""
        best: dict[ExecutorCandidate, tuple[float, _Node]] = {}
        for node in self.found:
            step = node.of.step_time if isinstance(node.of, Scheduled | PlannedLayout) else inf
            if node.candidate not in best or step < best[node.candidate][0]:
                best[node.candidate] = step, node
        return sorted(best.values(), key=lambda each: each[0])

    def ranking(self) -> Ranking:
        """The best layouts, with their plans and settings."""
        steps, bounds = self._steps(), self._bounds()
        answers = (self._answer(node, bounds[node.candidate]) for _, node in steps[: self.top])
        best = tuple(sorted(answers, key=lambda each: each.step_time))
        below = min([*bounds.values(), *(each.step_time for each in best)])
        planned = {node.candidate for _, node in steps}
        shortest = self._longest() * (1 - OPTIMAL_GAP)
        unsettled = sum(1 for each, bound in bounds.items() if each not in planned and bound < shortest)
        return Ranking(best, self.considered, len(steps), below, unsettled=unsettled)

    def _bounds(self) -> dict[ExecutorCandidate, float]:
        """The lower bound of every candidate that may fit."""
        bounds: dict[ExecutorCandidate, float] = {}
        for node in self._open_nodes():
            bounds[node.candidate] = min(bounds.get(node.candidate, inf), _bound(node))
        return bounds

    def _open_nodes(self) -> Iterator[_Node]:
        """Nodes that together have every candidate that fits."""
        yield from self.found
        yield from self.unresolved
        yield from self.late
        yield from (node for node in self.queue if not node.is_planned)

    def _answer(self, node: _Node, bound: float) -> PlannedLayout:
        if not isinstance(node.of, Scheduled):
            if not isinstance(node.of, PlannedLayout):
                raise TypeError("a planned layout has no plan; this is a bug in zbv, please report it.")
            return node.of
        scheduled = node.of
        (best, step_time), estimated = scheduled.answer(), scheduled.variant.estimated
        stages, found = scheduled.letters(best), best.results[0]
        schedule, executor = scheduled.schedule, node.candidate.executor
        if estimated.layout.recompute == "per-stage":
            # The cut says what is recomputed.
            kind: Recompute = "none" if found.recompute == "none" else "full"
            layout = replace(estimated.layout, recompute=kind, recompute_layers=found.recompute_layers)
            estimated = replace(estimated, layout=layout)
        settings, remark = layout_settings(executor, estimated.layout, self.setting, stages, schedule)
        return ExecutorLayout(
            estimated,
            make_plan(
                in_order(best.problem, best.orders, estimated.passing),
                best.orders,
                method=f"{executor} {schedule.name}",
            ),
            step_time,
            min(bound, step_time),
            executor,
            best,
            settings,
            remark,
            self._free_plan(node.candidate, scheduled, best),
        )

    def _free_plan(
        self, candidate: ExecutorCandidate, scheduled: Scheduled, best: BestCut
    ) -> PlannedLayout | None:
        """The same layout, with what the executor holds, in any order, which may be the executor's."""
        if self.is_cancelled():
            return None
        setting = self.setting.of_executor(candidate.executor)
        try:
            free = plan_layout(EstimatedLayout.of(candidate.layout, setting), self.options, self.cancelled)
        except InfeasibleMemory:
            free = None
        return self._not_longer(free, scheduled, best)

    def _not_longer(self, free: PlannedLayout | None, scheduled: Scheduled, best: BestCut) -> PlannedLayout:
        """A layout in a free order, or an improved order of an executor if that is shorter."""
        if free is not None and free.step_time <= scheduled.step_time:
            return free
        improved = with_plan(scheduled.variant.estimated, improved_plan(best, self.options))
        if free is None:
            return improved
        bound = min(free.lower_bound, improved.lower_bound)
        return replace(min(free, improved, key=lambda each: each.step_time), lower_bound=bound)

    def open_candidates(self) -> int:
        """Number of candidates without a proof that they do not fit."""
        return len(self._bounds())

    def is_cancelled(self) -> bool:
        """Whether the search should end."""
        return self.cancelled is not None and self.cancelled()


def _size(of: ExecutorCandidate | LayoutVariant | Scheduled | EstimatedLayout | PlannedLayout) -> int:
    """Actions times ranks of an order, of the smallest one if there are several."""
    if isinstance(of, Scheduled):
        return of.size
    layout = of.estimated.layout if isinstance(of, LayoutVariant) else of.layout
    return 2 * layout.microbatches * layout.pipeline_parallel**2


def _bound(node: _Node) -> float:
    """The lower bound of a node that may share its search with others."""
    return max(node.bound, node.of.bound) if isinstance(node.of, Scheduled) else node.bound
