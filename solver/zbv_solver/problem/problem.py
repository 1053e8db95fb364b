"""Problems by stages: a pipeline, the costs of its stages, and their memory.

A :class:`Problem` that exists is valid: its constructor checks every rule and raises
:class:`~zbv_solver.errors.InvalidInput` with all broken ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from zbv_solver.errors import InfeasibleMemory, InvalidInput, InvalidPlan, Issue
from zbv_solver.kernels.arrays import FloatArray
from zbv_solver.problem.cut import CutModel
from zbv_solver.problem.limits import MAX_CELLS, MAX_PP_DEGREE
from zbv_solver.problem.numeric import (
    FEASIBLE_MEMORY,
    MAX_NUMBER,
    MEMORY_TOLERANCE,
    broken_rule,
    clean_deltas,
    delta_rule,
    exceeds,
)
from zbv_solver.problem.placement import PLACEMENT_KINDS, Placement

Objective = Literal["span", "makespan"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)

LETTERS = "FIWB"
"""Action letters; the code of an action is the index of its letter."""
F, I, W, B = range(4)  # noqa: E741 - the field's own letter

PerStage = tuple[float, ...]


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


@dataclass(frozen=True)
class Costs:
    """Durations, one per stage (S,), in the caller's unit.

    Attributes
    ----------
    backward
        The fused backward B; None means that it costs I + W.
    p2p
        Transfer latency per stage boundary (S-1,); ignored where the boundary lies inside one rank.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    p2p: PerStage
    backward: PerStage | None = None

    def fused(self, stage: int) -> float:
        """Duration of the fused backward of a stage."""
        if self.backward is not None:
            return self.backward[stage]
        return self.backward_input[stage] + self.backward_weight[stage]


@dataclass(frozen=True)
class Memory:
    """Memory deltas, one per stage (S,), and static use and limit, one per rank (p,).

    ``forward + backward_input + backward_weight`` is 0 per stage, up to rounding. These are the numbers that
    the user stated, and they are part of a plan's identity. Sums over microbatches must use
    :attr:`ProblemArrays.delta` instead, whose deltas sum to exactly 0. ``limit`` is None when unlimited.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    static: tuple[float, ...]
    limit: tuple[float, ...] | None = None

    @classmethod
    def unlimited(cls, placement: Placement) -> Memory:
        """All deltas 0 and no limit."""
        zeros = (0.0,) * placement.n_stages
        return cls(zeros, zeros, zeros, (0.0,) * placement.pp_degree)


@dataclass(frozen=True)
class Units:
    """Names of the caller's units, for display only."""

    time: str | None = None
    memory: str | None = None


@dataclass(frozen=True)
class ProblemArrays:
    """A problem as arrays, for kernels.

    Attributes
    ----------
    duration
        (4, S) float64, indexed [letter code, stage].
    delta
        (4, S) float64, change of the rank's memory at an action. F + I + W and F + B are exactly 0.
    latency
        (S-1,) float64, latency of a boundary; 0 inside one rank.
    rank_of
        (S,) int32.
    static, limit
        (p,) float64; the limit is inf when unlimited.
    """

    duration: FloatArray
    delta: FloatArray
    latency: FloatArray
    rank_of: NDArray[np.int32]
    static: FloatArray
    limit: FloatArray


