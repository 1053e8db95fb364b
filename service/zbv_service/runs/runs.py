"""Accepts, reads, cancels and changes runs. The dispatcher assigns their agents."""

from __future__ import annotations

import hashlib
import json
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from zbv_solver.errors import InvalidInput, Issue

from zbv_service.compute.computations import Computations
from zbv_service.database import KeyReused, PlanTable, RunPlanTable, RunTable, SearchGone
from zbv_service.documents.packing import pack
from zbv_service.documents.parsing import is_deep, parse_body
from zbv_service.errors import IDEMPOTENCY_KEY_REUSED, NOT_FOUND, RUN_STATE, ApiError
from zbv_service.plans.plans import Plans
from zbv_service.records.runs import EventRecord, NewRun, RequestKey, RunFilter, RunRecord
from zbv_service.records.searches import NewSearch, Page, Position
from zbv_service.runs.dispatch import Dispatcher
from zbv_service.runs.documents import RunRequest, ScriptDocument
from zbv_service.searches.searches import Searches, new_search
from zbv_service.settings import Settings

MAX_ARGUMENTS = 16 * 1024
"""Bytes of the arguments of a model or a script as JSON."""
MAX_LEVELS = 32
"""Most nested lists and objects in the arguments: pydantic cannot write more than about 250 levels."""


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


