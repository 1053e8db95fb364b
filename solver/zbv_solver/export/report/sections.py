"""Sections of a plan's page: its layers, microbatches, durations that vary, and lists of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zbv_solver.construct.tables import sizes
from zbv_solver.export import quantities
from zbv_solver.export.palette import PALETTE_SHADES
from zbv_solver.export.timeline import accounts_for_memory
from zbv_solver.kernels.jit import can_compile
from zbv_solver.plans.orders import durations
from zbv_solver.plans.plan import CutCertificate, Plan, Simulation
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.jitter import Jitter, Spread
from zbv_solver.problem.problem import LETTERS, F, Problem, Units, objective_value

FOLDED_RANKS = 16
"""Tables with more ranks are folded."""
_BYTES = Units(memory="bytes")
MOST_MICROBATCHES = 256
"""Only as many microbatches have a bar and a row, the first to enter."""
MOST_SIMULATED = 1 << 24
"""Scenarios times actions that are simulated for a page: about two seconds."""
FEWEST_SCENARIOS = 64
MAX_CHIPS = 4000
"""The lists colour every action of plans with at most this many."""
MAX_LISTED = 30_000
"""Of plans with more actions the page lists only the first ones of every rank."""
LISTED_PER_RANK = 200


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
        summary=_cut_summary(cut, problem),
        certificate="" if plan.cut is None else _certificate(plan.cut, plan, problem.units),
        ranks=tuple(_rank_cut(problem, cut, rank, load, mean, largest) for rank, load in enumerate(work)),
        unit=quantities.time_unit(problem.units),
        mean=mean / largest,
        has_parameters=any(layer.parameters_bytes for layer in cut.model.layers),
        has_static=any(problem.memory.static),
    )


def _ranges(cut: CutModel, begin: int, end: int) -> Iterator[str]:
    """The names of layers, with consecutive copies as a range."""
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


def _cut_summary(cut: CutModel, problem: Problem) -> str:
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


def _rank_cut(
    problem: Problem, cut: CutModel, rank: int, work: float, mean: float, largest: float
) -> RankCut:
    stages: Sequence[int] = problem.placement.stages_of[rank]
    bounds = cut.cut.bounds
    hosted = [layer for stage in stages for layer in cut.model.each[bounds[stage] : bounds[stage + 1]]]
    return RankCut(
        rank,
        tuple(
            StageCut(
                stage,
                ", ".join(_ranges(cut, bounds[stage], bounds[stage + 1])) or "no layer",
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


@dataclass(frozen=True)
class MicrobatchRow:
    """A microbatch: the height of its bar in percent, and its numbers as texts."""

    microbatch: int
    height: float
    work: str
    held: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class MicrobatchesView:
    """Microbatches in the order of entry, with the names of their features."""

    features: tuple[str, ...]
    rows: tuple[MicrobatchRow, ...]
    summary: str
    has_memory: bool


def microbatches_view(plan: Plan) -> MicrobatchesView | None:
    """The microbatches of a plan; None if they are equal."""
    problem, arrays, orders = plan.problem, plan.problem.arrays, plan.orders
    if problem.is_equal:
        return None
    work, units = sizes(problem), problem.units
    held = arrays.delta[F].sum(axis=0)[arrays.kind_of]
    entry = orders.microbatch[(orders.stage == 0) & (orders.letter == F)].tolist()
    largest = float(work.max()) or 1.0
    rows = tuple(
        MicrobatchRow(
            microbatch,
            round(100 * float(work[microbatch]) / largest, 2),
            quantities.time(float(work[microbatch]), units),
            quantities.memory(float(held[microbatch]), units),
            tuple(quantities.figure(each.value[microbatch]) for each in problem.features),
        )
        for microbatch in entry[:MOST_MICROBATCHES]
    )
    share = quantities.figure(largest / (float(work.mean()) or 1.0), 2)
    summary = (
        f"Work on all stages in the order of entry: {quantities.times(work.tolist(), units)} per microbatch; "
        f"the largest has {share} times the mean."
    )
    if len(entry) > MOST_MICROBATCHES:
        number = quantities.figure(len(entry), 12)
        summary += f" The first {MOST_MICROBATCHES} of {number} microbatches are shown."
    return MicrobatchesView(
        tuple(each.name for each in problem.features), rows, summary, bool(arrays.delta[F].any())
    )


@dataclass(frozen=True)
class SimulatedRow:
    """A schedule; ``relative`` compares its p95 with the plan's and is empty for the plan itself."""

    name: str
    planned: str
    expected: str
    p95: str
    fits: bool
    relative: str
    is_plan: bool


