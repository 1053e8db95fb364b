"""Costs and memory of the stages of a pipeline, and how they depend on the features of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from zbv_solver.problem.placement import Placement

PerStage = tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Durations, one per stage (S,), in the caller's unit."""

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage
    p2p: PerStage
    """Transfer latency per stage boundary (S-1,); ignored where the boundary lies inside one rank."""
    backward: PerStage | None = None
    """The fused backward B; None means that it costs I + W."""

    def fused(self, stage: int) -> float:
        """Duration of the fused backward of a stage."""
        if self.backward is not None:
            return self.backward[stage]
        return self.backward_input[stage] + self.backward_weight[stage]

    def mapped(self, of_stages: Callable[[PerStage], PerStage], p2p: PerStage | None = None) -> Costs:
        """Costs with every duration changed by a function, and other latencies if they are given."""
        return Costs(
            of_stages(self.forward),
            of_stages(self.backward_input),
            of_stages(self.backward_weight),
            self.p2p if p2p is None else p2p,
            None if self.backward is None else of_stages(self.backward),
        )


@dataclass(frozen=True)
class Deltas:
    """Changes of a rank's memory at F, I and W, one per stage (S,); their sum is 0 per stage, up to rounding.

    These are the numbers that the user stated, and they are part of a plan's identity. Sums over microbatches
    must use :attr:`ProblemArrays.delta` instead, whose deltas sum to exactly 0.
    """

    forward: PerStage
    backward_input: PerStage
    backward_weight: PerStage


@dataclass(frozen=True)
class Memory(Deltas):
    """Memory deltas per stage; static use and limit per rank (p,). ``limit`` is None when unlimited."""

    static: tuple[float, ...]
    limit: tuple[float, ...] | None = None

    @classmethod
    def unlimited(cls, placement: Placement) -> Memory:
        """All deltas 0 and no limit."""
        zeros = (0.0,) * placement.n_stages
        return cls(zeros, zeros, zeros, (0.0,) * placement.pp_degree)


@dataclass(frozen=True)
class Feature:
    """A number that differs between microbatches, such as their tokens, and what depends on it.

    The cost of microbatch j is the problem's own number plus, for every feature, coefficient times value[j].
    """

    name: str
    value: tuple[float, ...]
    """(m,) not negative."""
    costs: Costs
    memory: Deltas
    """The coefficients per stage or boundary. ``costs.backward`` is None if and only if the problem's is."""

    @property
    def coefficients(self) -> dict[tuple[str, str], PerStage]:
        """All coefficients, by section of the document and name."""
        return {
            (section, field.name): values
            for section, record in (("costs", self.costs), ("memory", self.memory))
            for field in fields(record)
            if (values := getattr(record, field.name)) is not None
        }
