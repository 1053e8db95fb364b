"""Problems by stages: a pipeline, the costs of its stages, and their memory.

A :class:`Problem` that exists is valid: its constructor checks every rule and raises
:class:`~zbv_solver.errors.InvalidInput` with all broken ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Annotated, Literal, Protocol, get_args

import numpy as np
from pydantic import Field

from zbv_solver.documents.fields import Record
from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan, Issue
from zbv_solver.kernels.jit import FloatArray
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.numeric import (
    FEASIBLE_MEMORY,
    MAX_CELLS,
    MAX_PP_DEGREE,
    exceeds,
)
from zbv_solver.problem.rules import copy_rules, feature_rules, number_rules, pair_rules, sum_rules
from zbv_solver.problem.stages import (
    PLACEMENT_KINDS,
    Communication,
    Copies,
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
COPY_LETTERS = "ODR"
"""Letters of copies to the host, whose codes follow: a copy out begins, memory is freed, a copy in begins."""
O, D, R = range(4, 7)  # noqa: E741 - a copy out; the field has no other letter for it


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
    copies: Copies | None = None
    """What may be copied to the host; None if nothing."""
    given_arrays: ProblemArrays | None = field(default=None, compare=False, repr=False)
    """Arrays that stand for ``costs``, ``memory`` and ``features``: of a search, in its own unit of time."""

    def __post_init__(self) -> None:
        issues = [
            *basic_rules(
                self.pp_degree, self.microbatches, self.objective, self.placement.kind, PLACEMENT_KINDS
            ),
            *size_rule(self.placement, self.microbatches),
            *number_rules(self.placement, self.costs, self.memory, has_features=bool(self.features)),
        ]
        if not issues and self.features:
            issues = [*feature_rules(self.features, self.microbatches, self.costs, self.communication)]
        if not issues:
            kinds = Kinds.of(self.microbatches, self.features)
            issues = [*sum_rules(kinds, self.costs, self.memory)] if self.features else []
            if self.communication is not None and self.given_arrays is None:
                issues += pair_rules(kinds, self.costs, self.communication, self.pair_factor)
        if not issues and self.copies is not None:
            issues = [*copy_rules(self.placement, self.copies, self.memory, bool(self.features))]
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

    def without_copies(self) -> Problem:
        """The same problem, in which everything stays on the device."""
        return self if self.copies is None else replace(self, copies=None)

    def without_what_copies_move(self) -> Problem:
        """A problem without copies in which no order is longer than the best one with copies: Lemma 62.

        An F keeps only what cannot move to the host. An order with copies becomes one without if its copies
        are left out.
        """
        if self.copies is None:
            return self
        delta = self.arrays.delta.copy()
        held = np.maximum(delta[F] - np.array(self.copies.offloadable)[:, None], 0.0)
        freed = np.minimum(delta[F] + delta[I] - held, 0.0)
        delta[F], delta[I], delta[W], delta[B] = held, freed, -(held + freed), -held
        return replace(self, copies=None, given_arrays=replace(self.arrays, delta=delta))

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
            forward, own = duration[F, stages], hidden[F, stages]  # (chunks, K)
            saved = np.zeros_like(forward)
            for stage in stages:
                for letter in (I, B):
                    partner, other = arrays.duration[letter, stage], hidden[letter, stage]  # (K,)
                    if arrays.kinds == 1:
                        together = pair_duration(forward, partner, (own, other), self.pair_factor)
                        most = forward + partner - together
                    else:  # at least the most of any two kinds, without looking at all of them
                        rest = (partner - other).max()
                        most = np.minimum(np.minimum(partner.max(), own + other.max()), forward - own + rest)
                    saved = np.maximum(saved, most)
            duration[F, stages] = np.maximum(forward - saved, 0.0)
        return self.with_arrays(replace(arrays, duration=duration, communication=None))

    @cached_property
    def smallest_limit(self) -> tuple[float, ...]:
        """The smallest feasible memory limit of every rank, exact.

        A rank holds the forwards of all its stages for every microbatch at some time: the first backward
        waits for the model's last forward, which waits for all other forwards. So every order needs at least
        static + the sum of the stages' forward deltas, of the largest microbatch. One microbatch at a time
        with fused backwards, which never allocate, needs exactly that.

        With copies to the host, earlier stages keep at least what cannot move while a later one runs its F.
        One microbatch at a time needs exactly the largest of these sums, if the host has room.
        """
        if self.copies is not None:
            return tuple(
                static + least_with_copies(self, rank)[0] for rank, static in enumerate(self.memory.static)
            )
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
            has_copies = self.copies is not None
            raise InfeasibleMemory(self.smallest_limit, limits, unit=self.units.memory, has_copies=has_copies)

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


MOST_SUBSETS = 12
"""Stages of a rank whose choices are all looked at if the host has no room for all of them. With more, the
largest ones move first, which may need more memory of the device than another choice."""


def least_with_copies(problem: Problem, rank: int) -> tuple[float, FloatArray]:
    """The least that a rank holds of one microbatch, and how much of each of its stages then moves, (c,)."""
    copies, stages = problem.copies, list(problem.placement.stages_of[rank])
    forward = problem.arrays.delta[F, stages, 0]
    if copies is None:
        return float(forward.sum()), np.zeros(len(stages))
    moved = np.array(copies.offloadable)[stages]
    moved[-1] = 0.0  # its backward follows its forward
    room = math.inf if copies.host_limit is None else copies.host_limit[rank]
    choices = [moved]
    if exceeds(float(moved.sum()), room) and len(stages) <= MOST_SUBSETS:
        options = [moved * chosen for chosen in product((0, 1), repeat=len(stages))]
        choices = [away for away in options if not exceeds(float(away.sum()), room)]
    elif exceeds(float(moved.sum()), room):
        largest = np.argsort(-moved, kind="stable")
        fits = np.cumsum(moved[largest]) <= room
        choices = [np.where(np.isin(np.arange(len(moved)), largest[fits]), moved, 0.0)]
    # Stages before the one that runs keep what is not away.
    held = [float((np.cumsum(forward - away) + away).max()) for away in choices]
    return min(held), choices[int(np.argmin(held))]


def _communication_of(arrays: ProblemArrays) -> Communication | None:
    """The communication of the first kind of microbatch."""
    if arrays.communication is None:
        return None
    forward, inputs, _, fused = map(tuple, arrays.communication[:, :, 0].tolist())
    return Communication(forward, inputs, fused)
