"""One search for layouts as a plain function of plain data, for another process."""

from __future__ import annotations

from zbv_models.layouts.executor_rules import FREE
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_solver.plans.plan import gap_of
from zbv_solver.search.options import SearchOptions

from zbv_service.documents.layouts import LayoutRequest, families_of, read_layouts
from zbv_service.documents.problems import finite_or_none, pack, pack_plan, unpack
from zbv_service.records.searches import Claim, NewRanking, Update
from zbv_service.searches.executors.task import Reporter


def rank_layouts(claim: Claim, reporter: Reporter) -> NewRanking:
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
    return NewRanking(
        plans=tuple(plans),
        document=pack(document),
        step_time=ranking.best[0].step_time if ranking.best else None,
        lower_bound=ranking.no_layout_below,
        progress=_counts(ranking.considered, ranking.pruned, ranking.planned),
    )


def update_of_layouts(progress: LayoutProgress) -> Update:
    """A report in the form that is stored."""
    step, bound = progress.step_time, progress.no_layout_below
    return Update(
        objective=step,
        lower_bound=bound,
        gap=None if step is None else finite_or_none(gap_of(step, bound)),
        method="layouts",
        incumbent=None,
        progress=_counts(progress.considered, progress.ruled_out, progress.planned),
    )


def _counts(considered: int, ruled_out: int, planned: int) -> dict[str, int]:
    return {"considered": considered, "ruled_out": ruled_out, "planned": planned}
