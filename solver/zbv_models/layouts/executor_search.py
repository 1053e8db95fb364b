"""The best of all layouts for executors with fixed orders, and what one achieves with a given cut.

A layout is estimated with every recomputation that its executor offers, and then stands under each of its
schedules. A schedule's bound gets tighter in two steps: loads and memory of its ranks over all cuts, then
its critical paths, with a first cut. In the end the most promising cuts are searched in full.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf

from zbv_solver.errors import InfeasibleMemory, InvalidInput, NoLayoutFits
from zbv_solver.numerals import figure
from zbv_solver.partition.modules import Modules
from zbv_solver.problem.numeric import OPTIMAL_GAP
from zbv_solver.search.assemble import make_plan
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import Effort, SearchOptions

from zbv_models.fixed_orders.best_cut import BestCut, improved_plan
from zbv_models.fixed_orders.score import Score, score_layout
from zbv_models.fixed_orders.user_layout import read_layout
from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    PlannedLayout,
    layers_on_ranks,
    plan_layout,
    with_plan,
)
from zbv_models.layouts.executor_memory import in_order
from zbv_models.layouts.executor_rules import FREE, NAMES, layouts_of_executors, left_out
from zbv_models.layouts.executor_settings import layout_settings
from zbv_models.layouts.layout import PARTS, Layout, Recompute
from zbv_models.layouts.progress import LayoutProgress, Poll
from zbv_models.layouts.request import Request
from zbv_models.layouts.scheduled_layout import ScheduledLayout, ScheduledLayouts
from zbv_models.layouts.search import Known, LayoutSearch, Node, Ranking
from zbv_models.layouts.setting import SECONDS, Setting

FULL_SEARCHES = {"quick": 8, "standard": 24, "thorough": 200}
"""Cuts that are searched in full in the end, by effort."""
LARGE = 5_000_000
"""Actions times ranks of large orders: their bounds take seconds, and find few cuts."""
MOST_BOUNDED = {"quick": 1.5e9, "standard": 6e9, "thorough": 60e9}
"""Actions times ranks that the bounds of large orders may time in all, by effort."""
PATHS = 10.0
"""What a bound by critical paths costs, in bounds of the loads of ranks."""


@dataclass(frozen=True, eq=False)
class ExecutorLayout(PlannedLayout):
    """A layout with the best cut for an executor.

    Its lower bound is over all cuts and all schedules of the executor that were tried.
    """

    executor: str
    best: BestCut
    settings: str | None
    """What the executor takes; None if it has no settings, for the reason in ``remark``, which otherwise says
    what they lack."""
    remark: str
    free: PlannedLayout | None
    """The plan of the same layout in a free order; None if none was found that fits."""


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
    candidates = layouts_of_executors(executor, setting, layouts, is_over)
    search = ExecutorSearch(setting, top, options, cancelled, report, workers=workers, candidates=candidates)
    for _, layout in takewhile(lambda _: not is_over(), candidates):
        search.add(layout)
    if is_over.is_over:
        search.considered = len(candidates)
        return search.unfinished()
    try:
        search.run()
    except NoLayoutFits as error:
        rules = left_out(executor, setting.model, layouts)
        raise NoLayoutFits(error.considered, error.memory, error.unproved, rules) from None
    return search.ranking()


@dataclass(eq=False)
class ExecutorSearch(LayoutSearch):
    """The state of a search for executors.

    A candidate may have several nodes, one for every recomputation and schedule, which all have its number.
    """

    candidates: list[tuple[str, Layout]] = field(default_factory=list)
    """Executor and layout, by the numbers of nodes."""
    late: list[Node] = field(default_factory=list)
    """A heap of nodes with large orders, which wait until no smaller one can have a shorter step."""
    left: float = 0.0
    """Actions times ranks that the bounds of these may still time."""

    def __post_init__(self) -> None:
        self.effort = "quick" if self.options is None else self.options.effort
        self.left = MOST_BOUNDED[self.effort]
        setting = replace(self.setting, has_loops=True)
        self.schedules = ScheduledLayouts(setting, self.effort, self.cancelled)

    def push(self, bound: float, number: int, of: Known, is_tight: bool = False) -> None:
        """Queue what is known of a layout; large orders wait."""
        is_large = self._executor(number) != FREE and _size(of, is_tight) > LARGE
        heapq.heappush(self.late if is_large else self.queue, self.node(bound, number, of, is_tight))

    def next(self) -> Node | None:
        """The node with the least bound; one with a large order only if it is less than a planned step."""
        first = self.queue[0] if self.queue else None
        is_due = first is None or (first.is_planned and self.late and self.late[0].bound < first.bound)
        if not (self.late and self.left > 0 and is_due):
            return super().next()
        node = heapq.heappop(self.late)
        if isinstance(node.of, ScheduledLayout):
            self.left -= node.of.size * (PATHS if node.is_tight else 1.0)
        return node

    def refine(self, node: Node) -> None:
        """Replace a node by others with tighter bounds, or by a plan."""
        bound, number, of = node.bound, node.number, node.of
        executor = self._executor(number)
        if executor == FREE:
            super().refine(node)
        elif isinstance(of, Layout):
            for estimated in self.schedules.estimated(executor, of):
                self.push(max(bound, estimated.mean_bound, estimated.memory_bound), number, estimated)
        elif isinstance(of, EstimatedLayout) and not node.is_tight:
            if of.load_bound < inf:
                self.push(max(bound, of.load_bound), number, of, is_tight=True)
        elif isinstance(of, EstimatedLayout):
            for scheduled in self.schedules.scheduled(executor, of):
                self.push(max(bound, scheduled.bound), number, scheduled)
        elif isinstance(of, ScheduledLayout):
            self._bound_schedule(node, of)

    def _bound_schedule(self, node: Node, scheduled: ScheduledLayout) -> None:
        if node.is_tight:
            scheduled.bound_paths(self.longest() if scheduled.size > LARGE else inf)
        else:
            scheduled.bound_loads()
        bound = max(node.bound, scheduled.bound)
        if bound == inf:
            return
        if not node.is_tight:
            self.push(bound, node.number, scheduled, is_tight=True)
        elif scheduled.search.best is not None:
            self.keep(node._replace(bound=bound))
        else:
            self.unresolved.append(node._replace(bound=bound))

    def waiting(self, is_unresolved: bool = True) -> Iterator[Node]:
        """The layouts without plans."""
        yield from self.late
        yield from super().waiting(is_unresolved)

    def finish(self) -> None:
        """Search in full what may have the shortest steps."""
        super().finish()
        self._search_cuts()
        self._compare_free()

    def _search_cuts(self) -> None:
        """Search the cuts with the shortest steps in full, then those with the least bounds."""
        most = FULL_SEARCHES[self.effort] if self.planned else 0
        for number in range(most):
            longest = self.longest()
            open_cuts = [
                node.of
                for node in self.planned
                if isinstance(node.of, ScheduledLayout)
                and node.of.is_open
                and node.lower_bound < longest * (1 - OPTIMAL_GAP)
            ]
            if not open_cuts or self.is_cancelled():
                return
            is_first = 2 * number < most
            chosen = min(open_cuts, key=lambda each: each.step_time if is_first else each.bound)
            chosen.finish(longest)
            self.best = min(self.best, chosen.step_time)
            self.tell()

    def _compare_free(self) -> None:
        """Let no layout in a free order have a longer step than in the order of an executor."""
        shortest: dict[Layout, ScheduledLayout] = {}
        for node in self.planned:
            _, layout = self.candidates[node.number]
            known = shortest.get(layout)
            if isinstance(node.of, ScheduledLayout) and (
                known is None or node.of.step_time < known.step_time
            ):
                shortest[layout] = node.of
        for at, node in enumerate(self.planned):
            if self.is_cancelled():
                return
            scheduled = shortest.get(self.candidates[node.number][1])
            if isinstance(node.of, PlannedLayout) and scheduled is not None:
                better = self._not_longer(node.of, scheduled, scheduled.answer()[0])
                self.planned[at] = node._replace(of=better, bound=min(node.bound, better.lower_bound))

    def answer(self, node: Node) -> PlannedLayout:
        """A planned layout with its regular cut, and the settings of its executor."""
        if not isinstance(node.of, ScheduledLayout):
            return super().answer(node)
        executor, layout = self.candidates[node.number]
        scheduled, bound = node.of, self.bounds()[node.number][0]
        (best, step_time), estimated = scheduled.answer(), scheduled.estimated
        if estimated.layout.recompute == "per-stage":
            # The cut says what is recomputed.
            result = best.results[0]
            kind: Recompute = "none" if result.recompute == "none" else "full"
            recomputed = replace(estimated.layout, recompute=kind, recompute_layers=result.recompute_layers)
            estimated = replace(estimated, layout=recomputed)
        stages, schedule = scheduled.letters(best), scheduled.schedule
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
            self._free_plan(executor, layout, scheduled, best),
        )

    def _free_plan(
        self, executor: str, layout: Layout, scheduled: ScheduledLayout, best: BestCut
    ) -> PlannedLayout | None:
        """The same layout, with what the executor holds, in any order, which may be the executor's."""
        if self.is_cancelled():
            return None
        setting = self.setting.of_executor(executor)
        try:
            free = plan_layout(EstimatedLayout.of(layout, setting), self.options, self.cancelled)
        except InfeasibleMemory:
            free = None
        return self._not_longer(free, scheduled, best)

    def _not_longer(
        self, free: PlannedLayout | None, scheduled: ScheduledLayout, best: BestCut
    ) -> PlannedLayout:
        """A layout in a free order, or an improved order of an executor if that is shorter."""
        if free is not None and free.step_time <= scheduled.step_time:
            return free
        improved = with_plan(scheduled.estimated, improved_plan(best, self.options))
        if free is None:
            return improved
        bound = min(free.lower_bound, improved.lower_bound)
        return replace(min(free, improved, key=lambda each: each.step_time), lower_bound=bound)

    def _executor(self, number: int) -> str:
        return self.candidates[number][0]