@dataclass(frozen=True)
class SimulationView:
    """The content of the section; ``about`` says by how much durations vary."""

    rows: tuple[SimulatedRow, ...]
    about: str


def simulation_view(plan: Plan) -> SimulationView | None:
    """The plan's own simulation, else one with the default jitter; None if that would take long."""
    found = plan.simulation or _simulated(plan)
    if found is None:
        return None
    objective = plan.problem.objective
    planned = {each.name: objective_value(objective, each) for each in plan.baselines}
    own = found.spans.of(objective)[1]
    rows = []
    for name, value, spans, fits in (
        ("this plan", plan.objective, found.spans, True),
        *((each.name, planned.get(each.name), each.spans, each.fits) for each in found.baselines),
    ):
        expected, p95 = spans.of(objective)
        is_plan = spans is found.spans
        rows.append(
            SimulatedRow(
                name,
                "–" if value is None else quantities.figure(value),
                quantities.figure(expected),
                quantities.figure(p95),
                fits,
                "" if is_plan else quantities.relative(p95, own),
                is_plan,
            )
        )
    about = (
        f"{found.scenarios} simulated iterations in which durations vary, the same for every schedule; "
        f"standard deviations: {deviations(found.jitter)}. 95 % of the iterations take at most p95."
    )
    return SimulationView(tuple(rows), about)


def _simulated(plan: Plan) -> Simulation | None:
    if not can_compile() or len(plan.orders) == 0 or plan.orders.copies is not None:
        return None
    # Imported here because pages are also written where kernels cannot be compiled.
    from zbv_solver.search.jitter import DEFAULT_JITTER, SCENARIOS, simulate

    scenarios = min(SCENARIOS, MOST_SIMULATED // len(plan.orders))
    return simulate(plan, DEFAULT_JITTER, scenarios=scenarios) if scenarios >= FEWEST_SCENARIOS else None


def deviations(jitter: Jitter) -> str:
    """The standard deviations of actions, ranks and transfers, in words."""
    forward, *others = jitter.actions
    if all(each == forward for each in others):
        words = [f"actions {_deviation(forward)}"]
    else:
        named = zip(LETTERS, jitter.actions, strict=True)
        words = [f"{letter} {_deviation(each)}" for letter, each in named]
    if not all(each.is_constant for each in jitter.rank):
        words.append(f"ranks {_deviation(jitter.rank[0])}" if len(jitter.rank) == 1 else "ranks by rank")
    return ", ".join([*words, f"transfers {_deviation(jitter.transfer)}"])


def _deviation(spread: Spread) -> str:
    return "as measured" if spread.samples else quantities.percent(spread.deviation, 1)


@dataclass(frozen=True)
class Chip:
    """An action of a list; ``style`` is the class of its colour."""

    text: str
    style: str


@dataclass(frozen=True)
class RankLine:
    """A rank's list of actions, as coloured ``chips`` or as plain ``text``.

    ``peak`` is empty where the problem says nothing of memory.
    """

    rank: int
    stages: str
    count: int
    busy: str
    peak: str
    chips: tuple[Chip, ...]
    text: str
    omitted: int


def action_lists(plan: Plan) -> list[RankLine]:
    """A list for every rank, shortened for large plans."""
    orders, problem = plan.orders, plan.problem
    has_chips, has_memory = len(orders) <= MAX_CHIPS, accounts_for_memory(problem)
    chunk_of = problem.placement.chunk_of
    span = plan.metrics.span or 1.0
    duration = durations(problem, orders)
    lines = []
    for rank in range(orders.pp_degree):
        part = orders.slice_of(rank)
        count = part.stop - part.start
        listed = count if len(orders) <= MAX_LISTED else min(count, LISTED_PER_RANK)
        stages = problem.placement.stages_of[rank]
        lines.append(
            RankLine(
                rank=rank,
                stages=f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}",
                count=count,
                busy=quantities.percent(float(duration[part].sum()) / span, 1),
                peak=quantities.memory(plan.metrics.peak_memory[rank], problem.units) if has_memory else "",
                chips=tuple(
                    Chip(str(each), f"{each.letter}{chunk_of[each.stage] % PALETTE_SHADES}")
                    for each in (orders.actions(rank) if has_chips else ())
                ),
                text="" if has_chips else " ".join(orders.text(rank, listed)),
                omitted=count - listed,
            )
        )
    return lines
