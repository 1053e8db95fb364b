"""The trace that every rank of a run writes.

A trace holds the latest steps with one plan. Per action it has the times when the rank began to wait for the
input, when the input had arrived, and when the action ended (docs/formats.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from zbv_solver.documents.fields import AtMost
from zbv_solver.documents.validation import validated
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.orders import Orders
from zbv_solver.problem.limits import MAX_ACTIONS

Nanoseconds = Annotated[int, Field(strict=True, ge=-(2**62), le=2**62)]
Index = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Bytes = Annotated[int, Field(strict=True, ge=0, le=2**62)]
Record = tuple[str, Nanoseconds, Nanoseconds, Nanoseconds, Bytes]
"""Action, wait, start, end, bytes received from another rank."""

MAX_STEPS = 1000

WAIT, START, END = range(3)
"""Columns of :attr:`StepTrace.times`."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="allow")


class StepTraceDocument(_Document):
    """One step of one rank."""

    step: Index
    loss: float | None = Field(None, description="On ranks that have the last stage.")
    seconds: Annotated[float, Field(ge=0)]
    actions: Annotated[list[Record], AtMost(MAX_ACTIONS)] = Field(
        description="In execution order: the action, when the rank began to wait for its input, when the "
        "input had arrived, when the action ended (nanoseconds of the rank's clock), and the bytes received."
    )


class RankTraceDocument(_Document):
    """The measurements of one rank in the latest steps with one plan."""

    rank: Index
    pp_rank: Index = Field(description="Its rank in the pipeline.")
    replica: Index = 0
    plan_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    clock_offset_ns: Nanoseconds = Field(0, description="How far its clock is ahead of rank 0's.")
    uncertainty_ns: Nanoseconds = Field(0, description="The offset is wrong by at most this.")
    steps: Annotated[list[StepTraceDocument], AtMost(MAX_STEPS)]


@dataclass(frozen=True, eq=False)
class StepTrace:
    """One step of one rank, n actions.

    Attributes
    ----------
    orders
        The rank's actions in execution order, as the orders of one rank.
    times
        (n, 3) int64, nanoseconds of rank 0's clock: wait, start, end.
    received
        (n,) int64: bytes that came from another rank.
    """

    step: int
    loss: float | None
    orders: Orders
    times: NDArray[np.int64]
    received: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RankTrace:
    """The measurements of one rank; ``steps`` ascend. ``uncertainty`` of its times is in nanoseconds."""

    rank: int
    pp_rank: int
    replica: int
    plan_id: str
    uncertainty: int
    steps: tuple[StepTrace, ...]

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the steps."""
        return frozenset(step.step for step in self.steps)

    def only(self, numbers: frozenset[int]) -> RankTrace:
        """The same trace with only these steps."""
        return replace(self, steps=tuple(step for step in self.steps if step.step in numbers))


def parse_rank_trace(document: Any) -> RankTrace:
    """Parse a decoded trace; its times are converted to rank 0's clock.

    Raises
    ------
    InvalidInput
        When the document does not have the shape of a trace, or its steps do not ascend.
    """
    parsed = validated(RankTraceDocument, document)
    steps = tuple(_step(index, step, parsed.clock_offset_ns) for index, step in enumerate(parsed.steps))
    for index, (before, step) in enumerate(pairwise(steps), start=1):
        if step.step <= before.step:
            found = f"found {step.step} after {before.step}; must ascend."
            raise InvalidInput.at(f"/steps/{index}/step", found)
    return RankTrace(
        parsed.rank, parsed.pp_rank, parsed.replica, parsed.plan_id, parsed.uncertainty_ns, steps
    )


def _step(index: int, document: StepTraceDocument, ahead: int) -> StepTrace:
    try:
        orders = Orders.from_text([[record[0] for record in document.actions]])
    except InvalidInput as error:
        (issue,) = error.issues
        action = issue.pointer.rpartition("/")[2]
        raise InvalidInput.at(f"/steps/{index}/actions/{action}/0", issue.detail) from None
    numbers = np.array([record[1:] for record in document.actions], dtype=np.int64).reshape(-1, 4)
    times = numbers[:, :3] - ahead
    descends = (np.diff(times, axis=1) < 0).any(axis=1)
    if descends.any():
        at = f"/steps/{index}/actions/{int(np.argmax(descends))}"
        raise InvalidInput.at(at, "its times do not ascend; must be wait, start, end in nanoseconds.")
    return StepTrace(document.step, document.loss, orders, times, numbers[:, 3])
