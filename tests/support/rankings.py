"""Layouts of one request, planned one by one, against the search that plans as few as it can."""

from __future__ import annotations

import pytest
from zbv_models.layouts.estimated_layout import EstimatedLayout, plan_layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import best_layouts
from zbv_solver.errors import InfeasibleMemory, NoLayoutFits
from zbv_solver.problem.numeric import OPTIMAL_GAP


def check_ranking(request: Request) -> None:
    """The best two layouts are those of planning every one, and no bound is above a plan."""
    planned = []
    for layout in request.layouts:
        estimated = EstimatedLayout.of(layout, request.setting)
        try:
            found = plan_layout(estimated)
        except InfeasibleMemory:
            continue
        bounds = [request.setting.least_work(layout), estimated.mean_bound, estimated.memory_bound]
        bounds += [estimated.load_bound, found.lower_bound]
        assert max(bounds) <= found.step_time * (1 + OPTIMAL_GAP)
        assert estimated.has_room_for_states
        planned.append(found.step_time)
    if not planned:
        with pytest.raises(NoLayoutFits, match="no layout fits"):
            best_layouts(request.layouts, request.setting)
        return
    ranking = best_layouts(request.layouts, request.setting, top=2)
    assert [each.step_time for each in ranking.best] == pytest.approx(sorted(planned)[:2], rel=1e-12)
    assert ranking.no_layout_below <= ranking.best[0].step_time
    assert ranking.considered == len(request.layouts)
