"""Requests for runs: their documents, and the rules that pydantic does not know."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from zbv_solver.errors import InvalidInput, Issue

from zbv_service.documents.parsing import is_deep, parse_body
from zbv_service.documents.problems import QuestionDocument, new_search, pack
from zbv_service.records.run_options import MAX_INTEGER, ModelDocument, RunOptionsDocument, ScriptDocument
from zbv_service.records.searches import NewSearch, OptionsDocument
from zbv_service.records.shared import Name, RequestDocument
from zbv_service.settings import Settings

MAX_NODES = 4096
MAX_ARGUMENTS = 16 * 1024
"""Bytes of the arguments of a model or a script as JSON."""
MAX_LEVELS = 32
"""Most nested lists and objects in the arguments: pydantic cannot write more than about 250 levels."""

PlanId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class RunRequest(RequestDocument):
    """A plan to run, or a problem to search a plan for and run it: exactly one of the two.

    What runs is exactly one of ``model`` and ``script``.
    """

    name: Name = None
    plan_id: PlanId | None = None
    problem: QuestionDocument | None = None
    search_options: OptionsDocument | None = Field(
        None, description="Options of the search for the plan, and of searches for measured costs."
    )
    model: ModelDocument | None = Field(None, description="A model that zbv trains.")
    script: ScriptDocument | None = Field(
        None, description="A script that trains by itself; see the options that have an effect on it."
    )
    nodes: Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)] = Field(
        description="Number of agents; the ranks of all replicas are spread evenly over them."
    )
    steps: Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER)] | None = Field(
        None, description="Required with model; a script decides by itself when it ends."
    )
    options: RunOptionsDocument = RunOptionsDocument()


class PlanChange(RequestDocument):
    """The plan that a run should change to."""

    plan_id: PlanId


@dataclass(frozen=True)
class AskedRun:
    """A decoded request for a run."""

    request: RunRequest
    """The request without its problem and its options of searches, which may be large."""
    fingerprint: str
    """The fingerprint of the whole body."""
    pp_degree: int | None
    """The pipeline degree of the problem; None for a request with a plan."""
    search: NewSearch | None
    """The search of the problem; None for a request with a plan."""
    search_options: bytes | None
    """Options of searches, packed."""


def read_run(settings: Settings, body: Any) -> AskedRun:
    """Check a decoded body; raises :class:`InvalidInput`."""
    request = parse_body(RunRequest, body)
    if (request.plan_id is None) == (request.problem is None):
        found = "neither" if request.plan_id is None else "both"
        raise InvalidInput.at("/plan_id", f"found {found}; give exactly one of plan_id and problem.")
    if request.script is None:
        _check_model(request)
    else:
        _check_script(request, request.script)
    fingerprint, problem, options = hash_of(body), request.problem, request.search_options
    packed = None if options is None else pack(options.stored())
    brief = request.model_copy(update={"problem": None, "search_options": None})
    if problem is None:
        return AskedRun(brief, fingerprint, None, None, packed)
    search = {"problem": body["problem"], "options": body.get("search_options") or {}, "name": request.name}
    try:
        new = new_search(settings, search)
    except InvalidInput as error:
        raise InvalidInput([*map(_in_run, error.issues)], error.more, error.is_partial) from None
    return AskedRun(brief, fingerprint, problem.pp_degree, new, packed)


def hash_of(value: Any) -> str:
    """A hash of a JSON document that does not depend on the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_model(request: RunRequest) -> None:
    """Check a request without a script; raises :class:`InvalidInput`."""
    if request.model is None:
        raise InvalidInput.at("/model", "found neither; give exactly one of model and script.")
    if request.steps is None:
        raise InvalidInput.at("/steps", "found none; a run of a model needs its number of steps.")
    fault = _fault_of(request.model.arguments)
    if fault is not None:
        raise InvalidInput.at("/model/arguments", fault)


def _check_script(request: RunRequest, script: ScriptDocument) -> None:
    """Check a request with a script; raises :class:`InvalidInput`."""
    if request.model is not None:
        raise InvalidInput.at("/script", "found both; give exactly one of model and script.")
    if ".." in script.path.split("/"):
        raise InvalidInput.at("/script/path", "found '..'; give the path without it: agents compare it.")
    remedy = "has no effect on a script, which decides that by itself. Omit it, or pass it as an argument."
    if request.steps is not None:
        raise InvalidInput.at("/steps", f"found {request.steps}; it {remedy}")
    useless = request.options.of_training()
    if useless:
        raise InvalidInput([Issue(f"/options/{name}", f"{name} {remedy}") for name in useless])
    fault = _fault_of(script.arguments)
    if fault is not None:
        raise InvalidInput.at("/script/arguments", fault)


def _in_run(issue: Issue) -> Issue:
    """An issue in the body of a search, with its pointer in the body of the run."""
    if issue.pointer.startswith("/options"):
        return Issue("/search_options" + issue.pointer.removeprefix("/options"), issue.detail)
    return issue


def _fault_of(arguments: dict[str, Any] | list[str]) -> str | None:
    """Why the arguments of a model or a script cannot be sent to agents as JSON.

    For example, 1e999 was read as infinity. Every list of runs and the work of every agent contain the
    arguments, so their size and depth are limited.
    """
    if is_deep(arguments, MAX_LEVELS):
        return f"found more than {MAX_LEVELS} levels of lists and objects; send fewer."
    try:
        size = len(json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode())
    except ValueError:
        return "found a number too large for JSON."
    if size > MAX_ARGUMENTS:
        return f"found {size} bytes of JSON; must be at most {MAX_ARGUMENTS}. Read the rest from a file."
    return None
