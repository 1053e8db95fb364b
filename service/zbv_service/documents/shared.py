"""JSON documents that several resources share, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from zbv_solver.documents.fields import Number
from zbv_solver.jitter.reading import JitterDocument
from zbv_solver.problem.problem import Objective
from zbv_solver.search.options import LARGEST_QUANTILE, LEAST_QUANTILE

MAX_SEED = 2**31 - 1


class RequestDocument(BaseModel):
    """Base of documents in requests, which must not have unknown keys."""

    model_config = ConfigDict(extra="forbid")


class OptionsDocument(RequestDocument):
    """How hard to search. Equal options and seed give equal plans, unless a time limit cuts them off."""

    effort: Literal["quick", "standard", "thorough"] = "standard"
    time_limit: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds; null means that effort alone decides."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0
    jitter: JitterDocument | None = Field(
        None,
        description="By how much durations vary. With it, the plan is chosen for its simulated time, and has "
        "a `simulation`.",
    )
    quantile: Annotated[Number, Field(ge=LEAST_QUANTILE, le=LARGEST_QUANTILE)] | None = Field(
        None,
        description="With jitter, the quantile of the simulated times to choose for; null is their mean.",
    )

    def stored(self) -> dict[str, Any]:
        """The options as they are stored and hashed: jitter and quantile only if they are given."""
        absent = {name for name in ("jitter", "quantile") if getattr(self, name) is None}
        return self.model_dump(exclude=absent)


class ProblemSummary(BaseModel):
    """The few numbers that name a problem."""

    pp_degree: int
    microbatches: int
    placement: str
    objective: Objective
    time_unit: str | None = None
    layers: int | None = Field(None, description="Of a problem given by layers: how many, copies counted.")


NEXT = Field(None, description="Address of the page of older ones after this; null on the last.")
PREVIOUS = Field(None, description="Address of the page of newer ones before this; null on the first.")


def json_bytes(document: Any) -> bytes:
    """A document as compact UTF-8 JSON."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