@dataclass(frozen=True)
class Problem:
    """One pipeline-parallel training iteration whose actions are to be ordered.

    Attributes
    ----------
    model
        The layers and the cut that the stages come from; None for a problem given by stages.
    measured
        Names and values that describe the program whose costs were measured. Planning ignores them.

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
    measured: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        issues = [
            *basic_rules(
                self.pp_degree, self.microbatches, self.objective, self.placement.kind, PLACEMENT_KINDS
            ),
            *size_rule(self.placement, self.microbatches),
            *_number_rules(self),
            *_delta_rules(self),
        ]
        if issues:
            raise InvalidInput(issues)

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
        costs, memory, placement = self.costs, self.memory, self.placement
        fused = [costs.fused(stage) for stage in range(self.n_stages)]
        cleaned = list(map(clean_deltas, memory.forward, memory.backward_input))
        inputs, weights = zip(*cleaned, strict=True)
        freed = [0.0 - forward for forward in memory.forward]
        latency = [0.0 if placement.is_local(boundary) else cost for boundary, cost in enumerate(costs.p2p)]
        unlimited = (math.inf,) * self.pp_degree
        arrays = ProblemArrays(
            duration=np.array([costs.forward, costs.backward_input, costs.backward_weight, fused]),
            delta=np.array([memory.forward, inputs, weights, freed]),
            latency=np.array(latency, dtype=np.float64),
            rank_of=np.array(placement.rank_of, dtype=np.int32),
            static=np.array(memory.static, dtype=np.float64),
            limit=np.array(memory.limit or unlimited, dtype=np.float64),
        )
        for array in vars(arrays).values():
            array.flags.writeable = False
        return arrays

    @cached_property
    def smallest_limit(self) -> tuple[float, ...]:
        """The smallest feasible memory limit of every rank, exact.

        A rank holds the forwards of all its stages for every microbatch at some time: the first backward
        waits for the model's last forward, which waits for all other forwards. So every order needs at least
        static + the sum of the stages' forward deltas. One microbatch at a time with fused backwards, which
        never allocate, needs exactly that.
        """
        forward = self.memory.forward
        return tuple(
            static + sum(forward[stage] for stage in stages)
            for static, stages in zip(self.memory.static, self.placement.stages_of, strict=True)
        )

    def require_feasible(self) -> None:
        """Raise :class:`InfeasibleMemory` when a rank's limit is below its smallest feasible limit."""
        limits = self.memory.limit
        if limits is not None and any(
            exceeds(need, limit, FEASIBLE_MEMORY)
            for need, limit in zip(self.smallest_limit, limits, strict=True)
        ):
            raise InfeasibleMemory(self.smallest_limit, limits)

    def busy_time(self, rank: int) -> float:
        """Least total work of a rank: m times F and the cheaper of B and I + W, over its stages."""
        costs = self.costs
        return self.microbatches * math.fsum(
            costs.forward[s] + min(costs.fused(s), costs.backward_input[s] + costs.backward_weight[s])
            for s in self.placement.stages_of[rank]
        )


def require_same_problem(asked: Problem, of_plan: Problem) -> None:
    """Raise :class:`InvalidPlan` when a plan was made for another problem. Only descriptions may differ."""
    names = [name for name in Problem.__dataclass_fields__ if name not in ("units", "measured")]
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
        for name, values in vars(figures).items():
            if values is None:
                continue
            pointer, length = f"/{section}/{name}", lengths.get(name, stages)
            is_delta = section == "memory" and name.startswith("backward")
            issue = _wrong_value(pointer, values, length, is_delta)
            if issue is None and length == stages:
                issue = _wrong_sum(pointer, values, problem.placement.chunks)
            if issue is not None:
                yield issue


def _wrong_value(pointer: str, values: Sequence[float], length: int, signed: bool) -> Issue | None:
    if len(values) != length:
        return Issue(pointer, f"found {len(values)} values; must be {length}.")
    for index, value in enumerate(values):
        rule = broken_rule(value, signed)
        if rule is not None:
            # Equal values usually come from one scalar in the document.
            return Issue(f"{pointer}/{index}" if len(set(map(repr, values))) > 1 else pointer, rule)
    return None


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
    deltas = zip(memory.forward, memory.backward_input, memory.backward_weight, strict=False)
    for stage, (forward, inputs, weights) in enumerate(deltas):
        if not all(map(math.isfinite, (forward, inputs, weights))):
            return  # reported by _number_rules
        # A stage may be a sum of layers, each within the tolerance, and the sum rounds again.
        broken = delta_rule(forward, inputs, weights, tolerance=2 * MEMORY_TOLERANCE)
        if broken is not None:
            yield Issue(f"/memory{broken[0]}", f"stage {stage}: {broken[1]}")
            return
