"""Problems by stages: a pipeline, the costs of its stages, and their memory.

A :class:`Problem` that exists is valid: its constructor checks every rule and raises
:class:`~zbv_solver.errors.InvalidInput` with all broken ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Literal, Protocol, get_args

import numpy as np
from pydantic import Field

from zbv_solver.documents.fields import Record
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan, Issue
from zbv_solver.kernels.jit import BoolArray, FloatArray
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.numeric import (
    FEASIBLE_MEMORY,
    MAX_CELLS,
    MAX_NUMBER,
    MAX_PP_DEGREE,
    MEMORY_TOLERANCE,
    delta_rule,
    exceeds,
    first_broken,
)
from zbv_solver.problem.stages import (
    COMMUNICATION,
    FIXED,
    MAX_FEATURE_NAME,
    MAX_FEATURES,
    PLACEMENT_KINDS,
    Communication,
    Costs,
    Feature,
    Kinds,
    Memory,
    Placement,
    ProblemArrays,
    pair_duration,
)

Objective = Literal["span", "makespan"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

LETTERS = "FIWB"
"""Action letters; the code of an action is the index of its letter."""
F, I, W, B = range(4)  # noqa: E741 - the field's own letter


class Times(Protocol):
    """Anything that has both objectives: a timing, the metrics of a plan, a baseline."""

    @property
    def span(self) -> float:
        """Longest time of any rank from its first start to its last end."""

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end of all ranks."""


def objective_value(objective: Objective, times: Times) -> float:
    """The value that is minimised."""
    return times.span if objective == "span" else times.makespan


_Unit = Annotated[str, Field(max_length=32)]
MAX_PAIR_FACTOR = 1e6


NANOSECONDS: dict[str, float] = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
"""Units of time whose size is known, in nanoseconds."""


@dataclass(frozen=True)
class Units(Record):
    """Names of units, for display only."""

    time: _Unit | None = None
    memory: _Unit | None = None


