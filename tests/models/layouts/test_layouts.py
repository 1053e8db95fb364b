"""Layouts: which there are, that bounds are bounds, that the best one is found, and what the answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layouts import EXPERTS, LONE, MODEL, TIED, Document, cluster_of, request_of
from zbv_models.estimate.model import Transformer
from zbv_models.estimate.model_layers import parameters_of
from zbv_models.layouts import progress
from zbv_models.layouts.answer import composition, memory_of_ranks, points_json, ranking_json
from zbv_models.layouts.cluster import Cluster, parse_cluster
from zbv_models.layouts.estimated_layout import (
    EstimatedLayout,
    balanced,
    layers_on_ranks,
    least_memory,
    plan_layout,
)
from zbv_models.layouts.executor_search import executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.progress import Ends, LayoutProgress
from zbv_models.layouts.request import parse_request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.sensitivity import AMONG, TOO_LARGE, changes, nearest, outcomes
from zbv_solver.errors import InfeasibleMemory, InvalidInput

PARTS: list[Document] = [
    {}, {"tensor_parallel": 2}, {"context_parallel": 2, "expert_parallel": 4}, {"microbatch_size": 2},
    {"data_parallel": 4, "zero_stage": 3}, {"pipeline_parallel": 4, "placement": "tp-cp-pp-dp"},
]  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_layouts_use_all_devices_and_the_batch_and_fixed_parts_only_restrict_them(part: Document) -> None:
    every, some = (request_of(EXPERTS, cluster_of(2, 4), 16, **fixed).layouts for fixed in ({}, part))
    assert len(set(some)) == len(some) > 8
    for each in some:
        of_rank = each.tensor_parallel * each.context_parallel * each.data_parallel
        assert of_rank * each.pipeline_parallel == 8
        assert each.data_parallel * each.microbatch_size * each.microbatches == 16
        assert (of_rank % each.expert_parallel, 4 % each.tensor_parallel) == (0, 0)
        assert all(getattr(each, name) == value for name, value in part.items())
    # Where the order of groups makes no difference, the enumeration has the first one only.
    chosen = [each for each in every if all(getattr(each, name) == value for name, value in part.items())]
    by_order = ({replace(each, placement="tp-cp-dp-pp") for each in of} for of in (some, chosen))
    assert set.issuperset(*by_order)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_families_have_every_layout_once_and_the_search_of_them_finds_the_same(is_mixed: bool) -> None:
    group = {"nodes": 1, "gpus_per_node": 2, "device": "h100", "memory": 12e9}
    groups = parse_cluster({"groups": [group, {**group, "device": "a100"}]})
    model = {**EXPERTS, "layers": 4}
    fixed: Document = {"microbatch_size": 1, "recompute": "none"}
    request = request_of(model, groups if is_mixed else cluster_of(1, 4, 12.0), 4, **fixed)
    families, layouts = list(request.families()), request.layouts
    assert list(chain.from_iterable(families)) == layouts
    assert sum(map(len, families)) == len(layouts) == len(set(layouts)) > 2 * len(families)
    for family in families:
        bounds = [request.setting.least_work(layout) for layout in (family.first, *family)]
        assert bounds == pytest.approx([bounds[0]] * len(bounds), rel=1e-12)
    by_family = best_layouts(families, request.setting, 2)
    one_by_one = best_layouts(layouts, request.setting, 2)

    def known(ranking: Ranking) -> list[object]:
        found = [(each.layout, each.step_time, each.lower_bound) for each in ranking.every]
        numbers = sorted((number, each.is_tight) for each in ranking.waiting for number, _ in each.members())
        counts = ranking.considered, ranking.planned, ranking.pruned, ranking.unsettled
        points = points_json(ranking, request.setting)
        rows = {name: sorted(zip(*columns.values(), strict=True)) for name, columns in points.items()}
        return [found, numbers, counts, ranking.no_layout_below, rows, nearest(ranking, request.setting)]

    assert known(by_family) == known(one_by_one)


def test_large_clusters_have_few_families_and_large_numbers_are_enumerated_by_their_divisors() -> None:
    """Counting up to them would take hours."""
    cluster = parse_cluster({"nodes": 256, "gpus_per_node": 8, "device": "h100"})
    document = {"presets": ["deepseek-v3"], "global_batch": 15360, "sequence_length": 4096}
    sizes = list(map(len, parse_request(document, cluster).families()))
    assert sum(sizes) > 1_000_000 > 10 * len(sizes)
    model = {**MODEL, "experts": 99_999_989, "experts_per_token": 1}
    few = request_of(model, cluster_of(1, 2), 99_999_989)
    assert len(few.layouts) < 100
    assert sum(map(len, few.families(len(few.layouts)))) == len(few.layouts)
    with pytest.raises(InvalidInput, match=f"found more than {len(few.layouts) - 1} layouts of 2 devices"):
        list(few.families(len(few.layouts) - 1))


LOADS = st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.01, 1e3)), max_size=5)


@given(st.floats(0, 1e4), st.floats(0, 1e4), LOADS)
def test_the_balance_of_load_and_memory(load: float, wanted: float, items: list[tuple[float, float]]) -> None:
    extra, saved = np.array(items).reshape(-1, 2).T
    found = balanced(load, wanted, extra, saved)
    shares = np.array(list(product(np.linspace(0, 1, 5), repeat=len(items))))
    some = np.maximum(load + shares @ extra, wanted - shares @ saved).min()
    assert load * (1 - 1e-9) <= found <= some * (1 + 1e-9) + 1e-12


def test_a_microbatch_alone_takes_the_time_of_all_layers() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 1, pipeline_parallel=4, tensor_parallel=1)
    alone = EstimatedLayout.of(request.layouts[0], request.setting)
    assert alone.memory_bound > 2 * alone.mean_bound
    assert alone.memory_bound <= plan_layout(alone).step_time


def test_reports_lead_to_the_ranking_and_a_stopped_search_keeps_its_plans() -> None:
    request = request_of(MODEL, cluster_of(1, 4, 60.0), 8)
    reports: list[LayoutProgress] = []
    ranking = best_layouts(request.layouts, request.setting, report=reports.append)
    assert [each.step_time for each in reports if each.step_time is not None][-1] == ranking.best[0].step_time
    for earlier, later in pairwise(reports):
        assert earlier.no_layout_below <= later.no_layout_below * (1 + 1e-12)
        assert earlier.planned <= later.planned
        assert earlier.ruled_out <= later.ruled_out
    assert reports[-1].no_layout_below <= ranking.no_layout_below * (1 + 1e-12)
    assert {each.considered for each in reports} == {ranking.considered}
    at_once = best_layouts(request.layouts, request.setting, cancelled=lambda: True)
    assert (at_once.best, at_once.planned, at_once.pruned) == ((), 0, 0)
    assert 0 < at_once.no_layout_below <= ranking.no_layout_below
    first: list[LayoutProgress] = []
    asked: Document = {"top": 9, "report": first.append}
    stopped = best_layouts(
        request.layouts, request.setting, cancelled=lambda: any(each.planned for each in first), **asked
    )
    assert len(stopped.best) == 1
    assert stopped.considered == stopped.planned + stopped.pruned + stopped.unsettled
    assert stopped.unsettled > 0 == ranking.unsettled
    assert stopped.no_layout_below <= ranking.no_layout_below * (1 + 1e-12)


@pytest.mark.parametrize("executor", ["zbv", "megatron"])
def test_a_search_ends_during_the_enumeration(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "POLL_SECONDS", 0.0)
    request = request_of(EXPERTS, cluster_of(2, 4), 16)
    read: list[object] = []

    def reading() -> Iterator[Any]:
        for layout in request.layouts:
            read.append(layout)
            yield layout

    def is_over() -> bool:
        return len(read) == 5

    search = best_layouts if executor == "zbv" else partial(executor_layouts, executor=executor)
    ranking = search(reading(), request.setting, cancelled=is_over)
    assert len(read) == 5, "it asks before every layout"
    assert (ranking.best, ranking.planned, ranking.no_layout_below) == ((), 0, 0.0)
    assert ranking.considered == ranking.unsettled < len(request.layouts)


def test_a_search_of_many_layouts_that_ends_early_has_one_that_fits() -> None:
    request = request_of(EXPERTS, cluster_of(8, 4, 0.6), 64)
    families = list(request.families())
    left = iter(range(len(families)))
    early = best_layouts(families, request.setting, cancelled=lambda: next(left, None) is None)
    assert early.best
    assert early.unsettled > early.considered / 2


def test_points_and_sensitivity_end_with_the_search() -> None:
    request = request_of(NARROW, cluster_of(1, 2), 4, recompute="none")
    ranking = best_layouts(request.families(), request.setting)
    every, few = (points_json(ranking, request.setting, partial(bool, end)) for end in (False, True))
    assert every["planned"] == few["planned"]
    count = sum(len(of["step_time"]) for of in every.values())
    assert count == ranking.considered > sum(len(of["step_time"]) for of in few.values())
    assert list(outcomes(ranking, request, lambda: True)) == []
    left = iter(range(40))
    some, whole = (
        [(each.best, each.best_step_time) for each in outcomes(ranking, request, is_over)]
        for is_over in (lambda: next(left, None) is None, lambda: False)
    )
    assert some == whole[: len(some)]
    assert len(some) < len(whole) == len(list(changes(request))), "it ended in the middle"
    over = [Ends(partial(bool, end), limit)() for end, limit in product((0, 1), (None, 1000.0, 0.0))]
    assert over == [False, False, True, True, True, True]


PIPED: Document = {**LONE, "pipeline_parallel": 2, "microbatch_size": 4}


def test_recomputation_is_chosen_where_memory_is_scarce() -> None:
    rows = []
    for gigabytes in (60.0, 4.5):
        request = request_of(MODEL, cluster_of(1, 2, gigabytes), 16, **PIPED)
        rows += ranking_json(best_layouts(request.layouts, request.setting), request)["layouts"]
    assert [row["recompute"] for row in rows] == ["none", "per-stage"]
    assert rows[0]["step_time"] < rows[1]["step_time"]
    assert rows[1]["peak_memory"] <= 4.5e9
    assert 0 < rows[1]["model_flops_utilisation"] < rows[0]["model_flops_utilisation"] < 1


def test_selective_recomputation_is_another_layout() -> None:
    every = request_of(EXPERTS, cluster_of(1, 2, 60.0), 16, **PIPED)
    assert {each.recompute for each in every.layouts} == {"per-stage", "selective"}
    steps, held = [], []
    for kind in ("none", "selective", "full"):
        request = request_of(EXPERTS, cluster_of(1, 2, 60.0), 16, **PIPED, recompute=kind)
        (best,) = best_layouts(request.layouts, request.setting).best
        block = best.estimated.problem.model.layers[1]
        assert (best.layout.recompute, block.recompute) == (kind, None)
        steps.append(best.step_time)
        held.append(-block.costs.memory.forward)
    assert (steps, held) == (sorted(set(steps)), sorted(set(held)))
    # A dense model has selective layouts where they are asked for.
    assert {each.recompute for each in request_of(MODEL, cluster_of(1, 2), 16).layouts} == {"per-stage"}
    asked = request_of(MODEL, cluster_of(1, 2), 16, recompute="selective").layouts
    assert {(each.recompute, "mlp" in each.recompute_modules) for each in asked} == {("selective", True)}
    named = request_of(MODEL, cluster_of(1, 2), 16, parallel={"recompute_modules": ["mlp"]}).layouts
    assert any(each.recompute == "selective" for each in named)


def test_prediction_modules_are_dropped_or_added() -> None:
    document = {"model": {**MODEL, "prediction_layers": 1}, "global_batch": 8}
    requests = (parse_request(document, cluster_of(1, 2), prediction_layers=n) for n in (None, 0, 2))
    assert [request.setting.model.prediction_layers for request in requests] == [1, 0, 2]


@pytest.mark.parametrize("executor", ["zbv", "megatron"])
def test_several_prediction_modules_are_in_one_stage(executor: str) -> None:
    model = {**MODEL, "prediction_layers": 2}
    request = request_of(model, cluster_of(1, 4), 8, executor, pipeline_parallel=4, microbatch_size=1)
    (best,) = executor_layouts(request.layouts, request.setting, executor).best
    cut = best.plan.problem.model
    assert cut is not None
    assert sum(any(name.startswith("prediction") for name in stage) for stage in cut.partition) == 1


def test_one_rank_has_the_table_of_prediction_modules_once() -> None:
    """It has the embedding, so modules add their own parameters to what is held, and no table."""
    held = []
    for modules in (0, 1):
        model = {**MODEL, "prediction_layers": modules}
        (layout,) = request_of(
            model, cluster_of(1, 1), 1, zero_stage=0, recompute="none", microbatch_size=1
        ).layouts
        setting = request_of(model, cluster_of(1, 1), 1).setting
        estimate = EstimatedLayout.of(layout, setting).estimate
        held.append(sum(layer.parameters * layer.copies for layer in estimate.layers))
        assert held[-1] == parameters_of(setting.model).total
    assert held[0] < held[1]


def test_a_layout_of_adapters_holds_less_and_says_what_trains() -> None:
    document = {"model": MODEL, "global_batch": 8}
    steps, memory, counts = [], [], []
    for more in ({}, {"lora_rank": 4, "target_modules": ["q_proj"]}, {"frozen": ["embedding"]}):
        request = parse_request(document, cluster_of(1, 2), Fixed(data_parallel=1, microbatch_size=1), **more)
        answer = ranking_json(best_layouts(request.layouts, request.setting), request)
        best = answer["layouts"][0]
        steps.append(best["step_time"])
        memory.append(best["peak_memory"])
        counts.append((answer.get("parameters"), answer.get("trained_parameters")))
    assert steps[1] < steps[0]
    assert memory[1] < memory[2] < memory[0]
    model = Transformer.model_validate(MODEL)
    own = parameters_of(model).total
    adapters = 4 * model.layers * (model.hidden + model.heads * model.width_of_head)
    embedding = model.vocabulary * model.hidden
    assert counts == [(None, None), (own + adapters, adapters), (own, own - embedding)]


SIZES = {"hidden": 512, "layers": 4, "vocabulary": 8_000, "sequence": 1024}
NARROW = {**MODEL, **SIZES}


@settings(max_examples=5)
@given(st.sampled_from([MODEL, EXPERTS, TIED]), st.sampled_from(["none", "full", "per-stage"]), st.data())
def test_parts_of_a_step(model: Document, recompute: str, data: st.DataObject) -> None:
    cluster = cluster_of(2, 2, data.draw(st.floats(0.2, 2.0)))
    request = request_of({**model, **SIZES}, cluster, recompute=recompute)
    estimated = EstimatedLayout.of(data.draw(st.sampled_from(request.layouts)), request.setting)
    try:
        planned = plan_layout(estimated)
    except InfeasibleMemory:
        return
    found = composition(planned)
    assert sum(found.values()) == pytest.approx(planned.step_time, rel=1e-9)
    assert min(found.values()) >= -1e-9 * planned.step_time
    assert (found["recomputation"] > 0) >= (recompute == "full")
    peaks = planned.plan.metrics.peak_memory
    held = memory_of_ranks(planned)
    assert [sum(each.values()) for each in held] == pytest.approx(list(peaks), rel=1e-9)
    assert min(min(each.values()) for each in held) >= -1e-9 * max(peaks)
    on_rank = [sum(estimated.layer_on(name, rank).static.gradients for name in names)
               for rank, names in enumerate(layers_on_ranks(planned.plan.problem))]  # fmt: skip
    assert [each["gradients"] for each in held] == pytest.approx(on_rank, rel=1e-9)
    assert least_memory(estimated) <= max(planned.plan.metrics.peak_memory) * (1 + 1e-9)


def test_exchanges_are_not_idle_time() -> None:
    def parts(cluster: Cluster, **fixed: Any) -> dict[str, float]:
        request = request_of(NARROW, cluster, **fixed)
        return composition(best_layouts(request.layouts, request.setting).best[0])

    alone, pair = parts(cluster_of(1, 1)), cluster_of(1, 2)
    exchanges = [alone[name] for name in ("idle", "transfers", "tensor_parallel", "gradient_reduction")]
    assert exchanges == pytest.approx([0, 0, 0, 0], abs=1e-12)
    assert parts(pair, tensor_parallel=2)["tensor_parallel"] > 0
    narrow = replace(pair, in_node=replace(pair.in_node, bandwidth=5.0))
    piped, slow = (parts(each, pipeline_parallel=2, microbatch_size=4) for each in (pair, narrow))
    assert slow["transfers"] > piped["transfers"] > 0 < piped["idle"]


def test_every_layout_is_a_point_and_those_that_may_fit_are_compared() -> None:
    request = request_of(NARROW, cluster_of(1, 4, 0.2))
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


def test_on_one_pipeline_rank_the_bound_is_the_step() -> None:
    request = request_of(NARROW, cluster_of(1, 2), pipeline_parallel=1)
    ranking = best_layouts(request.layouts, request.setting, top=3)
    steps = [each.step_time for each in ranking.every]
    assert [each.lower_bound for each in ranking.every] == pytest.approx(steps, rel=1e-12)
    assert len(set(steps)) == 3


def test_changes_move_the_step_in_the_right_direction() -> None:
    request = request_of(NARROW, cluster_of(2, 1), **LONE, recompute="none")
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
            whole = best_layouts(again.layouts, again.setting)  # which does not know the order before
            assert each.best_step_time <= whole.best[0].step_time * (1 + 1e-9)
    # The document has what was asked for.
    assert not {"points", "sensitivity"} & ranking_json(ranking, request).keys()
    document = ranking_json(ranking, request, with_points=True, sensitivity=found)
    assert json.loads(json.dumps(document)) == document
    rows = [(row["of"], row["factor"]) for row in document["sensitivity"]["changes"]]
    assert rows == [(each.of, each.factor) for each in found] == list(changed)
    assert len(rows) == 10


def test_a_layout_that_does_not_fit_or_divide_the_batch_any_more_has_no_step() -> None:
    request = request_of(NARROW, cluster_of(1, 1), microbatch_size=8)
    ranking = best_layouts(request.layouts, request.setting)
    small = replace(request, cluster=replace(cluster_of(1, 1), memory=1e6))
    assert {each.step_time for each in outcomes(ranking, small)} == {None}
    steps = {(each.of, each.factor): each.step_time for each in outcomes(ranking, request)}
    assert [name for name, step in steps.items() if step is None] == [("global_batch", 0.5)]
    assert "between_nodes_bandwidth" not in {of for of, _ in steps}
