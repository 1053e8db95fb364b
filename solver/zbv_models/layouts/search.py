"""The best of all layouts: bounded from below, planned best-first, and proved.

Every layout has a lower bound of its step. The layout with the least bound comes first: if its bound can be
made tighter, it is, and the layout waits again; otherwise its pipeline is planned. When the layout with the
least bound is a planned one, no other can be better (branch and bound with best-first order; Land and Doig
1960). :mod:`zbv_models.layouts.executor_search` adds what differs for executors with fixed orders.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.plans.plan import Plan
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.layered import first_plan, plan_layers
from zbv_solver.search.options import SearchOptions

from zbv_models.layouts.compared_layout import compared
from zbv_models.layouts.estimated_layout import EstimatedLayout, PlannedLayout, with_plan
from zbv_models.layouts.layout import Layout, LayoutFamily
from zbv_models.layouts.progress import LayoutProgress, Poll
from zbv_models.layouts.scheduled_layout import ScheduledLayout
from zbv_models.layouts.setting import SECONDS, Setting

PROMISING = 0.05
"""Layouts whose first plan is longer than the best by at most this share get a full search."""
MOST_PROMISING = 4
MANY = 500
"""Layouts and families whose bounds take much longer than a plan."""
ESTIMATED, TRIES = 300, 10
"""Of these, how many are estimated and planned until one fits."""
REPORT_SECONDS = 0.2
"""Least time between two reports, except those of a better layout: a report counts the layouts that wait."""
REPORTS_SHARE = 0.05
"""Most of the time that reports of very many layouts take."""


Known = LayoutFamily | Layout | EstimatedLayout | ScheduledLayout | PlannedLayout


class Node(NamedTuple):
    """A layout in the queue, or a family of layouts."""

    bound: float
    """Lower bound of the step in seconds; the step itself, if the layout is planned."""
    number: int
    """That of the layout in the enumeration, or of the first one of a family."""
    made: int
    """What makes the order of equal nodes that of their creation."""
    of: Known
    """What is known of it."""
    is_tight: bool = False
    """Whether the bound is the best one without a plan."""
    is_planned: bool = False

    @property
    def size(self) -> int:
        """Number of layouts."""
        return len(self.of) if isinstance(self.of, LayoutFamily) else 1

    @property
    def lower_bound(self) -> float:
        """Of the step; layouts under a schedule share a search, which may have tightened it."""
        return max(self.bound, self.of.bound) if isinstance(self.of, ScheduledLayout) else self.bound

    @property
    def step_time(self) -> float:
        """Seconds of the best known step; inf without a plan or a cut."""
        return self.of.step_time if isinstance(self.of, PlannedLayout | ScheduledLayout) else inf

    def members(self) -> Iterator[tuple[int, Layout]]:
        """Number and degrees of every layout."""
        if isinstance(self.of, LayoutFamily):
            yield from enumerate(self.of, self.number)
        else:
            yield self.number, self.of if isinstance(self.of, Layout) else self.of.layout


@dataclass(frozen=True, eq=False)
class Ranking:
    """The best layouts, and what is known about the others."""

    best: tuple[PlannedLayout, ...]
    """Best first."""
    considered: int
    """Number of layouts that were enumerated."""
    planned: int
    """Of these, layouts whose pipeline was planned."""
    unsettled: int
    """Of these, other layouts that may have a shorter step than the best ones: the search ended before."""
    no_layout_below: float
    """Seconds; no layout has a shorter step under the model of costs. 0 if the search ended before all
    layouts were enumerated."""
    every: tuple[PlannedLayout, ...] = ()
    """All planned layouts in free orders, best first."""
    waiting: tuple[Node, ...] = ()
    """Other layouts with a bound of the step."""
    too_large: tuple[Node, ...] = ()
    """Those that do not fit."""

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
    workers
        Threads for the plan of a pipeline.

    Raises
    ------
    NoLayoutFits
        When no layout fits in memory.
    """
    search, poll = (
        LayoutSearch(setting, top, options, cancelled, report, most_plans, workers),
        Poll(cancelled),
    )
    for of in layouts:
        if poll():
            return search.unfinished()
        search.add(of)
    search.run()
    return search.ranking()


