"""The kinds of searches: how a request of each kind is read, and what its search computes.

Everything else is the same for all kinds: one queue, one runner, one set of routes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_solver.search.options import SearchOptions

from zbv_service.documents.layouts import LayoutRequest, families_of, new_layout_search, read_layouts
from zbv_service.documents.problems import new_search, pack, pack_plan, unpack
from zbv_service.records.searches import Claim, NewSearch, Outcome, SearchKind, Update
from zbv_service.searches.executors.task import Compute, Reporter, search_plan
from zbv_service.settings import Settings


@dataclass(frozen=True)
class Kind:
    """A kind of search."""

    read: Callable[[Settings, Any], NewSearch]
    """Makes the search of a decoded request body; raises :class:`InvalidInput`. Importable elsewhere."""
    compute: Compute
    """Computes a search in another process, where it must be importable."""


def rank_layouts(claim: Claim, reporter: Reporter) -> Outcome:
    """Search the layouts of a claim to the end.

    A time limit counts from the start. After a stop, the ranking has the layouts planned so far.

    Raises
    ------
    NoLayoutFits
        No layout fits in memory.
    ContradictedBound
        A plan undercuts a lower bound.
    """
    ends = Ends(reporter.is_stopped, claim.options["time_limit"])

    def report(progress: LayoutProgress) -> None:
        reporter.report(lambda: update_of_layouts(progress))

    asked = LayoutRequest.model_validate(unpack(claim.problem))
    from zbv_models.layouts.answer import ranking_json  # late: these load the kernels
    from zbv_models.layouts.executor_search import executor_layouts
    from zbv_models.layouts.search import best_layouts
    from zbv_models.layouts.sensitivity import outcomes

    request, effort = read_layouts(asked), claim.options["effort"]
    workers = claim.options["workers"]
    options = None if effort is None else SearchOptions(effort, workers=workers)
    if asked.executor == FREE:
        ranking = best_layouts(
            families_of(asked, request), request.setting, asked.top, options, ends, report, workers=workers
        )
    else:
        ranking = executor_layouts(
            request.every(),
            request.setting,
            asked.executor,
            asked.top,
            options,
            ends,
            report,
            workers=workers,
        )
    found = list(outcomes(ranking, request, ends)) if asked.sensitivity and ranking.best else None
    document = ranking_json(
        ranking,
        request,
        with_plans=False,
        with_points=asked.points,
        sensitivity=found,
        cancelled=ends,
    )
    plans = []
    for layout, planned in zip(document["layouts"], ranking.best, strict=True):
        plans.append(pack_plan(planned.plan))
        layout["plan_id"] = plans[-1].summary.plan_id
    return Outcome(
        plans=tuple(plans),
        answer=pack(document),
        objective=ranking.best[0].step_time if ranking.best else None,
        lower_bound=ranking.no_layout_below,
        progress=_counts(ranking.considered, ranking.pruned, ranking.planned),
    )


def update_of_layouts(progress: LayoutProgress) -> Update:
    """A report in the form that is stored."""
    return Update(
        objective=progress.step_time,
        lower_bound=progress.no_layout_below,
        method=None,
        incumbent=None,
        progress=_counts(progress.considered, progress.ruled_out, progress.planned),
    )


def _counts(considered: int, ruled_out: int, planned: int) -> dict[str, int]:
    return {"considered": considered, "ruled_out": ruled_out, "planned": planned}


KINDS: Mapping[SearchKind, Kind] = {
    "plan": Kind(new_search, search_plan),
    "layouts": Kind(new_layout_search, rank_layouts),
}