@dataclass(frozen=True)
class Problem:
    """One pipeline-parallel training iteration whose actions are to be ordered.

    Raises
    ------
    InvalidInput
        When a rule is broken; pointers are those of the JSON document.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory: Memory
    objective: Objective = "span"
    units: Units = field(default_factory=Units)
    model: CutModel | None = None
    """The layers and the cut that the stages come from; None for a problem given by stages."""
    measured: tuple[tuple[str, str], ...] = ()
    """Names and values that describe the program whose costs were measured. Planning ignores them."""
    features: tuple[Feature, ...] = ()
    """What microbatches differ in; empty when they are equal. If there are any, ``costs``, ``communication``
    and the deltas of ``memory`` are the part that does not depend on the microbatch."""
    communication: Communication | None = None
    """What pairs can hide; None if there are no pairs."""
    pair_factor: float = 1.0
    """What the two actions of a pair cost each other, at least 1."""
    given_arrays: ProblemArrays | None = field(default=None, compare=False, repr=False)
    """Arrays that stand for ``costs``, ``memory`` and ``features``: of a search, in its own unit of time."""

    def __post_init__(self) -> None:
        issues = [
            *basic_rules(
                self.pp_degree, self.microbatches, self.objective, self.placement.kind, PLACEMENT_KINDS
            ),
            *size_rule(self.placement, self.microbatches),
            *_number_rules(self),
            *_delta_rules(self),
        ]
        if not issues and self.features:
            issues = [*_feature_rules(self)] or [*_sum_rules(self)]
        if not issues:
            issues = [*_pair_rules(self)]
        if issues:
            raise InvalidInput(issues)
        if self.given_arrays is not None and len(self.given_arrays.kind_of) != self.microbatches:
            raise ValueError(
                f"found arrays of {len(self.given_arrays.kind_of)} microbatches; must be {self.microbatches}."
            )

    @property
    def pp_degree(self) -> int:
        """Number of ranks p."""
        return self.placement.pp_degree

    @property
    def n_stages(self) -> int:
        """Number of stages S."""
        return self.placement.n_stages

    @property
    def max_actions(self) -> int:
        """Number of actions when every backward is split: 3 S m."""
        return 3 * self.n_stages * self.microbatches

    @cached_property
    def arrays(self) -> ProblemArrays:
        """The problem as arrays (read-only)."""
        if self.given_arrays is not None:
            return self.given_arrays
        return ProblemArrays.of(
            self.placement, self.microbatches, self.costs, self.memory, self.features, self.communication
        )

    @property
    def is_equal(self) -> bool:
        """Whether all microbatches cost the same."""
        return self.arrays.kinds == 1

    def with_arrays(self, arrays: ProblemArrays) -> Problem:
        """The problem with other durations and latencies, by kind of microbatch; without layers."""
        if self.is_equal and self.features:
            return self.averaged().with_arrays(arrays)
        hidden = _communication_of(arrays)
        if self.is_equal:
            costs = self._costs_of(arrays)
            return replace(self, costs=costs, communication=hidden, given_arrays=None, model=None)
        return replace(self, given_arrays=arrays, communication=hidden, features=(), model=None)

    def _costs_of(self, arrays: ProblemArrays) -> Costs:
        """The costs of the first kind of microbatch."""
        forward, inputs, weights, fused = map(tuple, arrays.duration[:, :, 0].tolist())
        backward = None if self.costs.backward is None else fused
        return Costs(forward, inputs, weights, tuple(arrays.latency[:, 0].tolist()), backward)

    def averaged(self, microbatches: int | None = None) -> Problem:
        """The problem with equal microbatches that cost the average, as many as there are or as given."""
        average = self.arrays.average()
        held, by_inputs, by_weights = map(tuple, average.delta[: W + 1, :, 0].tolist())
        return replace(
            self,
            microbatches=microbatches or self.microbatches,
            costs=self._costs_of(average),
            memory=Memory(held, by_inputs, by_weights, self.memory.static, self.memory.limit),
            communication=_communication_of(average),
            features=(),
            given_arrays=None,
            model=None,
        )

    def without_pairs(self) -> Problem:
        """The same problem, in which actions run alone."""
        if self.communication is None:
            return self
        arrays = None if self.given_arrays is None else replace(self.given_arrays, communication=None)
        features = tuple(replace(feature, communication=None) for feature in self.features)
        return replace(self, communication=None, pair_factor=1.0, features=features, given_arrays=arrays)

    def with_forwards_shortened(self) -> Problem:
        """A problem without pairs in which no order is longer than the best one with pairs: Lemma 59.

        Every F is shorter by the most that a pair can save with it. An order with pairs becomes one without
        if the F of every pair runs before its partner: both fit into the time of the pair.
        """
        arrays, hidden = self.arrays, self.arrays.communication
        if hidden is None:
            return self
        duration = arrays.duration.copy()
        for stages in map(list, self.placement.stages_of):
            forward, mine = duration[F, stages], hidden[F, stages]  # (chunks, K)
            saved = np.zeros_like(forward)
            for stage in stages:
                for letter in (I, B):
                    for kind in range(arrays.kinds):
                        partner, others = arrays.duration[letter, stage, kind], hidden[letter, stage, kind]
                        pair = pair_duration(forward, partner, (mine, others), self.pair_factor)
                        saved = np.maximum(saved, forward + partner - pair)
            duration[F, stages] = np.maximum(forward - saved, 0.0)
        return self.with_arrays(replace(arrays, duration=duration, communication=None))

    @cached_property
    def smallest_limit(self) -> tuple[float, ...]:
        """The smallest feasible memory limit of every rank, exact.

        A rank holds the forwards of all its stages for every microbatch at some time: the first backward
        waits for the model's last forward, which waits for all other forwards. So every order needs at least
        static + the sum of the stages' forward deltas, of the largest microbatch. One microbatch at a time
        with fused backwards, which never allocate, needs exactly that.
        """
        forward = self.arrays.delta[F]
        return tuple(
            static + max(sum(kind) for kind in forward[list(stages)].T.tolist())
            for static, stages in zip(self.memory.static, self.placement.stages_of, strict=True)
        )

    def require_feasible(self) -> None:
        """Raise :class:`InfeasibleMemory` when a rank's limit is below its smallest feasible limit."""
        limits = self.memory.limit
        if limits is not None and any(
            exceeds(need, limit, FEASIBLE_MEMORY)
            for need, limit in zip(self.smallest_limit, limits, strict=True)
        ):
            raise InfeasibleMemory(self.smallest_limit, limits, unit=self.units.memory)

    def busy_time(self, rank: int) -> float:
        """Least total work of a rank: F and the cheaper of B and I + W of all its stages and microbatches."""
        arrays = self.arrays
        forward, inputs, weights, fused = arrays.duration[:, list(self.placement.stages_of[rank])]
        least = forward + np.minimum(fused, inputs + weights)
        return math.fsum((least @ arrays.count).tolist())


