"""Parameter counts of layers, and the memory that training keeps per parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zbv_solver.estimate.amounts import Summed
from zbv_solver.estimate.shapes import Degrees


@dataclass(frozen=True)
class Parameters:
    """A parameter count, split by how parallelism treats the parameters.

    Attributes
    ----------
    shared
        Parameters of matrices that a tensor-parallel group divides.
    replicated
        Parameters that every device has whole: norms, positions, biases after a sum over the group, routers.
    experts
        Parameters of routed experts, which an expert-parallel group divides.
    chosen
        Parameters of the routed experts that one token uses.
    """

    shared: int
    replicated: int
    experts: int = 0
    chosen: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.shared + other.shared,
            self.replicated + other.replicated,
            self.experts + other.experts,
            self.chosen + other.chosen,
        )

    @property
    def total(self) -> int:
        """Count in the whole model."""
        return self.shared + self.replicated + self.experts

    @property
    def active(self) -> int:
        """Count of those that one token uses."""
        return self.shared + self.replicated + self.chosen

    def dense_on(self, degrees: Degrees) -> int:
        """Count on a device, without routed experts."""
        return self.shared // degrees.tensor + self.replicated

    def experts_on(self, degrees: Degrees) -> int:
        """Count of routed experts' parameters on a device."""
        return self.experts // degrees.expert

    def on_device(self, degrees: Degrees) -> int:
        """Count on each device."""
        return self.dense_on(degrees) + self.experts_on(degrees)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter of each kind of training state, of an optimizer with so many states."""

    parameters: float = 2.0
    gradients: float = 2.0
    master: float = 4.0
    state: float = 4.0
    states: int = 2

    @property
    def optimizer(self) -> float:
        """Master copy and states."""
        return self.master + self.states * self.state


@dataclass(frozen=True)
class StaticBytes(Summed):
    """Memory that training holds all the time, in bytes on one device."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer


def static_bytes(parameters: int, state: StateBytes, zero_stage: int = 0, replicas: int = 1) -> StaticBytes:
    """Parameters, gradients and optimizer (master copy and states) of a number of parameters.

    Mixed-precision Adam is 2 + 2 + 12 bytes per parameter; ZeRO divides the last, the last two, or all three
    by the replicas (Rajbhandari et al. 2020, §3.1, §5 and figure 1).
    """

    def held(size: float, divided_from_stage: int) -> float:
        return parameters * size / (replicas if zero_stage >= divided_from_stage else 1)

    return StaticBytes(held(state.parameters, 3), held(state.gradients, 2), held(state.optimizer, 1))


def static_of(parameters: Parameters, state: StateBytes, degrees: Degrees) -> StaticBytes:
    """The static memory of a layer on one device, in whole bytes.

    A replica's share of a layer is rounded up: shards are padded to one size. Experts have other replicas
    than the rest (Megatron-LM, ``DistributedOptimizer`` with expert parallelism).
    """
    kept = static_bytes(parameters.dense_on(degrees), state, degrees.zero_stage, degrees.replicas)
    if parameters.experts:
        of_experts = parameters.experts_on(degrees)
        kept += static_bytes(of_experts, state, degrees.zero_stage, degrees.expert_replicas)
    return StaticBytes(*map(math.ceil, (kept.parameters, kept.gradients, kept.optimizer)))
