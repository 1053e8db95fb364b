"""The shape of problem documents whose costs are given per stage (docs/formats.md).

Pydantic checks types and unknown keys. Rules between numbers are checked by
:class:`~zbv_solver.problem.problem.Problem` itself. The service uses these models as request bodies.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from zbv_solver.documents.fields import AtMost, Count, Document, Number
from zbv_solver.problem.limits import MAX_CELLS, MAX_CHUNKS, MAX_PP_DEGREE, MAX_STAGES
from zbv_solver.problem.placement import PlacementKind
from zbv_solver.problem.problem import Objective


def _number_or_list(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


NumberOrList = Annotated[
    Annotated[Number, Tag("number")] | Annotated[list[Number], AtMost(MAX_STAGES), Tag("list")],
    Discriminator(_number_or_list),
]
"""A scalar, one value per chunk, or one per stage."""


class CostsDocument(Document):
    """Durations in the caller's time unit: a scalar, one per chunk, or one per stage in model order."""

    forward: NumberOrList
    backward_input: NumberOrList
    backward_weight: NumberOrList
    backward: NumberOrList | None = Field(None, description="Fused backward; null means I + W.")
    p2p: NumberOrList = Field(0.0, description="Latency of a stage boundary: a scalar, or one per boundary.")


class MemoryDocument(Document):
    """Memory deltas (scalar, per chunk, or per stage); static use and limit (scalar or per rank)."""

    forward: NumberOrList
    backward_input: NumberOrList
    backward_weight: NumberOrList
    static: NumberOrList = 0.0
    limit: NumberOrList | None = Field(None, description="null means unlimited.")


class UnitsDocument(Document):
    """Names of units, for display only."""

    time: str | None = Field(None, max_length=32)
    memory: str | None = Field(None, max_length=32)


class ProblemDocument(Document):
    """A planning problem."""

    pp_degree: Annotated[int, Field(strict=True, ge=1, le=MAX_PP_DEGREE)]
    microbatches: Annotated[int, Field(strict=True, ge=1, le=MAX_CELLS)]
    placement: PlacementKind = "v"
    chunks: Count | None = Field(None, le=MAX_CHUNKS, description="Stages per rank; only for placement loop.")
    objective: Objective = "span"
    costs: CostsDocument
    memory: MemoryDocument | None = None
    units: UnitsDocument | None = None