def require_same_problem(asked: Problem, of_plan: Problem) -> None:
    """Raise :class:`InvalidPlan` when a plan was made for another problem. Only descriptions may differ."""
    names = [
        name for name in Problem.__dataclass_fields__ if name not in ("units", "measured", "given_arrays")
    ]
    differing = [name for name in names if getattr(asked, name) != getattr(of_plan, name)]
    if differing:
        raise InvalidPlan(
            f"the plan was made for another problem; they differ in {', '.join(differing)}. Start from a "
            f"plan of this problem, or start without a plan."
        )


def basic_rules(
    pp_degree: int, microbatches: int, objective: str, placement: str, placements: Sequence[str]
) -> Iterator[Issue]:
    """The rules that problems by stages and by layers share; ``placements`` are the allowed ones."""
    if placement not in placements:
        yield Issue("/placement", f"found {placement!r}; must be one of {', '.join(placements)}.")
    if objective not in OBJECTIVES:
        yield Issue("/objective", f"found {objective!r}; must be one of {', '.join(OBJECTIVES)}.")
    if not 1 <= pp_degree <= MAX_PP_DEGREE:
        yield Issue("/pp_degree", f"found {pp_degree}; must be an integer from 1 to {MAX_PP_DEGREE}.")
    if microbatches < 1:
        yield Issue("/microbatches", f"found {microbatches}; must be an integer of at least 1.")


def size_rule(placement: Placement, microbatches: int) -> Iterator[Issue]:
    """The rule that limits the number of actions."""
    if placement.n_stages * microbatches > 2 * MAX_CELLS:
        yield Issue(
            "/microbatches",
            f"found {placement.n_stages} stages times {microbatches} microbatches; their product must be at "
            f"most {2 * MAX_CELLS}. Plan fewer microbatches: the steady state repeats.",
        )


def _number_rules(problem: Problem) -> Iterator[Issue]:
    stages, ranks = problem.n_stages, problem.pp_degree
    lengths = {"p2p": stages - 1, "static": ranks, "limit": ranks}
    for section, figures in (("costs", problem.costs), ("memory", problem.memory)):
        for part in fields(figures):
            name, values = part.name, getattr(figures, part.name)
            if values is None:
                continue
            pointer, length = f"/{section}/{name}", lengths.get(name, stages)
            is_delta = section == "memory" and name.startswith("backward")
            # With features, only the sum for a microbatch has a sign that matters.
            is_fixed_part = bool(problem.features) and name not in ("static", "limit")
            issue = _wrong_value(pointer, values, length, is_delta or is_fixed_part)
            if issue is None and length == stages:
                issue = _wrong_sum(pointer, values, problem.placement.chunks)
            if issue is not None:
                yield issue


def _wrong_value(pointer: str, values: Sequence[float], length: int, signed: bool) -> Issue | None:
    if len(values) != length:
        return Issue(pointer, f"found {len(values)} values; must be {length}.")
    broken = first_broken(values, signed)
    if broken is None:
        return None
    # Equal values usually come from one scalar in the document.
    return Issue(f"{pointer}/{broken[0]}" if len(set(map(repr, values))) > 1 else pointer, broken[1])


