"""The division of a model into stages: the layers of every rank, and the bound on other cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbv_solver.export import quantities
from zbv_solver.plans.plan import CutCertificate, Plan
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.problem import Problem, Units

FOLDED_RANKS = 16
"""Tables with more ranks are folded."""
_BYTES = Units(memory="bytes")


@dataclass(frozen=True)
class StageCut:
    """A stage's layers as text, such as ``embedding, block.0 to block.3``."""

    stage: int
    layers: str
    count: int
    is_recomputed: bool


@dataclass(frozen=True)
class RankCut:
    """The stages of a rank."""

    rank: int
    stages: tuple[StageCut, ...]
    work: str
    """Time per microbatch: forwards and cheaper backwards."""
    relative: str
    """Work relative to the mean of all ranks."""
    share: float
    """Work relative to the largest, from 0 to 1."""
    parameters: str
    static: str


@dataclass(frozen=True)
class LayersView:
    """The cut of a plan."""

    summary: str
    certificate: str
    """The bound on all other cuts, in words; empty if the problem fixed the cut."""
    ranks: tuple[RankCut, ...]
    unit: str
    mean: float
    """Length of the mean rank's bar, from 0 to 1."""
    has_parameters: bool
    has_static: bool

    @property
    def is_long(self) -> bool:
        """Whether the page folds the table."""
        return len(self.ranks) > FOLDED_RANKS


def layers_view(plan: Plan) -> LayersView | None:
    """The cut of a plan; None if its problem gives stages."""
    problem, cut = plan.problem, plan.problem.model
    if cut is None:
        return None
    work = [problem.busy_time(rank) / problem.microbatches for rank in range(problem.pp_degree)]
    largest, mean = max(work) or 1.0, sum(work) / len(work)
    return LayersView(
        summary=_summary(cut, problem),
        certificate="" if plan.cut is None else _certificate(plan.cut, plan, problem.units),
        ranks=tuple(_rank(problem, cut, rank, load, mean, largest) for rank, load in enumerate(work)),
        unit=quantities.time_unit(problem.units),
        mean=mean / largest,
        has_parameters=any(layer.parameters_bytes for layer in cut.model.layers),
        has_static=any(problem.memory.static),
    )


def layers_text(cut: CutModel, stage: int) -> str:
    """The layers of a stage as text, with consecutive copies as a range."""
    begin, end = cut.cut.bounds[stage], cut.cut.bounds[stage + 1]
    return ", ".join(_ranges(cut, begin, end)) or "no layer"


def _ranges(cut: CutModel, begin: int, end: int) -> Iterator[str]:
    names, each = cut.model.names, cut.model.each
    first = begin
    for place in range(begin + 1, end + 1):
        if place == end or not _follows(names[place - 1], names[place], each[place - 1] is each[place]):
            if place - first > 2:
                yield f"{names[first]} to {names[place - 1]}"
            else:
                yield from names[first:place]
            first = place


def _follows(before: str, name: str, same: bool) -> bool:
    """Whether a layer is the next copy of the one before, or has its name with the next number."""
    (stem, _, number), (other, _, after) = before.rpartition("."), name.rpartition(".")
    return same or (
        bool(stem)
        and stem == other
        and number.isdecimal()
        and after.isdecimal()
        and int(after) == int(number) + 1
    )


def _summary(cut: CutModel, problem: Problem) -> str:
    recomputed = sum(cut.cut.recompute)
    text = f"{cut.model.n_layers} layers in {problem.n_stages} stages"
    if not cut.model.can_recompute:
        return f"{text}."
    if recomputed == 1:
        return f"{text}, of which one is recomputed."
    return f"{text}, of which {recomputed or 'none'} are recomputed."


def _certificate(found: CutCertificate, plan: Plan, units: Units) -> str:
    bound = quantities.time(found.lower_bound, units)
    if plan.objective <= found.lower_bound or found.gap == 0:
        return f"Proved: no plan of any other cut is better; none is below {bound}."
    better = 1 - found.lower_bound / plan.objective
    return (
        f"No other cut can be more than {quantities.percent(better)} better: none has a plan below {bound}."
    )


def _rank(problem: Problem, cut: CutModel, rank: int, work: float, mean: float, largest: float) -> RankCut:
    stages: Sequence[int] = problem.placement.stages_of[rank]
    bounds = cut.cut.bounds
    hosted = [layer for stage in stages for layer in cut.model.each[bounds[stage] : bounds[stage + 1]]]
    return RankCut(
        rank,
        tuple(
            StageCut(
                stage,
                layers_text(cut, stage),
                bounds[stage + 1] - bounds[stage],
                cut.cut.recompute[stage],
            )
            for stage in stages
        ),
        quantities.figure(work),
        quantities.relative(work, mean),
        work / largest,
        quantities.memory(sum(layer.parameters_bytes for layer in hosted), _BYTES),
        quantities.memory(problem.memory.static[rank], problem.units),
    )
