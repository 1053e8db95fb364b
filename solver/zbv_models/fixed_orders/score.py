"""A cut that a person gave: whether an executor takes it, what it achieves, and what a better one gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from zbv_solver.construct.baselines import without_limit
from zbv_solver.errors import InfeasibleMemory, InvalidInput
from zbv_solver.export.torchtitan import module_names
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.partition.fixed_order import FixedOrder
from zbv_solver.partition.modules import Modules
from zbv_solver.partition.runs import First, Groups
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.numeric import SEARCH_MEMORY, exceeds
from zbv_solver.problem.problem import Problem, objective_value
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import Effort
from zbv_solver.timing.start_times import Timing, evaluate
from zbv_solver.verify.verifier import verify_orders

from zbv_models.fixed_orders.best_cut import BestCut, Recompute, best_cut
from zbv_models.fixed_orders.executor_cut import (
    cut_for_executor,
    executor_settings,
    recomputation,
    schedule_of_stages,
)
from zbv_models.fixed_orders.megatron_layout import Stages, check_layout
from zbv_models.fixed_orders.schedules import TORCH_DEFAULTS, Schedule, placed_on
from zbv_models.fixed_orders.user_layout import UserLayout, read_layout


@dataclass(frozen=True, eq=False)
class Score:
    """What a given cut achieves under an executor's schedule."""

    executor: str
    schedule: Schedule
    problem: Problem
    orders: Orders
    """The layers in the given stages, and the executor's action lists."""
    stages: Stages
    """The modules of every stage as letters."""
    recompute: str
    recompute_layers: int | None
    recompute_group: int | None
    """``none``, ``all``, with the layers of a group if they keep one input together, or ``block`` with the
    number of first transformer layers of every stage."""
    settings: str | None
    """What the executor takes to run this cut; None with a ``remark`` if it cannot."""
    remark: str
    lower_bound: float
    """No cut under this schedule has a smaller objective. If this one does not fit, that includes cuts
    that do not fit either."""
    same: BestCut | None
    overall: BestCut | None
    """The best cut under this schedule, and under any schedule of the executor; None if none fits."""
    modules: Modules

    @cached_property
    def timing(self) -> Timing:
        """Times and memory, as if memory had no limit."""
        return evaluate(without_limit(self.problem), self.orders)

    @property
    def objective(self) -> float:
        """The span or the makespan."""
        return objective_value(self.problem.objective, self.timing)

    @property
    def too_full(self) -> tuple[int, ...]:
        """The ranks whose memory exceeds the limit."""
        return ranks_above(self.problem, self.timing)

    @cached_property
    def busy(self) -> FloatArray:
        """(S,) time that the actions of a stage take per step."""
        work = np.zeros(self.problem.n_stages)
        np.add.at(work, self.orders.stage, self.timing.end - self.timing.start)
        return work

    @cached_property
    def critical(self) -> FloatArray:
        """(S,) shares of the objective that are work of every stage, on the paths that determine it.

        The rest are transfers. A span is the mean length of the paths of a cycle (Lemma 51).
        """
        order = FixedOrder.of(without_limit(self.problem), self.orders)
        duration, latency = self.problem.arrays.duration[:, :, 0], self.problem.arrays.latency[:, 0]
        terms = next(order.critical(duration, latency))
        shares: FloatArray = (terms.count * duration).sum(axis=0) / terms.length / (self.objective or 1.0)
        return shares

    @property
    def bottleneck(self) -> int:
        """The stage with the most work on the paths that determine the objective."""
        return int(self.critical.argmax())

    def gain(self, best: BestCut | None) -> float | None:
        """By which share the step of another cut is shorter, at least 0; None if only the other one fits."""
        if best is None or self.too_full:
            return None
        return max(0.0, 1 - best.objective / self.objective) if self.objective > 0 else 0.0


def ranks_above(problem: Problem, timing: Timing) -> tuple[int, ...]:
    """The ranks whose memory exceeds the limit."""
    limits = problem.memory.limit or ()
    pairs = zip(timing.peak_memory, limits, strict=False)
    return tuple(rank for rank, (peak, limit) in enumerate(pairs) if exceeds(peak, limit, SEARCH_MEMORY))