def _wrong_sum(pointer: str, values: Sequence[float], chunks: int) -> Issue | None:
    """Sums of neighbouring stages must be valid, too: classical schedules merge a rank's worth of stages."""
    for first in range(0, len(values), chunks):
        together = sum(values[first : first + chunks])
        if abs(together) > MAX_NUMBER:
            return Issue(
                pointer,
                f"found {together:.15g} for stages {first} to {first + chunks - 1} together; the stages of "
                f"one rank must be at most {MAX_NUMBER:g} together. Use a larger unit.",
            )
    return None


def _delta_rules(problem: Problem) -> Iterator[Issue]:
    memory = problem.memory
    if problem.features:
        return  # they hold for every microbatch, not for the fixed part
    deltas = zip(memory.forward, memory.backward_input, memory.backward_weight, strict=False)
    for stage, (forward, inputs, weights) in enumerate(deltas):
        if not all(map(math.isfinite, (forward, inputs, weights))):
            return  # reported by _number_rules
        # A stage may be a sum of layers, each within the tolerance, and the sum rounds again.
        broken = delta_rule(forward, inputs, weights, tolerance=2 * MEMORY_TOLERANCE)
        if broken is not None:
            yield Issue(f"/memory{broken[0]}", f"stage {stage}: {broken[1]}")
            return


def _feature_rules(problem: Problem) -> Iterator[Issue]:
    features, microbatches = problem.features, problem.microbatches
    names = [feature.name for feature in features]
    if len(features) > MAX_FEATURES:
        yield Issue("/features", f"found {len(features)} features; must be at most {MAX_FEATURES}.")
    for feature in features:
        at = f"/features/{feature.name}"
        if feature.name == FIXED or not 1 <= len(feature.name) <= MAX_FEATURE_NAME:
            yield Issue(
                at,
                f"found the name {feature.name[:80]!r}; a feature's name has 1 to {MAX_FEATURE_NAME} "
                f"characters and is not {FIXED!r}.",
            )
        if names.count(feature.name) > 1:
            yield Issue(at, "found this name twice; names of features are unique.")
        if len(feature.value) != microbatches:
            yield Issue(at, f"found {len(feature.value)} values; must be {microbatches}, one per microbatch.")
        if (broken := first_broken(feature.value)) is not None:
            yield Issue(f"{at}/{broken[0]}", broken[1])
        yield from _coefficient_rules(feature, problem.costs, problem.communication)


def _coefficient_rules(
    feature: Feature, costs: Costs, communication: Communication | None
) -> Iterator[Issue]:
    if (feature.costs.backward is None) != (costs.backward is None):
        yield Issue(
            "/costs/backward", f"feature {feature.name}: a fused backward depends on all features or on none."
        )
    if (feature.communication is None) != (communication is None):
        yield Issue(
            f"/{COMMUNICATION}", f"feature {feature.name}: communication depends on all features or on none."
        )
    n_stages = len(costs.forward)
    for (section, name), values in feature.coefficients.items():
        at, length = f"/{section}/{name}/{feature.name}", n_stages - 1 if name == "p2p" else n_stages
        if len(values) != length:
            yield Issue(at, f"found {len(values)} coefficients; must be {length}.")
        if (broken := first_broken(values, signed=True)) is not None:
            yield Issue(at, broken[1])


def _sum_rules(problem: Problem) -> Iterator[Issue]:
    """The rules of what a microbatch costs in all."""
    kinds = Kinds.of(problem.microbatches, problem.features)
    for name, table in kinds.tables("costs", problem.costs).items():
        place = "boundary" if name == "p2p" else "stage"
        yield from _wrong_sums(f"/costs/{name}", place, table, kinds, is_signed=False)
    deltas = kinds.tables("memory", problem.memory)
    for name, table in deltas.items():
        yield from _wrong_sums(f"/memory/{name}", "stage", table, kinds, is_signed=name != "forward")
    yield from _wrong_deltas(deltas, kinds)


