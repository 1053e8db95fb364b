"""Reads, imports, draws and exports plans, and serves each rank its part."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from zbv_solver import __version__
from zbv_solver.errors import InvalidInput
from zbv_solver.plans.plan import Plan
from zbv_solver.plans.reading import parse_orders, parse_plan_document, to_plan
from zbv_solver.search.claims import Claim

from zbv_service.compute.computations import Computations
from zbv_service.compute.waiting import Cache
from zbv_service.database import PlanTable
from zbv_service.documents.parsing import parse_json
from zbv_service.documents.problems import pack_plan, require_size, unpack_text
from zbv_service.errors import INVALID_PARAMETER, NOT_FOUND, ApiError
from zbv_service.plans.documents import ClaimDocument, ImportedPlan, SimulationQuery
from zbv_service.plans.renderings import (
    PlanFacts,
    actions_of,
    export_of,
    facts_of,
    plan_of,
    ranks_of,
    simulation_of,
    thumbnail_of,
    view_of,
)
from zbv_service.records.lists import Page, PlanListQuery, Position
from zbv_service.records.plans import NewPlan, PlanSummaryDocument
from zbv_service.settings import Settings

if TYPE_CHECKING:
    from zbv_solver.export.report import PlanView

CACHED_PLANS = 16
CACHED_EXPORTS = 32
CACHED_BYTES = 64 * 1024**2
"""Largest size of each cache; the largest plan takes half of it."""
CACHED_THUMBNAILS = 256
CACHED_FACTS = 1024
T = TypeVar("T")
_ID = re.compile(r"[0-9a-z]{1,64}")


def rank_tag(plan_id: str, rank: int) -> str:
    """The ETag of a rank's part, which another version may write differently."""
    return f"{plan_id}-{rank}-{__version__}"


