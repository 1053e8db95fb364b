"""JSON at the edge: problem documents in and out (see docs/formats.md).

Pydantic checks types and unknown keys here; the rules between numbers are the
:class:`~zbv_solver.problem.problem.Problem`'s own. The same models are the request bodies of the service.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from zbv_solver.errors import MOST_ISSUES, InvalidInput, Issue
from zbv_solver.problem.placement import Placement, PlacementKind
from zbv_solver.problem.problem import MAX_CELLS, MAX_PP_DEGREE, Costs, Memory, Objective, Problem, Units

MAX_CHUNKS = 64
MAX_STAGES = MAX_PP_DEGREE * MAX_CHUNKS
MAX_ACTIONS = 6 * MAX_CELLS
"""Of a plan: F, I and W of at most twice ``MAX_CELLS`` stages times microbatches."""
MAX_NAME = 200
MAX_TEXT = 2000
MOST_UNKNOWN_KEYS = MOST_ISSUES
BATCH = 1000
"""Entries of a list that are checked together. The first batch with a mistake is the last one checked."""
_SHOWN = 60


class _Text(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to print an integer of thousands of digits."""
        try:
            return super().repr_int(x, level)
        except ValueError:
            return "a number too long to print"


_TEXT = _Text()
_TEXT.maxlevel, _TEXT.maxlist, _TEXT.maxdict, _TEXT.maxtuple = 3, 20, 20, 20
_TEXT.maxstring = _TEXT.maxother = _TEXT.maxlong = 2 * _SHOWN


@dataclass(frozen=True)
class AtMost:
    """Annotates a list that has at most so many entries.

    Pydantic checks every entry of a list before it looks at the length, and keeps every mistake. Here the
    length comes first, and checking stops after the batch with the first mistake: what a wrong document costs
    does not grow with the number of its mistakes.
    """

    length: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "maxItems": self.length}

    def _check(self, values: Any, check: Callable[[Any], Any]) -> Any:
        if not isinstance(values, list):
            return check(values)
        if len(values) > self.length:
            raise PydanticCustomError(
                TOO_MANY,
                "found {found} entries; must be at most {most}",
                {"found": len(values), "most": self.length},
            )
        checked: list[Any] = []
        for first in range(0, max(1, len(values)), BATCH):
            try:
                checked += check(values[first : first + BATCH])
            except ValidationError:
                return check(values[: first + BATCH])  # raises once more, with places in the whole list
        return checked


TOO_MANY = "too_many"
"""Pydantic's type of the errors that say a number of their own, and not the value that was found."""

Number = Annotated[float, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]