def _wrong_sums(at: str, place: str, table: FloatArray, kinds: Kinds, is_signed: bool) -> Iterator[Issue]:
    wrong = np.abs(table) > MAX_NUMBER
    if not is_signed:
        wrong |= table < 0
    if wrong.any():
        stage, microbatch = _first(wrong, kinds)
        rule = f"of size at most {MAX_NUMBER:g}" if is_signed else f"from 0 to {MAX_NUMBER:g}"
        yield Issue(
            at,
            f"found {table[wrong][0]:.15g} for microbatch {microbatch} on {place} {stage}; the fixed part "
            f"and all coefficients times features must add up to a number {rule} for every microbatch.",
        )


def _wrong_deltas(tables: dict[str, FloatArray], kinds: Kinds) -> Iterator[Issue]:
    total = sum(tables.values(), np.zeros(()))
    size = sum((np.abs(table) for table in tables.values()), np.zeros(()))
    # Every coefficient may be rounded, and so may the sums.
    wrong = np.abs(total) > 2 * MEMORY_TOLERANCE * size
    if wrong.any():
        stage, microbatch = _first(wrong, kinds)
        yield Issue(
            "/memory",
            f"found changes of memory that sum to {total[wrong][0]:.15g} for microbatch {microbatch} on "
            f"stage {stage}; forward + backward_input + backward_weight must be 0, or memory would leak.",
        )
        return
    grows = tables["backward_weight"] > 0
    if grows.any():
        stage, microbatch = _first(grows, kinds)
        yield Issue(
            "/memory/backward_weight",
            f"found {tables['backward_weight'][grows][0]:.15g} for microbatch {microbatch} on stage {stage}; "
            f"must not be positive: W releases what F and I hold.",
        )


def _communication_of(arrays: ProblemArrays) -> Communication | None:
    """The communication of the first kind of microbatch."""
    if arrays.communication is None:
        return None
    forward, inputs, _, fused = map(tuple, arrays.communication[:, :, 0].tolist())
    return Communication(forward, inputs, fused)


def _pair_rules(problem: Problem) -> Iterator[Issue]:
    hidden, factor, stages = problem.communication, problem.pair_factor, problem.n_stages
    if not 1 <= factor <= MAX_PAIR_FACTOR:
        yield Issue(
            "/costs/pair_factor", f"found {factor:.15g}; must be a number from 1 to {MAX_PAIR_FACTOR:g}."
        )
    if hidden is None or problem.given_arrays is not None:
        return
    is_signed = bool(problem.features)  # only the sum for a microbatch has a sign that matters
    for name, values in vars(hidden).items():
        issue = _wrong_value(f"/{COMMUNICATION}/{name}", values, stages, is_signed)
        if issue is not None:
            yield issue
            return
    kinds = Kinds.of(problem.microbatches, problem.features)
    costs = kinds.tables("costs", problem.costs)
    longest = {**costs, "backward": costs.get("backward", costs["backward_input"] + costs["backward_weight"])}
    for name, table in kinds.tables(COMMUNICATION, hidden).items():
        wrong = (table < 0) | (table > longest[name] * (1 + MEMORY_TOLERANCE))
        if wrong.any():
            stage, microbatch = _first(wrong, kinds)
            yield Issue(
                f"/{COMMUNICATION}/{name}",
                f"found {table[wrong][0]:.15g} for microbatch {microbatch} on stage {stage}, where the "
                f"action takes {longest[name][wrong][0]:.15g}; communication is a part of its action, from 0 "
                f"to the whole.",
            )


def _first(wrong: BoolArray, kinds: Kinds) -> tuple[int, int]:
    """The first stage or boundary with a wrong number, and its first microbatch."""
    stage, kind = np.argwhere(wrong)[0].tolist()
    return stage, kinds.microbatch(kind)