class Plans:
    """The plans of a service.

    Attributes
    ----------
    used
        Ids of plans fetched since the last sweep of the database, which records and removes them.
    """

    def __init__(self, table: PlanTable, settings: Settings, computations: Computations):
        self._table = table
        self._settings = settings
        self.used: set[str] = set()
        self._computations = computations
        self._texts: Cache[bytes] = Cache(CACHED_PLANS, CACHED_BYTES, len)
        self._plans: Cache[Plan] = Cache(CACHED_PLANS, CACHED_BYTES, _bytes_of)
        self._ranks: Cache[list[bytes]] = Cache(
            CACHED_PLANS, CACHED_BYTES, lambda ranks: sum(map(len, ranks))
        )
        self._facts: Cache[PlanFacts] = Cache(CACHED_FACTS)
        self._views: Cache[PlanView] = Cache(CACHED_PLANS)
        self._actions: Cache[bytes] = Cache(CACHED_PLANS, CACHED_BYTES, len)
        self._exports: Cache[bytes] = Cache(CACHED_EXPORTS, CACHED_BYTES, len)
        self._thumbnails: Cache[bytes] = Cache(CACHED_THUMBNAILS)
        self._simulations: Cache[bytes] = Cache(CACHED_THUMBNAILS)

    async def summary(self, plan_id: str) -> PlanSummaryDocument | None:
        """A plan without its actions; None if there is no such plan."""
        return await self._table.summary(plan_id)

    async def newest(self, limit: int) -> list[PlanSummaryDocument]:
        """The newest plans, newest first."""
        return await self._table.newest(limit)

    async def page(self, wanted: PlanListQuery, after: Position | None = None) -> Page[PlanSummaryDocument]:
        """One page of plans, newest first, starting at a position."""
        return await self._table.page(wanted, after)

    async def text(self, plan_id: str) -> bytes:
        """A plan's document as JSON text; raises :class:`ApiError` 404."""

        async def load() -> bytes:
            # In a thread, because decompression releases the GIL.
            return await asyncio.to_thread(unpack_text, await self.packed(plan_id))

        text = await self._texts.get(plan_id, load)
        self.used.add(plan_id)
        return text

    async def compute(self, function: Callable[[bytes], T], plan_id: str) -> T:
        """Apply a function to a packed plan in another process: see :class:`.Computations`.

        Raises
        ------
        ApiError
            404: there is no such plan. 503: too many computations are waiting.
        """
        return await self._computations.run(function, await self.packed(plan_id))

    async def packed(self, plan_id: str) -> bytes:
        """A plan's document, packed; raises :class:`ApiError` 404."""
        # Some texts are rejected by databases.
        packed = await self._table.document(plan_id) if _ID.fullmatch(plan_id) else None
        if packed is None:
            raise ApiError(NOT_FOUND, f"found no plan {plan_id[:64]!r}; GET /v1/plans lists them.")
        return packed

    async def plan(self, plan_id: str) -> Plan:
        """A plan; raises :class:`ApiError` 404."""
        plan = await self._plans.get(plan_id, partial(self.compute, plan_of, plan_id))
        self.used.add(plan_id)
        return plan

    async def facts(self, plan_id: str) -> PlanFacts:
        """The few values of a plan; raises :class:`ApiError` 404."""
        facts = await self._facts.get(plan_id, partial(self.compute, facts_of, plan_id))
        self.used.add(plan_id)
        return facts

    async def rank(self, plan_id: str, rank: int) -> bytes:
        """One rank's part of a plan, as JSON text; raises :class:`ApiError` 404."""
        ranks = await self._ranks.get(plan_id, partial(self.compute, ranks_of, plan_id))
        self.used.add(plan_id)
        if not 0 <= rank < len(ranks):
            raise ApiError(
                NOT_FOUND, f"found no rank {rank}; plan {plan_id} has ranks 0 to {len(ranks) - 1}."
            )
        return ranks[rank]

    def known_rank(self, plan_id: str, rank: int) -> bytes | None:
        """The cached text of a rank's part, None if it is not cached; never waits."""
        ranks = self._ranks.known(plan_id)
        if ranks is None or not 0 <= rank < len(ranks):
            return None
        self.used.add(plan_id)
        return ranks[rank]

    async def add(self, body: bytes | bytearray, caller: str | None = None) -> tuple[ImportedPlan, bool]:
        """Verify an imported plan, compute its metrics and store it; also returns whether it is new.

        Raises
        ------
        InvalidInput, InvalidPlan
            The plan is invalid; nothing was stored.
        ApiError
            400: the body is not JSON. 503: too many computations are waiting.
        """
        # Always in another process: even a small plan is compared with classical schedules.
        plan, claims = await self._computations.run(partial(import_text, self._settings.max_cells), body)
        summary = plan.summary
        answer = ImportedPlan(
            plan_id=summary.plan_id,
            objective=summary.value,
            lower_bound=summary.lower_bound,
            gap=summary.gap,
            claims=[ClaimDocument.of(claim) for claim in claims],
        )
        return answer, await self._table.add(plan, caller)

    async def view(self, plan_id: str) -> PlanView:
        """The content of a plan's page, without links; raises :class:`ApiError` 404."""
        return await self._views.get(plan_id, partial(self.compute, view_of, plan_id))

    async def simulation(self, plan_id: str, asked: SimulationQuery) -> bytes:
        """A plan when durations vary, as JSON text.

        Raises
        ------
        ApiError
            404: there is no such plan. 422: the jitter breaks a rule, or there are too many scenarios.
        """
        simulate = partial(simulation_of, asked)
        key = f"{plan_id} {asked.model_dump_json()}"
        try:
            return await self._simulations.get(key, partial(self.compute, simulate, plan_id))
        except InvalidInput as error:
            (issue,) = error.issues[:1]
            name = "scenarios" if issue.pointer == "/scenarios" else "jitter"
            place = "" if name == issue.pointer[1:] or not issue.pointer else f"{issue.pointer}: "
            detail = f"{place}{issue.detail}"
            raise ApiError(
                INVALID_PARAMETER, f"{name}: {detail}", [{"parameter": name, "detail": detail}]
            ) from None

    async def actions(self, plan_id: str) -> bytes:
        """A plan's actions for the script of its page; raises :class:`ApiError` 404."""
        return await self._actions.get(plan_id, partial(self.compute, actions_of, plan_id))

    async def thumbnail(self, plan_id: str) -> bytes:
        """A thumbnail of a plan as PNG; raises :class:`ApiError` 404."""
        return await self._thumbnails.get(plan_id, partial(self.compute, thumbnail_of, plan_id))

    async def export(self, plan_id: str, name: str) -> tuple[bytes, str, str]:
        """A plan in another format: its text, media type and file name; raises :class:`ApiError` 404."""
        # Imported here because formats need heavy packages.
        from zbv_solver.export import FORMATS

        target = FORMATS.get(name)
        if target is None:
            raise ApiError(NOT_FOUND, f"found no format {name!r}; there are {', '.join(sorted(FORMATS))}.")
        export = partial(export_of, name)
        text = await self._exports.get(f"{plan_id} {name}", partial(self.compute, export, plan_id))
        return text, target.media_type, f"plan-{plan_id[:12]}{target.suffix}"


def import_text(max_cells: int, text: bytes | bytearray) -> tuple[NewPlan, tuple[Claim, ...]]:
    """As :func:`import_plan` for JSON text; raises :class:`ApiError` 400 if it is not JSON."""
    return import_plan(parse_json(text), max_cells)


def import_plan(body: Any, max_cells: int) -> tuple[NewPlan, tuple[Claim, ...]]:
    """Verify an imported plan document; returns the plan to store and its claims."""
    from zbv_solver.search.assemble import compare, make_plan
    from zbv_solver.search.claims import check_plan

    document = parse_plan_document(body)
    require_size(parse_orders(document)[0], max_cells)
    checked = check_plan(body)
    problem, provenance = checked.problem, document.provenance
    plan = make_plan(
        problem,
        checked.orders,
        method=f"import: {provenance.method}",
        seed=provenance.seed,
        seconds=provenance.seconds,
    )
    is_simulated = any(claim.pointer == "/simulation" and claim.is_verified for claim in checked.claims)
    simulation = to_plan(document).simulation if is_simulated else None
    return pack_plan(replace(plan, baselines=compare(problem), simulation=simulation)), checked.claims


def _bytes_of(plan: Plan) -> int:
    """Approximate memory of a plan in bytes: 9 per action, and the costs of its stages."""
    return 9 * len(plan.orders) + 400 * plan.problem.n_stages