class Runs:
    """The runs of a service."""

    def __init__(
        self,
        runs: RunTable,
        run_plans: RunPlanTable,
        plan_table: PlanTable,
        plans: Plans,
        searches: Searches,
        dispatcher: Dispatcher,
        computations: Computations,
        settings: Settings,
    ):
        self._runs = runs
        self._run_plans = run_plans
        self._plan_table = plan_table
        self._plans = plans
        self._searches = searches
        self._dispatcher = dispatcher
        self._computations = computations
        self._settings = settings

    async def submit(
        self,
        body: bytes | bytearray,
        *,
        key: tuple[str, str] | None = None,
        caller: str | None = None,
        most: int | None = None,
    ) -> RunRecord:
        """Accept the run of a request body, or return the run that this request created before.

        Parameters
        ----------
        body
            JSON text.
        key
            Names the request: the caller's name and its Idempotency-Key.
        caller
            The name of the caller.
        most
            The caller's limit of unfinished searches; None for no limit.

        Raises
        ------
        InvalidInput
            The body breaks a rule.
        ApiError
            422: the key belongs to another body. 429: a search is needed and the caller has too many.
        """
        asked = await self._computations.of_body(partial(read_run, self._settings), body)
        named = None if key is None else RequestKey(_hash(key), asked.fingerprint)
        try:
            # A repeated request gets its run, even if the plan was removed since.
            known = None if named is None else await self._runs.of_request(named)
            return known or await self._add(asked, named, caller, most)
        except KeyReused:
            raise ApiError(
                IDEMPOTENCY_KEY_REUSED,
                "This Idempotency-Key came with another body before; a new request needs a new key.",
            ) from None

    async def _add(
        self, asked: AskedRun, named: RequestKey | None, caller: str | None, most: int | None
    ) -> RunRecord:
        request = asked.request
        new = NewRun(
            id=uuid.uuid4().hex,
            plan_id=request.plan_id,
            search_id=None,
            search_options=asked.search_options,
            model=None if request.model is None else request.model.model_dump(),
            script=None if request.script is None else request.script.model_dump(),
            nodes=request.nodes,
            ranks_per_node=_ranks_per_node(request, await self._pp_degree(asked)),
            steps=request.steps,
            options=request.options.model_dump(),
            created_at=datetime.now(UTC),
            created_by=caller,
        )
        if asked.search is None:
            record = await self._runs.add(new, named)
        else:
            record = await self._add_with_search(new, named, asked.search, most)
        self._dispatcher.wake()
        return record

    async def _add_with_search(
        self, new: NewRun, named: RequestKey | None, wanted: NewSearch, most: int | None
    ) -> RunRecord:
        while True:
            search = await self._searches.submit_for_run(wanted, caller=new.created_by, most=most)
            with suppress(SearchGone):  # it was shared, and removed or cancelled just now; submit another
                return await self._runs.add(replace(new, search_id=search.id), named)

    async def get(self, run_id: str) -> RunRecord:
        """A run; raises :class:`ApiError` 404."""
        return _found(await self._runs.get(run_id), run_id)

    async def brief(self, run_id: str) -> RunRecord:
        """A run without its nodes; raises :class:`ApiError` 404."""
        return _found(await self._runs.brief(run_id), run_id)

    async def page(self, wanted: RunFilter, limit: int, after: Position | None = None) -> Page[RunRecord]:
        """One page of runs, newest first, starting at a position."""
        return await self._runs.page(wanted, limit, after)

    async def events(self, run_id: str, after: int, limit: int) -> list[EventRecord]:
        """The events of a run after a given event; raises :class:`ApiError` 404."""
        await self.brief(run_id)
        return await self._runs.events(run_id, after, limit)

    async def newest_events(self, run_id: str, limit: int) -> list[EventRecord]:
        """The newest events of a run, newest first; raises :class:`ApiError` 404."""
        await self.brief(run_id)
        return await self._runs.newest_events(run_id, limit)

    async def cancel(self, run_id: str) -> RunRecord:
        """Stop a run on all its nodes; a run that has ended does not change.

        The search for its plan is cancelled too, unless others use it.
        """
        record = _found(await self._runs.request_cancel(run_id), run_id)
        if record.state == "cancelled" and record.plan_id is None and record.search_id is not None:
            await self._searches.cancel_unwanted(record.search_id)
        return record

    async def change_plan(self, run_id: str, wanted: str) -> RunRecord:
        """Change a run to another plan of the same shape.

        Raises
        ------
        InvalidInput
            The plan does not exist, or its stages or microbatches differ from the run's.
        ApiError
            404: the run is unknown. 409: it has ended, has no plan yet, or runs a script.
        """
        record = await self.brief(run_id)
        if record.script is not None:
            raise ApiError(
                RUN_STATE,
                f"run {run_id} runs a script, which keeps its plan. Cancel it, and start a run of the other "
                f"plan.",
            )
        if record.plan_id is not None:
            await self._require_same_shape(record.plan_id, wanted)
        if not await self._run_plans.change(run_id, wanted):
            state = (await self.brief(run_id)).state
            raise ApiError(
                RUN_STATE, f"run {run_id} is {state}; only a run that has a plan and has not ended can."
            )
        return await self.get(run_id)

    async def _pp_degree(self, asked: AskedRun) -> int:
        if asked.pp_degree is not None:
            return asked.pp_degree
        plan_id = asked.request.plan_id or ""
        found = await self._plan_table.pp_degree(plan_id)
        if found is None:
            raise InvalidInput.at(
                "/plan_id", f"found no plan {plan_id}; search one, or import it with POST /v1/plans."
            )
        return found

    async def _require_same_shape(self, plan_id: str, wanted: str) -> None:
        if await self._plan_table.pp_degree(wanted) is None:
            raise InvalidInput.at("/plan_id", f"found no plan {wanted}; search one, or import it.")
        current, found = await self._plans.facts(plan_id), await self._plans.facts(wanted)
        if current.shape != found.shape:
            raise InvalidInput.at(
                "/plan_id",
                f"found a plan with {found.shape}; the run has {current.shape}. A run keeps its ranks, "
                f"placement and microbatches.",
            )
        if current.cut != found.cut:
            raise InvalidInput.at(
                "/plan_id",
                "found a plan that partitions the model differently; a run keeps the layers of every stage. "
                "Start a new run of that plan from a checkpoint of this one.",
            )


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
    fingerprint, problem, options = _hash(body), request.problem, request.search_options
    packed = None if options is None else pack(options.stored())
    brief = request.model_copy(update={"problem": None, "search_options": None})
    if problem is None:
        return AskedRun(brief, fingerprint, None, None, packed)
    search = {"problem": body["problem"], "options": body.get("search_options") or {}}
    try:
        new = new_search(settings, search)
    except InvalidInput as error:
        raise InvalidInput([*map(_in_run, error.issues)], error.more, error.is_partial) from None
    return AskedRun(brief, fingerprint, problem.pp_degree, new, packed)


def _hash(value: Any) -> str:
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


def _ranks_per_node(request: RunRequest, pp_degree: int) -> int:
    """Ranks per node; raises :class:`InvalidInput` if the nodes cannot have equal numbers."""
    replicas = request.options.data_parallel
    ranks = pp_degree * replicas
    if ranks % request.nodes:
        raise InvalidInput.at(
            "/nodes",
            f"found {request.nodes}; {pp_degree} ranks of a pipeline times {replicas} replicas must be "
            f"divided evenly among the nodes. Choose a divisor of {ranks}.",
        )
    return ranks // request.nodes


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


def _found(record: RunRecord | None, run_id: str) -> RunRecord:
    if record is None:
        raise ApiError(NOT_FOUND, f"found no run {run_id}; GET /v1/runs lists them.")
    return record
