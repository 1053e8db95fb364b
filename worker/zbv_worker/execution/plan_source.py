"""Where a rank's action list comes from: a service, which sends each rank its own, or a plan file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from zbv_solver.plans.plan import identity
from zbv_solver.plans.reading import parse_orders, parse_plan_document
from zbv_solver.problem.stages import PLACEMENT_KINDS, Placement, PlacementKind
from zbv_solver.problem.writing import problem_json
from zbv_solver.verify.verifier import verify_orders

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.planned_cut import PlannedCut
from zbv_worker.execution.rank_plan import RankPlan, by_microbatch
from zbv_worker.execution.whole_plan import WholePlan, asking_service, naming_plan_file, require_rank


@dataclass(frozen=True)
class PlanSource:
    """The source of a rank's list: a service and a plan's id, or a file."""

    server: str | None = None
    plan_id: str | None = None
    file: Path | None = None

    def rank_plan(self, rank: int, timeout: float) -> RankPlan:
        """One rank's list; raises :class:`InvalidRun`, or :class:`PeerLost` without an answer."""
        if self.file is None:
            return _from_service(*self._address(), rank, timeout)
        with naming_plan_file(self.file):
            return plan_of_document(json.loads(self.file.read_text()), rank)

    def whole(self, timeout: float) -> WholePlan:
        """The whole plan; raises like :meth:`rank_plan`."""
        if self.file is None:
            return WholePlan.of_service(*self._address(), timeout)
        return WholePlan.of_file(self.file)

    def _address(self) -> tuple[str, str]:
        if self.server is None or self.plan_id is None:
            raise InvalidRun(
                "no plan given; pass --plan ID and --server URL (or set ZBV_SERVER), or --plan-file FILE."
            )
        return self.server, self.plan_id


def plan_of_document(document: object, rank: int) -> RankPlan:
    """One rank's list from a decoded plan document.

    Raises
    ------
    InvalidInput, InvalidPlan
        If the document is not a plan, or the plan cannot be executed.
    InvalidRun
        If the plan has no such rank.
    """
    problem, orders = parse_orders(parse_plan_document(document))
    verify_orders(problem, orders)
    require_rank(rank, problem.pp_degree)
    return RankPlan.of(identity(problem_json(problem), orders.all_text()), problem, orders, rank)


def _from_service(server: str, plan_id: str, rank: int, timeout: float) -> RankPlan:
    with asking_service(server, timeout, f"rank {rank}: no action list of plan {plan_id}") as client:
        answer = client.rank(plan_id, rank)
    if answer.placement not in PLACEMENT_KINDS:
        raise InvalidRun(
            f"rank {rank}: found placement {answer.placement!r}; this worker supports "
            f"{', '.join(PLACEMENT_KINDS)}. Use the same zbv version as the service."
        )
    return RankPlan(
        plan_id=answer.plan_id,
        rank=answer.rank,
        placement=Placement(cast("PlacementKind", answer.placement), answer.pp_degree, answer.chunks),
        microbatches=answer.microbatches,
        actions=answer.actions,
        channels=answer.channels,
        cut=PlannedCut.parse(answer.partition, answer.recompute),
        measured=answer.measured,
        features=by_microbatch(answer.features),
    )
