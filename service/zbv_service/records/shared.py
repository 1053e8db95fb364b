"""JSON documents that several resources share, as pydantic models; they are named schemas of the API."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from zbv_solver.problem.problem import Objective

MAX_SEED = 2**31 - 1
MAX_NAME = 100
"""Most characters of the name of a search or run."""


def _require_printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("must be printable characters in one line")
    return name


Name = Annotated[
    Annotated[
        str,
        StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_NAME),
        AfterValidator(_require_printable),
    ]
    | None,
    Field(description="For lists and pages: a line of printable characters, without spaces around it."),
]


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


class ProblemSummary(BaseModel):
    """The few numbers that name a problem."""

    pp_degree: int
    microbatches: int
    placement: str
    objective: Objective
    time_unit: str | None = None
    layers: int | None = Field(None, description="Of a problem given by layers: how many, copies counted.")


NEXT = Field(None, description="Address of the page of older ones after this; null on the last.")


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