def _number_or_list(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "number"


NumberOrList = Annotated[
    Annotated[Number, Tag("number")] | Annotated[list[Number], AtMost(MAX_STAGES), Tag("list")],
    Discriminator(_number_or_list),
]
"""A scalar, one value per chunk, or one per stage."""


_MOST_DIGITS = 100
"""An integer with more digits is read as a float: none is valid anywhere."""


class Document(BaseModel):
    """A JSON object without unknown keys."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown_keys(cls, value: Any) -> Any:
        # Every unknown key is a mistake of its own, and pydantic would keep them all.
        if isinstance(value, dict) and len(value) > len(cls.model_fields) + MOST_UNKNOWN_KEYS:
            raise PydanticCustomError(
                TOO_MANY,
                "found {found} keys; this object has at most {most}, and no others are allowed",
                {"found": len(value), "most": len(cls.model_fields)},
            )
        return value


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


def parse_problem(document: Any) -> Problem:
    """A decoded JSON document as a problem.

    Raises
    ------
    InvalidInput
        With one issue per broken rule, pointing into the document; also where it gives layers that are not
        cut into stages yet.
    """
    if isinstance(document, dict) and "layers" in document:
        # Layers are documents of their own, built on these.
        from zbv_solver.problem.layered_document import parse_layered
        from zbv_solver.problem.reading import to_cut_problem

        return to_cut_problem(parse_layered(document))
    try:
        parsed = ProblemDocument.model_validate(document)
    except ValidationError as error:
        raise refusal(error, document) from None
    return to_problem(parsed)


def to_problem(document: ProblemDocument) -> Problem:
    """A parsed document as a problem: every value expanded to one per stage, boundary or rank."""
    placement = _placement(document)
    # Checked before expanding: a document of a few bytes must not allocate millions of values.
    costs, memory = document.costs, document.memory
    per_stage = _Expander(placement, placement.n_stages, "stage", chunks=True)
    per_boundary = _Expander(placement, placement.n_stages - 1, "stage boundary")
    per_rank = _Expander(placement, placement.pp_degree, "rank")
    parsed_costs = Costs(
        forward=per_stage("/costs/forward", costs.forward),
        backward_input=per_stage("/costs/backward_input", costs.backward_input),
        backward_weight=per_stage("/costs/backward_weight", costs.backward_weight),
        backward=None if costs.backward is None else per_stage("/costs/backward", costs.backward),
        p2p=per_boundary("/costs/p2p", costs.p2p),
    )
    parsed_memory = Memory.unlimited(placement)
    if memory is not None:
        parsed_memory = Memory(
            forward=per_stage("/memory/forward", memory.forward),
            backward_input=per_stage("/memory/backward_input", memory.backward_input),
            backward_weight=per_stage("/memory/backward_weight", memory.backward_weight),
            static=per_rank("/memory/static", memory.static),
            limit=None if memory.limit is None else per_rank("/memory/limit", memory.limit),
        )
    units = document.units or UnitsDocument(time=None, memory=None)
    issues = per_stage.issues + per_boundary.issues + per_rank.issues
    if issues:
        raise InvalidInput(issues)
    return Problem(
        placement=placement,
        microbatches=document.microbatches,
        costs=parsed_costs,
        memory=parsed_memory,
        objective=document.objective,
        units=Units(units.time, units.memory),
    )


def problem_json(problem: Problem) -> dict[str, Any]:
    """The problem normalised: every key present, every value one per stage, boundary or rank."""
    costs, memory, units = problem.costs, problem.memory, problem.units
    document: dict[str, Any] = {
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": problem.placement.kind,
        "objective": problem.objective,
        "costs": {
            "forward": numbers(costs.forward),
            "backward_input": numbers(costs.backward_input),
            "backward_weight": numbers(costs.backward_weight),
            "backward": None if costs.backward is None else numbers(costs.backward),
            "p2p": numbers(costs.p2p),
        },
        "memory": {
            "forward": numbers(memory.forward),
            "backward_input": numbers(memory.backward_input),
            "backward_weight": numbers(memory.backward_weight),
            "static": numbers(memory.static),
            "limit": None if memory.limit is None else numbers(memory.limit),
        },
    }
    if problem.placement.kind == "loop":
        document["chunks"] = problem.placement.chunks
    if problem.model is not None:
        from zbv_solver.problem.writing import cut_model_json, link_json

        document |= cut_model_json(problem.model)
        document["memory"]["static_beside_layers"] = numbers(problem.model.static)
        if problem.model.link is not None:
            document["costs"]["link"] = link_json(problem.model.link)
    return {**document, **units_json(units)}


def units_json(units: Units) -> dict[str, Any]:
    """Named units as the key ``units``; nothing where none is named."""
    named = {"time": units.time, "memory": units.memory}
    given = {key: value for key, value in named.items() if value is not None}
    return {"units": given} if any(given.values()) else {}


def canonical_json(document: Any) -> str:
    """The one text of a JSON document that hashes are taken of: sorted keys, no white space, UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decode_json(text: str) -> Any:
    """A JSON text as Python objects.

    A number that no float holds becomes inf, also where it is an integer of thousands of digits, which Python
    refuses to read. So whoever checks the document can say which number it is.

    Raises
    ------
    json.JSONDecodeError
        Where the text is no JSON.
    """
    return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def number(value: float) -> float | int:
    """A float as JSON writes it shortest: whole numbers without a fraction."""
    return int(value) if value == int(value) else value


def numbers(values: Sequence[float]) -> list[float | int]:
    """:func:`number` over a sequence."""
    return [number(value) for value in values]


def refusal(error: ValidationError, document: Any) -> InvalidInput:
    """Pydantic's findings as an error whose pointers name keys that a user wrote, not our types."""
    entries = error.errors(include_url=False, include_context=False)
    is_partial = any(_is_in_long_list(entry["loc"], document) for entry in entries)
    issues = []
    for entry in entries[:MOST_ISSUES]:
        path = _document_path(entry["loc"], entry["type"], document)
        pointer = "".join(f"/{_key(key).replace('~', '~0').replace('/', '~1')}" for key in path)
        says_all = entry["type"] in ("missing", "extra_forbidden", TOO_MANY)
        found = "" if says_all else f"found {shown(entry['input'])}; "
        rule = {
            "missing": "this key is required and absent.",
            "extra_forbidden": "unknown key; remove it or correct its spelling.",
            "model_type": "must be a JSON object.",
        }.get(entry["type"], entry["msg"][0].lower() + entry["msg"][1:] + ".")
        issues.append(Issue(pointer, found + rule))
    return InvalidInput(issues, len(entries) - len(issues), is_partial)


def shown(value: Any) -> str:
    """A value of a document as a message quotes it: its beginning, whatever its size."""
    text = _TEXT.repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _is_in_long_list(loc: tuple[int | str, ...], document: Any) -> bool:
    """Whether a mistake lies in a list of which only a part was checked."""
    current = document
    for key in loc:
        if isinstance(current, dict) and key in current:
            current = current[key]
        elif isinstance(current, list) and isinstance(key, int) and key < len(current):
            if len(current) > BATCH:
                return True
            current = current[key]
    return False


def _key(key: int | str) -> str:
    """A key in a pointer; of one that is too long to be a name of ours, its beginning."""
    text = str(key)
    return text if len(text) <= MAX_NAME else text[:MAX_NAME] + "..."


def _document_path(loc: tuple[int | str, ...], kind: str, document: Any) -> list[int | str]:
    """Drop the parts of a location that pydantic adds for unions and tags."""
    path: list[int | str] = []
    current = document
    for position, key in enumerate(loc):
        is_last = position == len(loc) - 1
        if isinstance(current, dict) and (key in current or (is_last and kind == "missing")):
            current = current.get(key)
        elif isinstance(current, list) and isinstance(key, int) and key < len(current):
            current = current[key]
        else:
            continue
        path.append(key)
    return path


def require_possible_chunks(placement: str, chunks: int | None) -> None:
    """Raise :class:`InvalidInput` where a placement has another number of stages per rank than is stated."""
    expected = {"v": 2, "single": 1}.get(placement)
    if chunks is not None and expected is not None and chunks != expected:
        raise InvalidInput.at(
            "/chunks",
            f"found {chunks}; placement {placement} has {expected} per rank. "
            f"Leave it out, or use placement loop.",
        )


def _placement(document: ProblemDocument) -> Placement:
    require_possible_chunks(document.placement, document.chunks)
    placement = Placement.of(document.placement, document.pp_degree, document.chunks)
    if placement.n_stages * document.microbatches > 2 * MAX_CELLS:
        raise InvalidInput.at(
            "/microbatches",
            f"found {placement.n_stages} stages times {document.microbatches} microbatches; their product "
            f"must be at most {2 * MAX_CELLS}. Plan fewer microbatches: the steady state repeats.",
        )
    return placement


class _Expander:
    """Expands scalars, per-chunk pairs and full lists to one value per thing; collects wrong lengths."""

    def __init__(self, placement: Placement, length: int, thing: str, *, chunks: bool = False):
        self.placement = placement
        self.length = length
        self.thing = thing
        self.chunks = placement.chunks if chunks else None
        self.issues: list[Issue] = []

    def __call__(self, pointer: str, values: float | list[float]) -> tuple[float, ...]:
        if not isinstance(values, list):
            return (float(values),) * self.length
        if len(values) == self.length:
            return tuple(map(float, values))
        if self.chunks is not None and len(values) == self.chunks:
            return tuple(float(values[chunk]) for chunk in self.placement.chunk_of)
        per_chunk = f", {self.chunks} values (one per chunk)" if self.chunks is not None else ""
        self.issues.append(
            Issue(
                pointer,
                f"found {len(values)} values; must be a number{per_chunk} or {self.length} values "
                f"(one per {self.thing}).",
            )
        )
        return (0.0,) * self.length
