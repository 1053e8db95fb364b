"""What a user may give as a plan: a plan, a document, a file, or the id of a plan on a service."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.plan import Plan

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.plan_source import PlanSource, plan_of_document
from zbv_worker.execution.planned_cut import PlannedCut
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.whole_plan import WholePlan, naming_plan_file, require_rank
from zbv_worker.model.layer_list import even_partition

PlanLike = Plan | WholePlan | PlanSource | Mapping[str, Any] | str | Path
"""A plan, the plan of an agent's run, a decoded plan file, a path, a plan's URL, or a plan's id."""


def rank_plan(plan: PlanLike, rank: int, service: str | None, timeout: float) -> RankPlan:
    """One rank's part of a plan.

    Parameters
    ----------
    service
        The URL of the service that has the plan, if ``plan`` is an id.
    timeout
        Seconds to wait for the service.

    Raises
    ------
    InvalidRun
        If there is no such plan, or it has no such rank.
    PeerLost
        If the service does not answer.
    """
    if isinstance(plan, Plan | WholePlan):
        require_rank(rank, plan.problem.pp_degree)
        return RankPlan.of(plan.plan_id, plan.problem, plan.orders, rank)
    if isinstance(plan, PlanSource):
        return plan.rank_plan(rank, timeout)
    if isinstance(plan, Mapping):
        return _of_document(plan, rank)
    if not isinstance(plan, str | Path):
        raise InvalidRun(
            f"found a {type(plan).__name__} as the plan; must be a plan (zbv_solver.plan), a decoded plan "
            f"file, a path, a plan's URL, or a plan's id with service=URL."
        )
    text = str(plan)
    if text.lstrip().startswith("{"):
        raise InvalidRun(
            "found the text of a plan; must be decoded. Pass json.loads(text), or the file's path."
        )
    is_address = text.startswith(("http://", "https://"))
    if service is not None and (is_address or len(Path(text).parts) > 1):
        raise InvalidRun(
            f"found {text} as the plan, and service=; with a service, the plan must be an id. Omit service=."
        )
    if service is not None:
        return PlanSource(server=service, plan_id=text).rank_plan(rank, timeout)
    return _of_url(text).rank_plan(rank, timeout) if is_address else _of_file(Path(plan), rank)


def cut_evenly(plan: RankPlan, names: Sequence[str]) -> RankPlan:
    """Divide layers among the stages of a plan that was made without layers, in about equal numbers.

    Returns a plan with layers as it is.
    """
    stages = plan.placement.n_stages
    if plan.cut.partition is not None:
        return plan
    if len(names) < stages:
        raise InvalidRun(
            f"found {len(names)} layers; the plan has {stages} stages, and every one needs a layer. Divide "
            f"the model into at least {stages} layers, or plan for fewer ranks."
        )
    return replace(plan, cut=PlannedCut(even_partition(names, stages), plan.cut.recompute))


def _of_document(document: Mapping[str, Any], rank: int) -> RankPlan:
    try:
        return plan_of_document(document, rank)
    except (InvalidInput, InvalidPlan) as error:
        raise InvalidRun(f"the plan: {error}") from error


def _of_url(url: str) -> PlanSource:
    server, separator, plan_id = url.rstrip("/").rpartition("/plans/")
    if not separator:
        raise InvalidRun(f"found {url} as the plan; a plan's URL must end with /plans/ID.")
    return PlanSource(server=server.removesuffix("/v1"), plan_id=plan_id)


def _of_file(path: Path, rank: int) -> RankPlan:
    if not path.exists():
        raise InvalidRun(
            f"found no file {path} in {Path.cwd()}. Give the path of a plan file; for the id of a plan on a "
            f"service, pass service=URL too."
        )
    with naming_plan_file(path, "plan file"):
        return plan_of_document(json.loads(path.read_text()), rank)