def score_layout(
    problem: LayeredProblem,
    executor: str,
    text: str,
    *,
    virtual_stages: int | None = None,
    group: int | None = None,
    schedules: Sequence[str] = (),
    recompute: Recompute | None = None,
    recompute_layers: int | None = None,
    effort: Effort = "standard",
    seed: int = 0,
    time_limit: float | None = None,
    cancelled: Cancelled | None = None,
) -> Score:
    """Time a given cut under an executor's schedule, and compare it with the best cuts.

    The number of virtual stages follows from the cut. Without a group size, Megatron-LM's own is used, the
    number of ranks.

    Parameters
    ----------
    text
        As :func:`~zbv_models.fixed_orders.user_layout.read_layout` takes it.
    recompute, recompute_layers
        As in :func:`~zbv_models.fixed_orders.executor_cut.cut_for_executor`. If there is a choice, as
        little is recomputed as the memory requires.
    schedules
        At most one name of PyTorch.
    time_limit
        Seconds for both searches of best cuts together; None for no limit.
    cancelled
        Asked often: whether to end these searches early.

    Raises
    ------
    InvalidInput
        When the text is no cut of this model, or the cut breaks a rule of the executor or of the problem.
        Pointers are into the problem, or ``/layout`` and others as in
        :func:`~zbv_models.fixed_orders.executor_cut.cut_for_executor`.
    """
    if recompute == "per-stage":
        raise InvalidInput.at("/recompute", "found per-stage; a given cut recomputes all stages or none.")
    modules = Modules.of(problem.model)
    try:
        given = read_layout(text, modules, problem.pp_degree, virtual_stages)
        if virtual_stages is not None and given.n_stages != virtual_stages * problem.pp_degree:
            detail = f"found {given.n_stages} stages on {problem.pp_degree} ranks"
            raise InvalidInput.at("", f"{detail}, and --virtual-stages {virtual_stages}; leave it out.")
        stages = tuple(map(modules.of_stage, given.bounds[:-1], given.bounds[1:]))
        chunks = _chunks_of(stages, executor, problem.pp_degree)
    except InvalidInput as error:
        raise error.below("/layout") from None
    schedule = schedule_of_stages(problem, executor, chunks, group or given.group, schedules)
    placed = _placed(problem, modules, schedule, given, executor)
    offered: Recompute | First | Groups = recomputation(
        problem, executor, modules, recompute, recompute_layers
    )
    if given.recompute is not None:
        if recompute is not None or recompute_layers is not None:
            detail = "found --recompute-method, and another flag that says what is recomputed. Leave out one."
            raise InvalidInput.at("/layout", detail)
        offered = _of_flags(problem, executor, modules, *given.recompute)
    cut, orders, chosen, number = _cut(modules.kept_whole(placed), schedule, given, offered)
    settings, remark = executor_settings(
        executor, stages, schedule, chosen, number, problem.model.recompute_modules
    )
    half = None if time_limit is None else time_limit / 2

    def under(layers: LayeredProblem) -> BestCut:
        is_megatron = executor == "megatron"
        return best_cut(
            modules.kept_whole(layers),
            [schedule],
            recompute=recomputation(layers, executor, modules, recompute, recompute_layers),
            allow_empty=is_megatron,
            late=modules.late if is_megatron else None,
            effort=effort,
            seed=seed,
            time_limit=half,
            cancelled=cancelled,
        )

    def of_all() -> BestCut:
        names = () if executor == "megatron" else dict.fromkeys((*TORCH_DEFAULTS, *schedules))
        return cut_for_executor(
            problem,
            executor,
            schedules=tuple(names),
            recompute=recompute,
            recompute_layers=recompute_layers,
            effort=effort,
            seed=seed,
            time_limit=half,
            cancelled=cancelled,
        ).best

    overall = _best_or_none(of_all)
    is_same = overall is not None and overall.schedule == schedule
    same = overall if is_same else _best_or_none(lambda: under(problem))
    if same is not None and (overall is None or same.objective < overall.objective):
        overall = same
    fits = not ranks_above(cut, evaluate(without_limit(cut), orders))
    # Groups of layers fit where the cuts that are searched do not: a bound over all cuts holds for them, too.
    bounded = same if fits and not isinstance(offered, Groups) else None
    if bounded is None:
        bounded = _best_or_none(lambda: under(replace(problem, limit=None)))
    bound = 0.0 if bounded is None else bounded.lower_bound
    return Score(
        executor,
        schedule,
        cut,
        orders,
        stages,
        chosen,
        number if chosen == "block" else None,
        number if chosen == "all" else None,
        settings,
        remark,
        bound,
        same,
        overall,
        modules,
    )


def _best_or_none(search: Callable[[], BestCut]) -> BestCut | None:
    """The result of a search; None if nothing fits."""
    try:
        return search()
    except InfeasibleMemory:
        return None


def _chunks_of(stages: Stages, executor: str, ranks: int) -> int:
    """The virtual stages of a cut that the executor takes."""
    if executor == "megatron":
        return check_layout(stages, ranks)
    chunks, rest = divmod(len(stages), ranks)
    if rest:
        raise InvalidInput.at(
            "", f"found {len(stages)} stages on {ranks} ranks; must be a multiple of the ranks."
        )
    if executor == "torchtitan":
        module_names(stages)
    elif "" in stages:
        raise InvalidInput.at(
            "", f"found no layer in stage {stages.index('')}; PyTorch's stages are never empty."
        )
    return chunks


