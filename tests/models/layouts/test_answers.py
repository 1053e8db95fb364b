"""What a ranking says besides its order: parts of the step, all layouts as points, and sensitivity."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import cluster_of
from support.executor_layouts import request_of as asked
from zbv_models.layouts.answer import composition, points_json, ranking_json
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, least_memory, plan_layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.sensitivity import AMONG, TOO_LARGE, changes, nearest, outcomes, sensitivity_json
from zbv_solver.errors import InfeasibleMemory

MODEL = {
    **{"hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "vocabulary": 8_000, "sequence": 1024},
    **{"positions": "rotary", "norm": "rmsnorm", "gated": True},
}
EXPERTS = {**MODEL, "experts": 4, "experts_per_token": 2}
FEW = {"microbatch_size": 1, "tensor_parallel": 1, "context_parallel": 1, "recompute": "none"}
"""Parts of a layout that leave few to compare."""
TIED = {**MODEL, "tied_embeddings": True}


def request_of(model: dict[str, Any], cluster: Cluster, **fixed: Any) -> Request:
    return asked(model, cluster, 8, **fixed)


@settings(max_examples=5)
@given(
    st.sampled_from([MODEL, EXPERTS, TIED]),
    st.sampled_from(["none", "full", "per-stage"]),
    st.floats(0.2, 2.0),
    st.data(),
)
def test_the_parts_of_a_step_add_up_to_it(
    model: dict[str, Any], recompute: str, gigabytes: float, data: st.DataObject
) -> None:
    request = request_of(model, cluster_of(2, 2, gigabytes), recompute=recompute)
    layout = data.draw(st.sampled_from(request.layouts))
    estimated = EstimatedLayout.of(layout, request.setting)
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
    one = request_of(MODEL, cluster_of(1, 1))
    alone = composition(best_layouts(one.layouts, one.setting).best[0])
    assert alone["idle"] == pytest.approx(0, abs=1e-12)
    assert alone["transfers"] == alone["tensor_parallel"] == alone["gradient_reduction"] == 0
    split = request_of(MODEL, cluster_of(1, 2), tensor_parallel=2)
    assert composition(best_layouts(split.layouts, split.setting).best[0])["tensor_parallel"] > 0
    cluster = cluster_of(1, 2)
    piped = request_of(MODEL, cluster, pipeline_parallel=2, microbatch_size=4)
    found = composition(best_layouts(piped.layouts, piped.setting).best[0])
    assert found["idle"] > 0
    assert found["transfers"] > 0
    slow = replace(cluster, in_node=replace(cluster.in_node, bandwidth=5.0))
    piped = replace(piped, cluster=slow)
    slower = composition(best_layouts(piped.layouts, piped.setting).best[0])
    assert slower["transfers"] > found["transfers"]


def test_every_layout_is_a_point() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 0.2))
    ranking = best_layouts(request.layouts, request.setting, top=2)
    points = points_json(ranking, request.setting)
    columns = [len(values) for group in points.values() for values in group.values()]
    counts = {name: len(group["step_time"]) for name, group in points.items()}
    assert sum(counts.values()) == ranking.considered == len(request.layouts)
    assert counts["planned"] == ranking.planned
    assert counts["too_large"] > 0
    assert sum(columns) == 10 * ranking.considered
    for each in ranking.every:
        assert least_memory(each.estimated) <= max(each.plan.metrics.peak_memory)
    assert min(points["planned"]["step_time"]) == pytest.approx(ranking.best[0].step_time, rel=1e-3)
    assert min(points["bounded"]["step_time"]) >= ranking.best[1].step_time * (1 - 1e-3)
    assert max(points["bounded"]["peak_memory"]) <= request.cluster.memory


def test_changes_move_the_step_in_the_right_direction() -> None:
    request = request_of(MODEL, cluster_of(2, 1), **FEW)
    ranking = best_layouts(request.layouts, request.setting)
    found = list(outcomes(ranking, request))
    steps = {(each.of, each.factor): each.step_time for each in found}
    base = ranking.best[0].step_time
    for (of, factor), step in steps.items():
        assert step is not None
        if of == "global_batch":
            assert (step > base) == (factor > 1)
        else:
            assert step >= base * (1 - 1e-9) if factor < 1 else step <= base * (1 + 1e-9)
    changed = {(of, factor): request for of, factor, request in changes(request)}
    slower, faster = steps["device_flops", 0.8], steps["device_flops", 1.2]
    assert slower is not None
    assert faster is not None
    assert slower > base > faster
    for each in found:
        assert each.best is not None
        assert each.best_step_time is not None
        assert each.step_time is not None
        assert each.best_step_time <= each.step_time
        again = changed[each.of, each.factor]
        if each.is_proved and len(request.layouts) == each.among:
            whole = best_layouts(again.layouts, again.setting)
            assert each.best_step_time == pytest.approx(whole.best[0].step_time)


def test_layouts_that_are_compared_include_those_that_fit() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 0.2))
    ranking = best_layouts(request.layouts, request.setting)
    found = nearest(ranking, request.setting)
    large = {layout for node in ranking.too_large for _, layout in node.members()}
    assert found[0] == ranking.best[0].layout
    assert len(set(found)) == len(found) <= AMONG + TOO_LARGE
    assert large
    assert sum(each not in large for each in found) == min(AMONG, ranking.considered - len(large))


def test_a_layout_that_no_longer_fits_has_no_step() -> None:
    cluster = cluster_of(1, 2)
    request = request_of(MODEL, cluster)
    ranking = best_layouts(request.layouts, request.setting)
    needed = max(ranking.best[0].plan.metrics.peak_memory)
    tight = replace(request, cluster=replace(cluster, memory=least_memory(ranking.best[0].estimated)))
    assert needed > tight.cluster.memory
    small = replace(tight, cluster=replace(cluster, memory=1e6))
    assert {each.step_time for each in outcomes(ranking, small)} == {None}


def test_a_layout_that_does_not_divide_the_batch_has_no_step() -> None:
    request = request_of(MODEL, cluster_of(1, 1), microbatch_size=8)
    ranking = best_layouts(request.layouts, request.setting)
    steps = {(each.of, each.factor): each.step_time for each in outcomes(ranking, request)}
    assert [name for name, step in steps.items() if step is None] == [("global_batch", 0.5)]


def test_the_document_has_what_was_asked_for() -> None:
    request = request_of(MODEL, cluster_of(1, 2), **FEW)
    ranking = best_layouts(request.layouts, request.setting)
    plain = ranking_json(ranking, request)
    assert not {"points", "sensitivity"} & plain.keys()
    assert sum(plain["layouts"][0]["composition"].values()) == pytest.approx(ranking.best[0].step_time)
    found = list(outcomes(ranking, request))
    document = ranking_json(ranking, request, with_points=True, sensitivity=found)
    assert json.loads(json.dumps(document)) == document
    of = [each["of"] for each in sensitivity_json(ranking, found)["changes"]]
    assert of == ["device_flops"] * 2 + ["in_node_bandwidth"] * 2 + ["memory"] * 2 + ["global_batch"] * 2
