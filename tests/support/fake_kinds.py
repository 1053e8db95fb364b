"""The kinds of searches with functions that a test controls; those for layouts invent their metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zbv_models.layouts.progress import LayoutProgress
from zbv_service.documents.problems import pack, pack_plan, unpack
from zbv_service.records.searches import Claim, Outcome, SearchKind
from zbv_service.searches.executors.task import Compute, Reporter, SearchFunction, search_plan
from zbv_service.searches.kinds import KINDS, Kind, rank_layouts, update_of_layouts
from zbv_solver.errors import NoLayoutFits
from zbv_solver.problem.reading import parse_problem
from zbv_solver.search.assemble import make_plan

from support.fake_searches import BY_NAME, InDirectory, directory, orders_of, started_and_released
from support.serving import PROBLEM

BOUND = 4.0
LITTLE_MEMORY = 2e9
LAYOUT: dict[str, Any] = {
    **{"tensor_parallel": 2, "context_parallel": 1, "expert_parallel": 1, "data_parallel": 2},
    **{"pipeline_parallel": 2, "microbatch_size": 1, "zero_stage": 1, "microbatches": 4},
    **{"recompute": "none", "placement": "tp-cp-dp-pp", "executor": "zbv", "step_time": 8.0},
    **{"lower_bound": BOUND, "model_flops_utilisation": 0.5, "peak_memory": 7e10, "reserved_memory": 8e10},
    "costs": {"measured": {}, "scaled": {}, "estimated": {"block": 2}},
    "partition": [["block.0"], [], [], ["block.1"]],
}
COUNTS = {"considered": 3, "ruled_out": 1, "planned": 2}


def immediate_layouts(claim: Claim, reporter: Reporter) -> Outcome:
    """Ends at once with two layouts; devices of little memory fit none."""
    if unpack(claim.problem)["cluster"].get("memory", math.inf) <= LITTLE_MEMORY:
        raise NoLayoutFits(considered=3, memory=LITTLE_MEMORY)
    return ranking(2)


def held_layouts(claim: Claim, reporter: Reporter) -> Outcome:
    """Reports one layout, then waits for the file ``release``, or ends with that layout when it is stopped.

    With the file ``unplanned``, it ends at once without a layout.
    """
    if (directory() / "unplanned").exists():
        return ranking(0)
    reporter.report(lambda: update_of_layouts(LayoutProgress(3, 1, 1, 9.0, BOUND)))
    was_released = started_and_released(reporter.is_stopped, claim.options["workers"])
    return ranking(2 if was_released else 1)


def ranking(top: int) -> Outcome:
    """The outcome with so many layouts, each with another plan."""
    problems = (parse_problem({**PROBLEM, "microbatches": 4 + at}) for at in range(top))
    plans = tuple(pack_plan(make_plan(each, orders_of(each), method="fake")) for each in problems)
    layouts = [{**LAYOUT, "step_time": 8.0 + at} for at in range(top)]
    for layout, plan in zip(layouts, plans, strict=True):
        layout["plan_id"] = plan.summary.plan_id
    answer = {"considered": 3, "planned": 2, "pruned": 1, "unsettled": 0}
    document = {"layouts": layouts, **answer, "proof": {"no_layout_below": BOUND}}
    return Outcome(plans, 8.0 if top else None, BOUND, pack(document), COUNTS)


def kinds(plan: SearchFunction, layouts: Compute = immediate_layouts) -> Mapping[SearchKind, Kind]:
    """The kinds of searches with these functions."""
    return {
        "plan": replace(KINDS["plan"], compute=partial(search_plan, search=plan)),
        "layouts": replace(KINDS["layouts"], compute=layouts),
    }


def kinds_of(name: str, place: Path) -> Mapping[SearchKind, Kind]:
    """The kinds of searches with a fake of :data:`.BY_NAME`, and one for layouts that is like it."""
    alike: dict[str, Compute] = {"held": held_layouts, "solver": rank_layouts}
    layouts = alike.get(name, immediate_layouts)
    return kinds(InDirectory(BY_NAME[name], place), InDirectory(layouts, place))
