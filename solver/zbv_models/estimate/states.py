"""What training keeps per parameter: the account of a device's static memory.

A program chooses the types of its states, :class:`StateBytes`. What a device then holds of them are
:class:`HeldBytes`: some bytes per parameter in every replica, and others that the replicas divide. Estimates
take them from :func:`by_zero`; each executor has another account
(:mod:`zbv_models.layouts.executor_memory`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from zbv_models.estimate.shapes import Degrees, Parameters, Summed

FLOAT32_BYTES = 4
OPTIMIZER_STATES = {"adam": (2, 2), "muon": (1, 2), "lion": (1, 1), "sgd-momentum": (1, 1), "sgd": (0, 0)}
"""Values that an optimizer keeps per parameter of a matrix, and of a table of the vocabulary.

Muon has one for matrices, and leaves tables to Adam (Jordan et al. 2024; Megatron-LM,
``_is_nonlinear_or_embedding``). It leaves norms and biases to Adam, too, but they count like matrices here:
they are less than a ten-thousandth of a model.
"""


@dataclass(frozen=True)
class StateBytes:
    """The states that a program chooses, in bytes per parameter."""

    parameters: float = 2.0
    gradients: float = 4.0
    master: float = 4.0
    """The copy of the parameters that the optimizer updates; 0 if it updates the parameters themselves."""
    state: float = 4.0
    """Each value that the optimizer keeps."""
    optimizer: str = "adam"
    dtype: str = "bfloat16"
    """The type in which the model computes."""
    offloaded: float = 0.0
    """Share of the master copy and of the optimizer's values that the host keeps and updates."""
    gathered: float = 0.0
    """A parameter of a linear layer as FSDP gathers it, in bytes; 0: as ``parameters``. Tables and routed
    experts keep the type of the parameters."""

    def values(self, *, tables: bool = False) -> float:
        """All values of the optimizer, of matrices or of tables, on device and host."""
        return OPTIMIZER_STATES[self.optimizer][tables] * self.state

    def updated(self, *, tables: bool = False) -> float:
        """Master copy and all values of the optimizer on the device, of matrices or of tables."""
        return (1 - self.offloaded) * (self.master + self.values(tables=tables))


@dataclass(frozen=True)
class StaticBytes(Summed):
    """Memory that training holds all the time, in bytes."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True)
class HeldBytes:
    """What a device keeps per parameter, in bytes, and what its replicas exchange."""

    whole: StaticBytes
    """Held by every replica."""
    divided: StaticBytes
    """Held by all replicas together."""
    accumulated: float
    """A gradient to which microbatches add."""
    reduced: float
    gathered: float
    """A gradient when replicas sum it, and a parameter when they gather it."""
    updated: float
    """Memory traffic of the update, which replicas share if they divide anything."""
    buffers: float = 0.0
    """Held per parameter of one layer at a time, in addition."""
    copied: float = 0.0
    """Held during the update only, in addition; replicas share it as they share the optimizer. Activations
    are gone by then, so it does not add to the peak of a pipeline."""
    hosted: float = 0.0
    """Traffic through the host's memory of the update that the host does."""
    passing: float = 0.0
    """Of the gradients in ``whole``, those that exist only from the first to the last backward of a stage."""

    def frozen(self, size: float | None = None) -> HeldBytes:
        """The same of parameters that do not train: replicas gather only those that they divide.

        ``size`` is the bytes of one of them, also where replicas divide or gather it; None: as of others.
        """
        whole, divided, gathered = self.whole.parameters, self.divided.parameters, self.gathered
        if size is not None:
            whole, divided, gathered = (size if held else 0.0 for held in (whole, divided, gathered))
        gathered = gathered if divided else 0.0
        return HeldBytes(
            whole=StaticBytes(whole),
            divided=StaticBytes(divided),
            accumulated=0.0,
            reduced=0.0,
            gathered=gathered,
            updated=0.0,
            buffers=min(self.buffers, 2 * gathered),
        )

    def of(self, count: int, replicas: int) -> StaticBytes:
        """What a device holds of so many parameters."""
        return (self.whole + self.divided.scaled(1 / replicas)).scaled(count)