def _size(of: Known, is_tight: bool) -> int:
    """Actions times ranks of an order, of the smallest one if there are several; 0 if no order is next."""
    if isinstance(of, ScheduledLayout):
        return of.size
    if is_tight and isinstance(of, EstimatedLayout):
        return 2 * of.layout.microbatches * of.layout.pipeline_parallel**2
    return 0


@dataclass(frozen=True, eq=False)
class GivenCut:
    """A layout with a given cut."""

    estimated: EstimatedLayout
    score: Score
    """Its memory is that of the executor's order, with all that the executor holds."""

    @property
    def step_time(self) -> float:
        """Seconds of a step, with what the busiest rank does once."""
        once = self.estimated.once(layers_on_ranks(self.score.problem))
        return self.score.objective * SECONDS + once

    @property
    def peak_memory(self) -> float:
        """Bytes of the tensors on the fullest device, with ``reserve``."""
        return max(self.score.timing.peak_memory)

    @property
    def reserved_memory(self) -> float:
        """Bytes that PyTorch's allocator reserves for them, with ``reserve``."""
        return self.estimated.setting.cluster.groups[0].reserved(self.peak_memory)


def score_given_cut(
    request: Request, text: str, *, effort: Effort = "quick", time_limit: float | None = None
) -> GivenCut:
    """Time a layout with a given cut, and compare the cut with the best ones.

    Parameters
    ----------
    text
        As ``zbv cut --layout`` takes it (:mod:`zbv_models.fixed_orders.user_layout`).
    effort, time_limit
        Of the search of better cuts.

    Raises
    ------
    InvalidInput
        When several layouts have the fixed parts, the executor cannot run the layout, or it does not take
        the cut.
    """
    executor = request.executor
    if executor not in NAMES:
        detail = (
            f"found a cut and executor {executor}. Name an executor with a fixed order: {', '.join(NAMES)}."
        )
        raise InvalidInput.at("--cut", detail)
    candidates = layouts_of_executors(executor, request.setting, request.layouts)
    layouts = [layout for _, layout in candidates]
    if len(layouts) > 1:
        raise InvalidInput.at("--cut", _open_parts(layouts))
    (layout,) = layouts
    setting = request.setting.of_executor(executor)
    if layout.recompute == "selective":
        layout = replace(layout, recompute_modules=setting.modules_of(executor)[0])
    estimated = EstimatedLayout.of(layout, setting)
    try:
        modules = Modules.of(estimated.problem.model)
        stages = read_layout(text, modules, layout.pipeline_parallel).n_stages
        problem = estimated.with_buffers(executor, max(1, stages // layout.pipeline_parallel))
        score = score_layout(problem, executor, text, effort=effort, time_limit=time_limit)
    except InvalidInput as error:
        raise InvalidInput.at("--cut", str(error.issues[0].detail)) from None
    settings, remark = layout_settings(executor, layout, setting, score.stages, score.schedule)
    held = in_order(score.problem, score.orders, estimated.passing)
    return GivenCut(estimated, replace(score, problem=held, settings=settings, remark=remark))


def _open_parts(layouts: list[Layout]) -> str:
    """The parts in which layouts differ."""
    differing = [name for name in (*PARTS, "recompute") if len({getattr(each, name) for each in layouts}) > 1]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
    return f"found {figure(len(layouts))} layouts, and a cut is that of one. Fix {flags}."