def _placed(
    problem: LayeredProblem, modules: Modules, schedule: Schedule, given: UserLayout, executor: str
) -> LayeredProblem:
    """The layers on the schedule's placement; raises :class:`InvalidInput` if the cut breaks a rule."""
    placed = placed_on(problem, schedule, executor == "megatron")
    whole = modules.kept_whole(problem)
    names, bounds = problem.model.names, given.bounds
    split = [bound for bound in bounds if bound not in whole.places]
    if split:
        at = split[0]
        detail = f"found a boundary between {names[at - 1]!r} and {names[at]!r}, which stay together"
        raise InvalidInput.at("/cut/together", f"{detail}. Move the boundary.")
    if not placed.rules.allow_empty and "" in map(modules.of_stage, bounds[:-1], bounds[1:]):
        raise InvalidInput.at("/cut/allow_empty", "found an empty stage, which the problem forbids. Fill it.")
    for name, rank in (("first", 0), ("last", problem.pp_degree - 1)):
        asked = getattr(problem.rules, name)
        hosted = schedule.placement.stages_of[rank]
        if schedule.placement.kind == "v":
            hosted = (0,) if name == "first" else (schedule.placement.n_stages - 1,)
        before = problem.model.blocks_before
        held = [before[bounds[stage + 1]] - before[bounds[stage]] for stage in hosted]
        if asked is not None and any(count * len(hosted) != asked for count in held):
            counts = " and ".join(map(str, held))
            detail = f"found {counts} transformer layers; the problem asks for {asked}"
            raise InvalidInput.at(f"/cut/{name}", f"{detail}. Change the cut, or remove this key.")
    return placed


def _of_flags(
    problem: LayeredProblem, executor: str, modules: Modules, method: str, layers: int
) -> Recompute | First | Groups:
    """What flags of Megatron-LM recompute; raises :class:`InvalidInput` if the problem lacks its costs."""
    if executor != "megatron":
        detail = f"found --recompute-method and executor {executor}; it is for megatron. Leave it out."
        raise InvalidInput.at("/layout", detail)
    if not problem.model.can_recompute or problem.model.recompute_modules:
        raise InvalidInput.at(
            "/layout",
            f"found --recompute-method {method}; the layers of the problem have no costs of full "
            f"recomputation. Add recompute to them without recompute_modules, or leave the flag out.",
        )
    try:
        if method == "block":
            return recomputation(problem, executor, modules, None, layers)
    except InvalidInput as error:
        raise InvalidInput.at("/layout", f"--recompute-num-layers: {error.issues[0].detail}") from None
    if layers == 1:
        return "all"
    if not modules.can_group(problem):
        raise InvalidInput.at(
            "/layout",
            f"found --recompute-num-layers {layers} with the method uniform; every transformer layer needs "
            f"recompute, and no other layer may have it: Megatron-LM refuses groups of layers with "
            f"multi-token prediction. Give 1, or the method block.",
        )
    return Groups(layers)


def _cut(
    placed: LayeredProblem, schedule: Schedule, given: UserLayout, offered: Recompute | First | Groups
) -> tuple[Problem, Orders, str, int | None]:
    """The problem by stages, verified but for its memory, the orders, and what is recomputed.

    It is the least that fits; if nothing fits, the least. The number is that of first layers or of a group.
    """
    orders, first = schedule.orders(), None
    for cut, name, number in _recomputed(placed, schedule, given, offered):
        unlimited = without_limit(cut)
        verify_orders(unlimited, orders)
        first = first or (cut, orders, name, number)
        if not ranks_above(cut, evaluate(unlimited, orders)):
            return cut, orders, name, number
    if first is None:
        raise RuntimeError("no recomputation was tried; this is a bug in zbv, please report it.")
    return first


def _recomputed(
    placed: LayeredProblem, schedule: Schedule, given: UserLayout, offered: Recompute | First | Groups
) -> Iterator[tuple[Problem, str, int | None]]:
    """The cut with what may be recomputed, from nothing to all."""

    def cut(layers: LayeredProblem, is_all: bool = False) -> Problem:
        recompute = (is_all,) * given.n_stages
        return layers.cut_into(schedule.placement, Cut.at(given.bounds, recompute))

    if not isinstance(offered, First | Groups):
        if offered != "all" or not placed.model.can_recompute:
            yield cut(placed), "none", None
        if offered != "none" and placed.model.can_recompute:
            yield cut(placed, True), "all", None
        return
    bounds = tuple(np.searchsorted(placed.places, given.bounds).tolist())
    most = int(np.diff(np.array(placed.model.blocks_before)[list(given.bounds)]).max())
    if isinstance(offered, Groups):
        yield cut(replace(placed, model=offered.model(placed, bounds))), "all", offered.size
        return
    for count in range(min(offered.least, most), min(offered.most, most) + 1):
        if count == 0:
            yield cut(placed), "none", None
        elif count < most or offered.others:
            yield cut(replace(placed, model=offered.model(placed, bounds, count))), "block", count
    # All first layers are all layers, unless others can be recomputed.
    if offered == First(others=offered.others) if offered.others else offered.most >= most:
        yield cut(placed, True), "all", None