Account = Callable[[StateBytes, int, bool], HeldBytes]
"""What is kept of chosen states with a ZeRO stage, of matrices or of tables."""


def by_zero(state: StateBytes, zero_stage: int, tables: bool = False) -> HeldBytes:
    """Parameters, gradients and optimizer, of which ZeRO divides the last, the last two, or all.

    Adam in mixed precision has 2 + 2 + 12 bytes (Rajbhandari et al. 2020, §3.1, §5 and figure 1), and
    2 + 4 + 12 with gradients in float32.
    """
    optimizer = state.updated(tables=tables)
    every = StaticBytes(state.parameters, state.gradients, optimizer)
    divided = StaticBytes(
        state.parameters * (zero_stage >= 3),
        state.gradients * (zero_stage >= 2),
        optimizer * (zero_stage >= 1),
    )
    return HeldBytes(
        whole=every + divided.scaled(-1.0),
        divided=divided,
        accumulated=state.gradients,
        reduced=state.gradients,
        gathered=state.parameters,
        updated=update_bytes(state, tables=tables),
        buffers=max(divided.parameters, divided.gradients),
        hosted=hosted_bytes(state, tables=tables),
    )


def hosted_bytes(state: StateBytes, *, tables: bool = False) -> float:
    """Memory traffic of the host's update per parameter, in float32.

    Gradients come from the device and are read; the master copy and the optimizer's values are read and
    written; parameters go back (Megatron-LM, ``HybridDeviceOptimizer``).
    """
    return state.offloaded * (4 * FLOAT32_BYTES + 2 * FLOAT32_BYTES + 2 * state.values(tables=tables))


def update_bytes(state: StateBytes, *, tables: bool = False) -> float:
    """Memory traffic of an update per parameter.

    Gradients are read for their norm and for the update (Pascanu et al. 2013, §3.2; Kingma and Ba 2015,
    algorithm 1); states and the master copy are read and written, and parameters are written. Copies of
    gradients are left out: they take milliseconds.
    """
    parameters = state.parameters if state.master else 2 * state.parameters
    return 2 * state.gradients + 2 * state.updated(tables=tables) + parameters


@dataclass(frozen=True)
class Share:
    """Parameters of a layer on a device that have the same replicas and states."""

    count: int
    """Number on a device before replicas share them."""
    replicas: int
    kept: HeldBytes
    is_expert: bool = False
    """Whether they are those of routed experts."""


@lru_cache(maxsize=256)
def _kept(account: Account, state: StateBytes, zero_stage: int, tables: bool) -> HeldBytes:
    """What an account says, which all layers ask."""
    return account(state, zero_stage, tables)


def shares_of(
    parameters: Parameters, state: StateBytes, account: Account, degrees: Degrees
) -> tuple[Share, ...]:
    """The parameters of a layer by their replicas and states.

    Experts have other replicas than the rest (Megatron-LM, ``DistributedOptimizer`` with expert parallelism).
    """
    stage, dense = degrees.zero_stage, parameters.dense_on(degrees)
    kept, of_tables = _kept(account, state, stage, False), _kept(account, state, stage, True)
    found = [Share(dense, degrees.replicas, kept)]
    if parameters.tables and of_tables != kept:
        tables = parameters.tables // degrees.tensor
        found = [replace(found[0], count=dense - tables), Share(tables, degrees.replicas, of_tables)]
    if parameters.experts:
        of_experts = _kept(account, replace(state, gathered=0.0), stage, False)
        number = parameters.experts_on(degrees)
        found.append(Share(number, degrees.expert_replicas, of_experts, is_expert=True))
    return tuple(found)


def passing_of(shares: Iterable[Share]) -> int:
    """Of the static memory of a layer, gradients that exist only while the backwards of its stage run."""
    return int(sum(each.count * each.kept.passing for each in shares))


def static_of(shares: Iterable[Share]) -> StaticBytes:
    """The static memory of a layer on one device, in whole bytes: a replica's share is rounded up.

    Shards are padded to one size.
    """
    kept = StaticBytes()
    for each in shares:
        kept += each.kept.of(each.count, each.replicas)
    return StaticBytes(*map(math.ceil, (kept.parameters, kept.gradients, kept.optimizer)))
