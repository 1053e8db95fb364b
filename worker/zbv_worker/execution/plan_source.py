"""Where a rank's action list comes from: a service, which sends each rank its own, or a plan file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zbv_solver.plans.plan import identity
from zbv_solver.plans.reading import parse_orders, parse_plan_document
from zbv_solver.problem.placement import Placement, PlacementKind
from zbv_solver.problem.writing import problem_json
from zbv_solver.verify.verifier import verify_orders

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.planned_cut import PlannedCut
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.whole_plan import (
    WholePlan,
    naming_plan_file,
    naming_service,
    require_rank,
    seconds_per_attempt,
)

_NO_PLAN = "no plan given; pass --plan ID and --server URL (or set ZBV_SERVER), or --plan-file FILE."


@dataclass(frozen=True)
class PlanSource:
    """The source of a rank's list: a service and a plan's id, or a file."""

    server: str | None = None
    plan_id: str | None = None
    file: Path | None = None

    def rank_plan(self, rank: int, timeout: float) -> RankPlan:
        """One rank's list; raises :class:`InvalidRun`, or :class:`PeerLost` without an answer."""
        if self.file is not None:
            return _from_file(self.file, rank)
        if self.server is None or self.plan_id is None:
            raise InvalidRun(_NO_PLAN)
        return _from_service(self.server, self.plan_id, rank, timeout)

    def whole(self, timeout: float) -> WholePlan:
        """The whole plan; raises like :meth:`rank_plan`."""
        if self.file is not None:
            return WholePlan.of_file(self.file)
        if self.server is None or self.plan_id is None:
            raise InvalidRun(_NO_PLAN)
        return WholePlan.of_service(self.server, self.plan_id, timeout)


def _from_service(server: str, plan_id: str, rank: int, timeout: float) -> RankPlan:
    from zbv_service.client import Client

    with (
        naming_service(f"rank {rank}: no action list of plan {plan_id}", server),
        Client(server, timeout=seconds_per_attempt(timeout)) as client,
    ):
        answer = client.rank(plan_id, rank)
    kinds: dict[str, PlacementKind] = {"v": "v", "loop": "loop", "single": "single"}
    if answer.placement not in kinds:
        raise InvalidRun(
            f"rank {rank}: found placement {answer.placement!r}; this worker supports {', '.join(kinds)}. "
            f"Use the same zbv version as the service."
        )
    return RankPlan(
        plan_id=answer.plan_id,
        rank=answer.rank,
        placement=Placement(kinds[answer.placement], answer.pp_degree, answer.chunks),
        microbatches=answer.microbatches,
        actions=answer.actions,
        channels=answer.channels,
        cut=PlannedCut.parse(answer.partition, answer.recompute),
    )


def _from_file(path: Path, rank: int) -> RankPlan:
    with naming_plan_file(path):
        problem, orders = parse_orders(parse_plan_document(json.loads(path.read_text())))
        verify_orders(problem, orders)
    require_rank(rank, problem.pp_degree)
    return RankPlan.of(identity(problem_json(problem), orders.all_text()), problem, orders, rank)
