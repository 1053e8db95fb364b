"""What a ranking says besides its order: parts of the step, all layouts as points, and sensitivity."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import EXPERTS, TIED, Document, cluster_of, request_of
from support.executor_layouts import MODEL as LARGER
from zbv_models.layouts.answer import composition, points_json, ranking_json
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, least_memory, plan_layout
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import AMONG, TOO_LARGE, changes, nearest, outcomes
from zbv_solver.errors import InfeasibleMemory

SIZES = {"hidden": 512, "layers": 4, "vocabulary": 8_000, "sequence": 1024}
MODEL = {**LARGER, **SIZES}


@settings(max_examples=5)
@given(
    st.sampled_from([MODEL, {**EXPERTS, **SIZES}, {**TIED, **SIZES}]),
    st.sampled_from(["none", "full", "per-stage"]),
    st.floats(0.2, 2.0),
    st.data(),
)
def test_the_parts_of_a_step_add_up_to_it(
    model: Document, recompute: str, gigabytes: float, data: st.DataObject
) -> None:
    request = request_of(model, cluster_of(2, 2, gigabytes), recompute=recompute)
    estimated = EstimatedLayout.of(data.draw(st.sampled_from(request.layouts)), request.setting)
    try:
        planned = plan_layout(estimated)
    except InfeasibleMemory:
        return
    found = composition(planned)
    assert sum(found.values()) == pytest.approx(planned.step_time, rel=1e-9)
    assert min(found.values()) >= -1e-9 * planned.step_time
    assert (found["recomputation"] > 0) >= (recompute == "full")
    assert least_memory(estimated) <= max(planned.plan.metrics.peak_memory) * (1 + 1e-9)


def test_exchanges_are_not_idle_time() -> None:
    def parts(cluster: Cluster, **fixed: Any) -> dict[str, float]:
        request = request_of(MODEL, cluster, **fixed)
        return composition(best_layouts(request.layouts, request.setting).best[0])

    alone, pair = parts(cluster_of(1, 1)), cluster_of(1, 2)
    assert alone["idle"] == pytest.approx(0, abs=1e-12)
    assert alone["transfers"] == alone["tensor_parallel"] == alone["gradient_reduction"] == 0
    assert parts(pair, tensor_parallel=2)["tensor_parallel"] > 0
    narrow = replace(pair, in_node=replace(pair.in_node, bandwidth=5.0))
    piped, slow = (parts(each, pipeline_parallel=2, microbatch_size=4) for each in (pair, narrow))
    assert piped["idle"] > 0
    assert slow["transfers"] > piped["transfers"] > 0


def test_every_layout_is_a_point_and_those_that_may_fit_are_compared() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 0.2))
    ranking = best_layouts(request.layouts, request.setting, top=2)
    points = points_json(ranking, request.setting)
    sizes = {name: {len(values) for values in group.values()} for name, group in points.items()}
    counts = {name: count for name, (count,) in sizes.items()}
    assert sum(counts.values()) == ranking.considered == len(request.layouts)
    assert counts["planned"] == ranking.planned
    assert counts["too_large"] > 0
    for each in ranking.every:
        assert least_memory(each.estimated) <= max(each.plan.metrics.peak_memory)
    assert min(points["planned"]["step_time"]) == pytest.approx(ranking.best[0].step_time, rel=1e-3)
    assert min(points["bounded"]["step_time"]) >= ranking.best[1].step_time * (1 - 1e-3)
    assert max(points["bounded"]["peak_memory"]) <= request.cluster.memory
    large = {layout for node in ranking.too_large for _, layout in node.members()}
    compared = nearest(ranking, request.setting)
    assert compared[0] == ranking.best[0].layout
    assert len(set(compared)) == len(compared) <= AMONG + TOO_LARGE
    assert sum(each not in large for each in compared) == min(AMONG, ranking.considered - len(large))


def test_changes_move_the_step_in_the_right_direction() -> None:
    few: Document = {"microbatch_size": 1, "tensor_parallel": 1, "context_parallel": 1, "recompute": "none"}
    request = request_of(MODEL, cluster_of(2, 1), **few)
    ranking = best_layouts(request.layouts, request.setting)
    found, base = list(outcomes(ranking, request)), ranking.best[0].step_time
    changed = {(of, factor): request for of, factor, request in changes(request)}
    for each in found:
        assert each.step_time is not None
        assert each.best_step_time is not None
        assert each.best_step_time <= each.step_time
        if each.of == "global_batch":
            assert (each.step_time > base) == (each.factor > 1)
        else:
            assert (each.step_time - base) * (each.factor - 1) <= 1e-9 * base
        assert each.of != "device_flops" or each.step_time != base
        again = changed[each.of, each.factor]
        if each.is_proved and len(request.layouts) == each.among:
            whole = best_layouts(again.layouts, again.setting)
            assert each.best_step_time == pytest.approx(whole.best[0].step_time)
    # The document has what was asked for.
    assert not {"points", "sensitivity"} & ranking_json(ranking, request).keys()
    document = ranking_json(ranking, request, with_points=True, sensitivity=found)
    assert json.loads(json.dumps(document)) == document
    rows = [(row["of"], row["factor"]) for row in document["sensitivity"]["changes"]]
    assert rows == [(each.of, each.factor) for each in found] == list(changed)
    assert len(rows) == 10


def test_a_layout_that_does_not_fit_or_divide_the_batch_any_more_has_no_step() -> None:
    request = request_of(MODEL, cluster_of(1, 1), microbatch_size=8)
    ranking = best_layouts(request.layouts, request.setting)
    small = replace(request, cluster=replace(cluster_of(1, 1), memory=1e6))
    assert {each.step_time for each in outcomes(ranking, small)} == {None}
    steps = {(each.of, each.factor): each.step_time for each in outcomes(ranking, request)}
    assert [name for name, step in steps.items() if step is None] == [("global_batch", 0.5)]
    assert "between_nodes_bandwidth" not in {of for of, _ in steps}