@dataclass(eq=False)
class LayoutSearch:
    """The state of a search."""

    setting: Setting
    top: int = 1
    options: SearchOptions | None = None
    cancelled: Cancelled | None = None
    report: Callable[[LayoutProgress], None] | None = None
    most_plans: int | None = None
    workers: int = 1
    considered: int = 0
    queue: list[Node] = field(default_factory=list)
    """A heap by bounds; planned layouts wait in it, too."""
    planned: list[Node] = field(default_factory=list)
    """With lower bounds."""
    too_large: list[Node] = field(default_factory=list)
    unresolved: list[Node] = field(default_factory=list)
    """Without a cut that fits, and without a proof that there is none."""
    plans: dict[LayeredProblem, Plan] = field(default_factory=dict)
    """Layouts often differ only in what they exchange once per step, so they share pipelines."""
    best: float = inf
    """Seconds of the shortest step."""
    _made: int = 0
    _reported: tuple[float, float] = inf, -inf
    """The shortest step of the last report, and when the next one is due."""

    def add(self, of: Layout | LayoutFamily) -> None:
        """Queue a layout, or a family, that the enumeration has next."""
        first = of.first if isinstance(of, LayoutFamily) else of
        self.push(self.setting.least_work(first), self.considered, of)
        self.considered += len(of) if isinstance(of, LayoutFamily) else 1

    def push(self, bound: float, number: int, of: Known, is_tight: bool = False) -> None:
        """Queue what is known of a layout."""
        heapq.heappush(self.queue, self.node(bound, number, of, is_tight))

    def node(self, bound: float, number: int, of: Known, is_tight: bool, is_planned: bool = False) -> Node:
        """A new node."""
        self._made += 1
        return Node(bound, number, self._made, of, is_tight, is_planned)

    def run(self) -> None:
        """Bound and plan, best first, until the best ``top`` layouts are planned.

        Raises :class:`NoLayoutFits` when no layout fits in memory.
        """
        ended: set[int] = set()
        if len(self.queue) > MANY:
            self.find_any()
        while len(ended) < self.top and not self.is_over() and (node := self.next()) is not None:
            if node.is_planned:
                ended.add(node.number)
            else:
                self.refine(node)
            self.tell()
        if not self.planned and not any(self.waiting(is_unresolved=False)):
            raise NoLayoutFits(self.considered, self.setting.cluster.size, len(self.bounds()))
        self.finish()

    def find_any(self) -> None:
        """Plan a layout that is likely to fit: a search of many layouts that ends early then has an answer.

        Of some families with the smallest microbatches, the layout whose replicas divide most is estimated.
        """
        setting, firsts = self.setting, [next(node.members())[1] for node in self.queue]
        smallest = min(layout.microbatch_size for layout in firsts)
        small = (
            node
            for node, layout in zip(self.queue, firsts, strict=True)
            if layout.microbatch_size == smallest
        )
        found: list[Node] = []
        for node in sorted(small):
            if len(found) == ESTIMATED or self.is_over():
                break
            number, layout = min(node.members(), key=lambda each: setting.states(each[1]))
            if setting.surely_lacks_room(layout):
                continue
            estimated = EstimatedLayout.of(layout, setting)
            if estimated.has_room_for_states:
                bound = max(estimated.mean_bound, estimated.memory_bound)
                found.append(self.node(bound, number, estimated, is_tight=True))
        for node in sorted(found)[:TRIES]:
            if self.planned or self.is_over():
                break
            self.refine(node)

    def is_over(self) -> bool:
        """Whether the search should end."""
        return self.is_cancelled() or len(self.plans) == self.most_plans

    def is_cancelled(self) -> bool:
        """Whether the search was cancelled."""
        return self.cancelled is not None and self.cancelled()

    def next(self) -> Node | None:
        """Take the node with the least bound out of the queue."""
        return heapq.heappop(self.queue) if self.queue else None

    def refine(self, node: Node) -> None:
        """Replace a node by others with tighter bounds, or by a plan."""
        bound, number, of = node.bound, node.number, node.of
        if isinstance(of, LayoutFamily):
            for member, layout in node.members():
                self.push(bound, member, layout)
        elif isinstance(of, Layout):
            # An estimate takes a hundred times as long as the first test.
            estimated = None if self.setting.surely_lacks_room(of) else EstimatedLayout.of(of, self.setting)
            if estimated is None or not estimated.has_room_for_states:
                self.too_large.append(node)
            else:
                self.push(max(bound, estimated.mean_bound, estimated.memory_bound), number, estimated)
        elif isinstance(of, EstimatedLayout) and not node.is_tight:
            bound = max(bound, of.load_bound)
            if bound < inf:
                self.push(bound, number, of, is_tight=True)
            else:
                self.too_large.append(node)
        elif isinstance(of, EstimatedLayout):
            try:
                planned = with_plan(of, self._plan_of(of.problem))
            except InfeasibleMemory as error:
                (self.too_large if error.is_proved else self.unresolved).append(node)
                return
            planned = replace(planned, lower_bound=max(bound, planned.lower_bound))
            self.keep(node._replace(bound=planned.lower_bound, of=planned))

    def keep(self, planned: Node) -> None:
        """Queue a planned layout by its step; the node has its lower bound."""
        self.planned.append(planned)
        self.best = min(self.best, planned.step_time)
        again = self.node(planned.step_time, planned.number, planned.of, True, is_planned=True)
        heapq.heappush(self.queue, again)

    def _plan_of(self, problem: LayeredProblem) -> Plan:
        if problem not in self.plans:
            # A span is at most the step of its layout: longer ones are neither listed nor planned again.
            useless = max(self.longest(), self.best * (1 + PROMISING)) / SECONDS
            self.plans[problem] = first_plan(problem, self.cancelled, self.workers, useless)
        return self.plans[problem]

    def tell(self) -> None:
        """Report what is known, if it is time."""
        best, due = self._reported
        began = time.monotonic()
        if self.report is None or (self.best == best and began < due):
            return
        bounds, steps, longest = self.bounds(), self.steps(), self.longest()
        if not bounds:
            return
        planned = {node.number for _, node in steps}
        left = sum(
            size for number, (bound, size) in bounds.items() if bound < longest and number not in planned
        )
        below = min(bound for bound, _ in bounds.values())
        now = time.monotonic()
        self._reported = self.best, now + max(REPORT_SECONDS, (now - began) / REPORTS_SHARE)
        counts = self.considered, self.considered - len(steps) - left, len(steps)
        self.report(LayoutProgress(*counts, steps[0][0] if steps else None, below))

    def waiting(self, is_unresolved: bool = True) -> Iterator[Node]:
        """The layouts without plans, other than those that are too large."""
        yield from (node for node in self.queue if not node.is_planned)
        if is_unresolved:
            yield from self.unresolved

    def bounds(self) -> dict[int, tuple[float, int]]:
        """By number, the lower bound of every layout or family that may fit, and how many layouts it has."""
        bounds: dict[int, tuple[float, int]] = {}
        for nodes in (self.planned, self.waiting()):
            for node in nodes:
                if node.number not in bounds or node.lower_bound < bounds[node.number][0]:
                    bounds[node.number] = node.lower_bound, node.size
        return bounds

    def steps(self) -> list[tuple[float, Node]]:
        """Step and best node of every planned layout, best first."""
        best: dict[int, tuple[float, Node]] = {}
        for node in self.planned:
            if node.number not in best or node.step_time < best[node.number][0]:
                best[node.number] = node.step_time, node
        return sorted(best.values(), key=lambda each: each[0])

    def longest(self) -> float:
        """The longest step that an answer would list now."""
        steps = self.steps()
        return steps[self.top - 1][0] if len(steps) >= self.top else inf

    def finish(self) -> None:
        """Plan the most promising layouts again, if there are options."""
        free = [node.of for node in self.planned if isinstance(node.of, PlannedLayout)]
        if self.options is None or not free:
            return
        longest = min(each.step_time for each in free) * (1 + PROMISING)
        again: dict[LayeredProblem, Plan] = {}
        for planned in sorted(free, key=lambda each: each.step_time):
            if planned.step_time > longest or len(again) == MOST_PROMISING or self.is_cancelled():
                break
            problem = planned.estimated.problem
            if problem not in again:
                again[problem] = plan_layers(problem, self.options, None, self.cancelled)
        for at, node in enumerate(self.planned):
            if isinstance(node.of, PlannedLayout) and node.of.estimated.problem in again:
                better = _better(node.of, again[node.of.estimated.problem])
                self.planned[at] = node._replace(bound=better.lower_bound, of=better)

    def ranking(self) -> Ranking:
        """What is known in the end."""
        steps, bounds = self.steps(), self.bounds()
        best = sorted((self.answer(node) for _, node in steps[: self.top]), key=lambda each: each.step_time)
        below = min([*(bound for bound, _ in bounds.values()), *(each.step_time for each in best)])
        planned, shortest = {node.number for _, node in steps}, self.longest() * (1 - OPTIMAL_GAP)
        unsettled = sum(
            size for number, (bound, size) in bounds.items() if number not in planned and bound < shortest
        )
        every = tuple(node.of for _, node in steps if isinstance(node.of, PlannedLayout))
        others = tuple(self.waiting()), tuple(self.too_large)
        return Ranking(tuple(best), self.considered, len(steps), unsettled, below, every, *others)

    def unfinished(self) -> Ranking:
        """The answer of a search that ended before all layouts were enumerated."""
        return Ranking((), self.considered, 0, self.considered, 0.0, waiting=tuple(self.queue))

    def answer(self, node: Node) -> PlannedLayout:
        """A planned layout with all that an answer lists."""
        if not isinstance(node.of, PlannedLayout):
            raise TypeError("a planned layout has no plan; this is a bug in zbv, please report it.")
        if self.setting.copies == "none" and self.setting.training.pairs == "none":
            return node.of
        return compared(node.of, self.options, self.cancelled)


def _better(planned: PlannedLayout, plan: Plan) -> PlannedLayout:
    """A layout with the plan of a fuller search; every bound that was proved holds."""
    again = with_plan(planned.estimated, plan)
    bound = max(planned.lower_bound, again.lower_bound)
    return replace(min(planned, again, key=lambda each: each.step_time), lower_bound=bound)
