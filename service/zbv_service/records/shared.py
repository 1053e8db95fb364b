"""JSON documents that several resources share, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from zbv_solver.documents.fields import Number
from zbv_solver.problem.jitter import (
    LARGEST_QUANTILE,
    LEAST_QUANTILE,
    ActionsDocument,
    JitterDocument,
    SamplesDocument,
)
from zbv_solver.problem.problem import Objective

MAX_SEED = 2**31 - 1
MOST_SAMPLES = 20_000
"""Most samples of the options of a search: they are read, sent and stored with it."""


class RequestDocument(BaseModel):
    """Base of documents in requests, which must not have unknown keys."""

    model_config = ConfigDict(extra="forbid")


class Record(BaseModel):
    """Base of what the database returns and the API sends; fields with ``exclude`` are only for the service.

    The docstring of a field is its description in the API.
    """

    model_config = ConfigDict(frozen=True, serialize_by_alias=True, use_attribute_docstrings=True)

    def text(self) -> bytes:
        """The document as JSON."""
        return self.model_dump_json().encode()


def _require_few_samples(jitter: JitterDocument) -> JitterDocument:
    spreads: list[Any] = [jitter.transfer]
    spreads += (
        [*vars(jitter.action).values()] if isinstance(jitter.action, ActionsDocument) else [jitter.action]
    )
    spreads += jitter.rank if isinstance(jitter.rank, list) else [jitter.rank]
    found = sum(len(each.samples) for each in spreads if isinstance(each, SamplesDocument))
    if found > MOST_SAMPLES:
        raise ValueError(f"has {found} samples in all; this service takes at most {MOST_SAMPLES}")
    return jitter


class OptionsDocument(RequestDocument):
    """How hard to search. Equal options and seed give equal plans, unless a time limit cuts them off."""

    effort: Literal["quick", "standard", "thorough"] = "standard"
    time_limit: Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Seconds; null means that effort alone decides."
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=MAX_SEED)] = 0
    jitter: Annotated[JitterDocument, AfterValidator(_require_few_samples)] | None = Field(
        None,
        description="By how much durations vary. With it, the plan is chosen for its simulated time, and has "
        f"a `simulation`. At most {MOST_SAMPLES} samples in all. Lists of searches leave it out.",
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


def json_with(document: dict[str, Any], **texts: bytes | list[bytes]) -> bytes:
    """An object as compact UTF-8 JSON, in which some members are JSON texts, or lists of them, already.

    The order of the members is kept. They may be large, so all are copied once.
    """
    pieces: list[bytes] = []
    for name in document | texts:
        pieces += (b"," if pieces else b"{", json_bytes(name), b":")
        text = texts[name] if name in texts else json_bytes(document[name])
        if isinstance(text, bytes):
            pieces.append(text)
        else:
            pieces.append(b"[")
            for number, entry in enumerate(text):
                pieces += (b"," if number else b"", entry)
            pieces.append(b"]")
    return b"".join([*pieces, b"}" if pieces else b"{}"])
