"""Reading, importing and exporting plans, and what each rank of one is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zbv_solver import __version__
from zbv_solver.channels import Channel, channels
from zbv_solver.plan import Plan, parse_orders, parse_plan, parse_plan_document
from zbv_solver.problem import Problem
from zbv_solver.schema import canonical_json

from zbv_service.cache import Cache
from zbv_service.database import PlanTable
from zbv_service.http.caching import REVALIDATED
from zbv_service.http.problems import NOT_FOUND, ProblemError
from zbv_service.packing import pack_plan, unpack_text
from zbv_service.questions import require_size
from zbv_service.records import NewPlan, Page, PlanFilter, PlanSummary, Position
from zbv_service.settings import Settings

CACHED_PLANS = 16
CACHED_THUMBNAILS = 256
_ID = re.compile(r"[0-9a-z]{1,64}")


@dataclass(frozen=True)
class RankAnswer:
    """The whole answer to a fetch of a rank's part, made once: this version always gives the same."""

    body: bytes
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def of(cls, plan_id: str, rank: int, body: bytes) -> RankAnswer:
        """The answer for a rank."""
        fields = {
            "content-length": str(len(body)),
            "content-type": "application/json",
            "etag": f'"{rank_tag(plan_id, rank)}"',
            "cache-control": REVALIDATED,
        }
        return cls(body, [(name.encode(), value.encode()) for name, value in fields.items()])

    def is_conditional(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether a request asks for more than the answer as it is."""
        return any(name == b"if-none-match" for name, _ in headers)


def rank_tag(plan_id: str, rank: int) -> str:
    """What names a rank's part: another version may say it in other words."""
    return f"{plan_id}-{rank}-{__version__}"


class Plans:
    """The plans of a service.

    Attributes
    ----------
    used
        Ids of plans that were fetched; who notes that in the database takes them out.
    """

    def __init__(self, table: PlanTable, settings: Settings):
        self._table = table
        self._settings = settings
        self.used: set[str] = set()
        self._texts: Cache[bytes] = Cache(CACHED_PLANS)
        self._plans: Cache[Plan] = Cache(CACHED_PLANS)
        self._ranks: Cache[list[RankAnswer]] = Cache(CACHED_PLANS)
        self._thumbnails: Cache[bytes] = Cache(CACHED_THUMBNAILS)
        self._drawing = asyncio.Semaphore(1)  # a list asks for many at once, and each takes a core

    async def newest(self, limit: int) -> list[PlanSummary]:
        """The newest plans first."""
        return await self._table.newest(limit)

    async def page(self, wanted: PlanFilter, limit: int, after: Position | None) -> Page[PlanSummary]:
        """Some plans, the newest first, from a position on."""
        return await self._table.page(wanted, limit, after)

    async def text(self, plan_id: str) -> bytes:
        """A plan's document as JSON text; raises :class:`ProblemError` 404."""

        async def load() -> bytes:
            # Not every text is one that a database takes.
            packed = await self._table.document(plan_id) if _ID.fullmatch(plan_id) else None
            if packed is None:
                raise ProblemError(NOT_FOUND, f"found no plan {plan_id[:64]!r}; GET /v1/plans lists them.")
            return await asyncio.to_thread(unpack_text, packed)

        text = await self._texts.get(plan_id, load)
        self.used.add(plan_id)
        return text

    async def plan(self, plan_id: str) -> Plan:
        """A plan; raises :class:`ProblemError` 404."""

        async def load() -> Plan:
            text = await self.text(plan_id)
            return await asyncio.to_thread(lambda: parse_plan(json.loads(text)))

        plan = await self._plans.get(plan_id, load)
        self.used.add(plan_id)
        return plan

    async def rank(self, plan_id: str, rank: int) -> bytes:
        """What one rank executes, as JSON text; raises :class:`ProblemError` 404."""

        async def load() -> list[RankAnswer]:
            plan = await self.plan(plan_id)
            texts = await asyncio.to_thread(rank_texts, plan)
            return [RankAnswer.of(plan_id, number, text) for number, text in enumerate(texts)]

        answers = await self._ranks.get(plan_id, load)
        self.used.add(plan_id)
        if not 0 <= rank < len(answers):
            raise ProblemError(
                NOT_FOUND, f"found no rank {rank}; plan {plan_id} has ranks 0 to {len(answers) - 1}."
            )
        return answers[rank].body

    def known_rank(self, plan_id: str, rank: int) -> RankAnswer | None:
        """The answer for a rank, where it is in memory; nothing is waited for."""
        answers = self._ranks.known(plan_id)
        if answers is None or not 0 <= rank < len(answers):
            return None
        self.used.add(plan_id)
        return answers[rank]

    async def add(self, body: Any) -> tuple[PlanSummary, bool]:
        """Verify a plan made elsewhere, compute its metrics and store it; and whether it is new.

        Raises
        ------
        InvalidInput, InvalidPlan
            When the plan is wrong; nothing is stored then.
        """
        plan = await asyncio.to_thread(import_plan, body, self._settings.max_cells)
        return plan.summary, await self._table.add(plan)

    async def thumbnail(self, plan_id: str) -> bytes:
        """A plan at a glance, as PNG; raises :class:`ProblemError` 404."""

        async def draw() -> bytes:
            # Imported here: Pillow and what draws are only needed for this.
            from zbv_solver.export.thumbnail import thumbnail

            async with self._drawing:
                plan = await self.plan(plan_id)
                return await asyncio.to_thread(thumbnail, plan)

        return await self._thumbnails.get(plan_id, draw)

    async def export(self, plan_id: str, name: str) -> tuple[str, str, str]:
        """A plan in another format: its text, media type and file name; raises :class:`ProblemError` 404."""
        # Imported here: formats bring their own heavy packages.
        from zbv_solver.export import FORMATS

        target = FORMATS.get(name)
        if target is None:
            raise ProblemError(
                NOT_FOUND, f"found no format {name!r}; there are {', '.join(sorted(FORMATS))}."
            )
        plan = await self.plan(plan_id)
        text = await asyncio.to_thread(target.render, plan)
        return text, target.media_type, f"plan-{plan_id[:12]}{target.suffix}"


def import_plan(body: Any, max_cells: int) -> NewPlan:
    """Verify a plan document made elsewhere; what it states of itself is checked, and then computed anew."""
    from zbv_solver.search import compare, make_plan
    from zbv_solver.verify import verify

    document = parse_plan_document(body)
    problem, orders = parse_orders(document)
    require_size(problem, max_cells)
    if document.metrics is not None:
        verify(parse_plan(body))
    provenance = document.provenance
    plan = make_plan(
        problem,
        orders,
        method=f"import: {provenance.method}",
        seed=provenance.seed,
        seconds=provenance.seconds,
    )
    return pack_plan(plan.with_baselines(compare(problem)))


def rank_texts(plan: Plan) -> list[bytes]:
    """The answer for every rank of a plan, as JSON text."""
    every = channels(plan.problem, plan.orders)
    ends: list[list[Channel]] = [[] for _ in range(plan.problem.pp_degree)]
    for channel in every:
        ends[channel.sender].append(channel)
        ends[channel.receiver].append(channel)
    return [canonical_json(rank_document(plan, rank, found)).encode() for rank, found in enumerate(ends)]


def cut_json(problem: Problem) -> dict[str, Any]:
    """Which layers every stage has, and which are recomputed; nothing where the stages were given."""
    model = problem.model
    if model is None:
        return {}
    document: dict[str, Any] = {"partition": [list(names) for names in model.partition]}
    if model.model.can_recompute:
        document["recompute"] = list(model.cut.recompute)
    return document


def rank_document(plan: Plan, rank: int, found: Sequence[Channel]) -> dict[str, Any]:
    """What one rank executes, and what it sends and receives on its channels."""
    problem, placement = plan.problem, plan.problem.placement
    listed = [
        {
            "peer": channel.receiver if channel.sender == rank else channel.sender,
            "direction": "send" if channel.sender == rank else "receive",
            "kind": channel.kind,
            "transfers": [str(transfer) for transfer in channel.transfers],
        }
        for channel in found
    ]
    return {
        "plan_id": plan.plan_id,
        "rank": rank,
        "pp_degree": problem.pp_degree,
        "microbatches": problem.microbatches,
        "placement": placement.kind,
        "chunks": placement.chunks,
        "stages": list(placement.stages_of[rank]),
        "actions": plan.orders.text(rank),
        "peers": sorted({channel["peer"] for channel in listed}),
        "channels": listed,
        **cut_json(plan.problem),
    }
