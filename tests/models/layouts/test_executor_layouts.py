"""Layouts for executors: rules, settings, and that the best of all layouts is found."""

from __future__ import annotations

import shlex
import traceback
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import repeat
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]
from support.executor_layouts import EXPERTS, MODEL, best_of, cluster_of, request_of
from support.titan_configuration import VERSIONS, configured
from zbv_models.fixed_orders.executor_cut import ExecutorCut, cut_for_executor
from zbv_models.fixed_orders.megatron_layout import parse_layout
from zbv_models.layouts import executor_search as executor_module
from zbv_models.layouts.answer import ranking_json, recomputation
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.executor_rules import (
    LAYOUT_RULES,
    MODEL_RULES,
    NAMES,
    executors_of,
    refusal,
    runs_layout,
)
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import Ranking, best_layouts
from zbv_models.layouts.setting import SECONDS, Setting
from zbv_solver.errors import InfeasibleMemory, InvalidInput, NoLayoutFits
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.incumbent import Cancelled
from zbv_solver.search.options import SearchOptions
from zbv_solver.verify.verifier import verify

PREDICTING = {**MODEL, "prediction_layers": 1}
SEEING = {**MODEL, "vision": {"hidden": 256, "layers": 4, "heads": 4, "patches": 64}}


def every_step(request: Request, executor: str) -> dict[tuple[Layout, str], float]:
    """The step of every layout with its best cut, by layout and recomputation."""
    setting, known, found = replace(request.setting.of_executor(executor), has_loops=True), {}, {}
    for layout in request.layouts:
        if not runs_layout(executor, setting.model, layout):
            continue
        for variant in recomputed_variants(layout, executor, setting):
            estimated = EstimatedLayout.of(variant, setting)
            if estimated.problem not in known:
                known[estimated.problem] = planned_in_full(estimated.problem, executor)
            cut = known[estimated.problem]
            if cut is not None:
                found[layout, str(variant)] = step_of(cut, estimated)
                check_bounds(estimated, setting, found[layout, str(variant)])
    return found


def recomputed_variants(layout: Layout, executor: str, setting: Setting) -> list[Layout]:
    """The layout with every recomputation of an executor.

    With Megatron-LM, ``per-stage`` lets the cut choose how many layers of every stage are recomputed.
    """
    if layout.recompute == "selective":
        return [replace(layout, recompute_modules=modules) for modules in setting.modules_of(executor)]
    if layout.recompute == "per-stage" and executor != "megatron":
        return [replace(layout, recompute="none"), replace(layout, recompute="full")]
    return [layout]


def planned_in_full(problem: LayeredProblem, executor: str) -> ExecutorCut | None:
    chunks = (1,) if problem.pp_degree == 1 else None
    try:
        return cut_for_executor(problem, executor, virtual_stages=chunks, effort="quick")
    except InfeasibleMemory:
        return None
    except InvalidInput:  # numbers of ranks and microbatches that the executor refuses
        return None


def step_of(cut: ExecutorCut, estimated: EstimatedLayout) -> float:
    model, placement = cut.best.problem.model, cut.best.problem.placement
    assert model is not None
    layers = [tuple(name for s in of for name in model.partition[s]) for of in placement.stages_of]
    return cut.best.objective * SECONDS + estimated.once(layers)


def check_bounds(estimated: EstimatedLayout, setting: Setting, step: float) -> None:
    assert estimated.has_room_for_states
    bounds = [setting.least_work(estimated.layout), estimated.mean_bound]
    assert max([*bounds, estimated.memory_bound, estimated.load_bound]) <= step * (1 + 1e-9)


@settings(max_examples=2)
@given(
    st.sampled_from([(1, 2), (3, 1)]),
    st.sampled_from([MODEL, EXPERTS]),
    st.floats(3.0, 30.0),
    st.booleans(),
    st.sampled_from(list(NAMES)),
)
def test_the_best_layout_is_that_of_cutting_every_one(
    nodes: tuple[int, int], model: dict[str, Any], gigabytes: float, is_tied: bool, executor: str
) -> None:
    request = request_of(
        {**model, "tied_embeddings": is_tied, "sequence": 512, "layers": 5},
        # Updates take no time: cuts with equal pipelines may differ in what a rank does once per step.
        cluster_of(*nodes, gigabytes, speed=1e5),
        2 * nodes[0] * nodes[1],
        executor,
        **{"microbatch_size": 1, "tensor_parallel": 1, "context_parallel": 1, "expert_parallel": 1},
        placement="tp-cp-dp-pp",
    )
    steps = every_step(request, executor)
    if not steps:
        with pytest.raises(NoLayoutFits, match="no layout fits"):
            executor_layouts(request.layouts, request.setting, executor)
        return
    ranking = executor_layouts(request.layouts, request.setting, executor)
    best = ranking.best[0]
    assert best.step_time == pytest.approx(min(steps.values()), rel=1e-5)
    assert ranking.no_layout_below <= min(steps.values()) * (1 + 1e-9)
    assert best.lower_bound <= best.step_time
    assert ranking.considered == sum(
        runs_layout(executor, request.setting.model, layout) for layout in request.layouts
    )


def test_all_executors_together_are_as_good_as_each() -> None:
    fixed: dict[str, Any] = {"pipeline_parallel": 2, "microbatch_size": 1}
    request = request_of(MODEL, cluster_of(1, 2, 6.0), 4, **fixed)
    layouts, setting = request.layouts, request.setting
    ranking = executor_layouts(layouts, setting, "any", top=4)
    # Every pair of a layout and an executor is listed once.
    listed = [row["executor"] for row in ranking_json(ranking, request)["layouts"]]
    assert set(listed) == {"zbv", *NAMES}
    steps = [each.step_time for each in ranking.best]
    assert steps == sorted(steps)
    best = best_layouts(layouts, setting).best[0].step_time
    for executor in NAMES:
        best = min(best, executor_layouts(layouts, setting, executor).best[0].step_time)
    assert isclose(steps[0], best, rel_tol=1e-9)
    assert ranking.considered > len(layouts)


def test_megatrons_flags_are_those_of_the_layout() -> None:
    cluster = cluster_of(2, 4, data_parallel_overlap=0.5)
    fixed: dict[str, Any] = {
        "tensor_parallel": 2,
        "context_parallel": 1,
        "expert_parallel": 2,
        "pipeline_parallel": 2,
    }
    request = request_of(
        EXPERTS, cluster, 16, **fixed, zero_stage=1, placement="tp-cp-pp-dp", recompute="full"
    )
    best = best_of(request, "megatron")
    assert best.settings is not None
    words = iter(shlex.split(best.settings.replace("\\\n", " ")))
    lone = {
        *("--sequence-parallel", "--use-distributed-optimizer", "--use-tp-pp-dp-mapping"),
        *("--overlap-grad-reduce", "--overlap-param-gather", "--bf16"),
    }
    flags: dict[str, str] = {}
    for word in words:
        flags[word] = "" if word in lone else next(words)
    layout = best.layout
    assert lone <= set(flags)
    assert flags["--tensor-model-parallel-size"] == "2"
    assert flags["--context-parallel-size"] == "1"
    assert (flags["--expert-model-parallel-size"], flags["--expert-tensor-parallel-size"]) == ("2", "1")
    assert flags["--pipeline-model-parallel-size"] == "2"
    assert flags["--micro-batch-size"] == str(layout.microbatch_size)
    assert flags["--global-batch-size"] == "16"
    assert (flags["--recompute-granularity"], recomputation(best)) == ("full", "full")
    model = best.plan.problem.model
    assert model is not None
    stages = parse_layout(flags["--pipeline-model-parallel-layout"])
    assert [len(stage) for stage in stages] == [len(stage) for stage in model.partition]
    verify(best.plan)
    assert best.plan.orders == best.best.schedule.orders()


@pytest.mark.parametrize(("ranks", "batch"), [(2, 8), (1, 2)])
def test_torchtitans_settings_are_those_of_the_layout(ranks: int, batch: int) -> None:
    fixed: dict[str, Any] = {
        "data_parallel": 2,
        "pipeline_parallel": ranks,
        "tensor_parallel": 2,
        "context_parallel": 1,
    }
    request = request_of(MODEL, cluster_of(1, 4 * ranks), 16, **fixed, microbatch_size=1)
    best = best_of(request, "torchtitan")
    assert best.settings is not None
    older, newer = (configured(best.settings, version) for version in VERSIONS)
    for own in (older.parallelism, newer.parallelism):
        degrees = own.data_parallel_shard_degree, own.tensor_parallel_degree, own.pipeline_parallel_degree
        assert degrees == (2, 2, ranks)
        parts = own.module_fqns_per_model_part
        assert (parts is None) == (ranks == 1)
        if parts is not None:
            assert own.pipeline_parallel_schedule == best.best.schedule.name
            assert sum(map(len, parts)) == MODEL["layers"] + 3
    assert (older.training.global_batch_size, older.training.seq_len) == (16, MODEL["sequence"])
    # With a pipeline, a rank's batch has all microbatches; without one, torchtitan accumulates gradients.
    assert older.training.local_batch_size == (8 if ranks > 1 else 1)
    assert newer.training.num_tokens_per_train_step == 16 * MODEL["sequence"]
    assert newer.parallelism.num_pp_microbatches == (8 if ranks > 1 else None)
    assert best.layout.zero_stage == (1 if ranks > 1 else 3)


def test_the_order_of_an_executor_is_no_faster_than_the_bound_of_any_order() -> None:
    request = request_of(MODEL, cluster_of(1, 2), 4, pipeline_parallel=2, microbatch_size=1)
    ranking = executor_layouts(request.layouts, request.setting, "megatron")
    best = ranking.best[0]
    assert isinstance(best, ExecutorLayout)
    assert best.free is not None
    assert best.free.lower_bound <= best.step_time
    (row,) = ranking_json(ranking, request, with_plans=False)["layouts"]
    assert row["free_order"]["step_time"] == pytest.approx(best.free.step_time)
    assert (row["executor"], row["virtual_stages"]) == ("megatron", best.best.schedule.placement.chunks)
    assert row["settings"] == best.settings


LAYOUT = Layout(2, 1, 1, 2, 2, 1, 4, 1, "per-stage", "tp-cp-dp-pp")


ALONE, OTHER_ORDER = {"zero_stage": 3, "pipeline_parallel": 1}, {"placement": "tp-cp-pp-dp"}
TIED = {**MODEL, "tied_embeddings": True}
RUN: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    *((executor, MODEL, {}, True) for executor in NAMES),
    ("megatron", MODEL, {"zero_stage": 0}, True),
    ("megatron", MODEL, {"zero_stage": 3}, False),
    ("megatron", MODEL, {"zero_stage": 3, "data_parallel": 1}, True),
    ("megatron", MODEL, OTHER_ORDER, True),
    ("megatron", MODEL, {**OTHER_ORDER, "context_parallel": 2}, False),
    ("megatron", EXPERTS, OTHER_ORDER, False),
    ("megatron", EXPERTS, {**OTHER_ORDER, "expert_parallel": 2}, True),
    ("megatron", TIED, {}, True),
    *(("torchtitan", MODEL, {"zero_stage": stage}, False) for stage in (0, 3)),
    ("torchtitan", MODEL, ALONE, True),
    ("torchtitan", MODEL, OTHER_ORDER, False),
    ("torchtitan", {**MODEL, "sequence": 6}, {}, True),
    ("torchtitan", {**MODEL, "sequence": 7}, {}, False),
    ("torchtitan", {**MODEL, "sequence": 6}, {"context_parallel": 2}, False),
    ("torchtitan", EXPERTS, {}, False),
    *(("torchtitan", EXPERTS, change, True) for change in ({"expert_parallel": 2}, {"tensor_parallel": 1})),
    ("torchtitan", PREDICTING, {}, False),
    ("torchtitan", PREDICTING, ALONE, True),
    ("torchtitan", PREDICTING, {**ALONE, "context_parallel": 2}, False),
    ("torchtitan", SEEING, {}, True),
    ("torchtitan", SEEING, {"context_parallel": 2}, False),
    *((executor, TIED, {}, False) for executor in ("torchtitan", "torch")),
    ("torch", MODEL, OTHER_ORDER, True),
    ("torch", MODEL, {"zero_stage": 2}, False),
    ("torch", MODEL, {"zero_stage": 2, "pipeline_parallel": 1}, True),
]


@pytest.mark.parametrize(("executor", "model", "change", "is_run"), RUN)
def test_executors_are_offered_what_they_run(
    executor: str, model: dict[str, Any], change: dict[str, Any], is_run: bool
) -> None:
    transformer = request_of(model, cluster_of(1, 8), 8).setting.model
    assert runs_layout(executor, transformer, replace(LAYOUT, **change)) is is_run


def test_every_rule_has_a_source() -> None:
    for table in (MODEL_RULES, LAYOUT_RULES):
        assert set(table) == set(NAMES)
        assert all(".py" in rule.source for rules in table.values() for rule in rules)


def test_models_that_an_executor_cannot_run_are_refused() -> None:
    seeing = request_of(SEEING, cluster_of(1, 2), 4).setting
    with pytest.raises(InvalidInput, match="Megatron-LM requires a model without a vision encoder"):
        executors_of("megatron", seeing)
    assert executors_of("any", seeing) == ("zbv", "torchtitan", "torch")
    with pytest.raises(InvalidInput, match="found executor 'deepspeed'; must be one of zbv, megatron"):
        executors_of("deepspeed", seeing)


def test_a_pipeline_with_multi_token_prediction_is_refused_for_torchtitan_with_the_way_out() -> None:
    request = request_of(PREDICTING, cluster_of(1, 4), 8, pipeline_parallel=2, recompute="none")
    with pytest.raises(
        InvalidInput, match=r"neither a pipeline .* prediction \(--prediction-layers 0 leaves it out"
    ):
        executor_layouts(request.layouts, request.setting, "torchtitan")
    # 4 GB hold the model only as a pipeline, which torchtitan does not offer.
    request = request_of(PREDICTING, cluster_of(1, 2, 1.0), 8, microbatch_size=1)
    with pytest.raises(NoLayoutFits, match=r"torchtitan .*--prediction-layers 0 leaves it out"):
        executor_layouts(request.layouts, request.setting, "torchtitan")


def test_torchtitan_trains_a_vision_encoder_in_the_first_stage() -> None:
    best = best_of(request_of(SEEING, cluster_of(1, 4), 8, pipeline_parallel=2), "torchtitan")
    assert best.settings is not None
    parts = configured(best.settings, "newer").parallelism.module_fqns_per_model_part
    assert {"vision_encoder", "tok_embeddings"} <= set(parts[0])
    model = best.plan.problem.model
    assert model is not None
    assert {"patches", "vision.3", "projector", "embedding"} <= set(model.partition[0])


@pytest.mark.parametrize(
    ("executor", "fixed", "requires", "common"),
    [
        ("megatron", {"zero_stage": 3, "data_parallel": 4}, "ZeRO stage 0, or 1", "zero stage 3"),
        (
            "torch",
            {"recompute": "selective"},
            "all layers recomputed in full, or none",
            "recompute selective",
        ),
        ("torchtitan", {"recompute_layers": 2}, "all layers recomputed alike, and", "recompute layers 2"),
    ],
)
def test_layouts_that_an_executor_cannot_run_are_refused_with_the_rule(
    executor: str, fixed: dict[str, Any], requires: str, common: str
) -> None:
    request = request_of(MODEL, cluster_of(1, 4), 8, executor, **fixed)
    layouts = request.layouts
    with pytest.raises(InvalidInput) as raised:
        executor_layouts(layouts, request.setting, executor)
    # Some layouts break further rules, but this one is enough to refuse all.
    detail = raised.value.issues[0].detail
    name = NAMES[executor]
    assert detail.startswith(f"{name} can run none of the {len(layouts)} layouts. It requires {requires}")
    assert f". All layouts have {common}. " in detail


def test_a_refusal_has_the_fewest_rules_that_refuse_every_layout() -> None:
    model = request_of(MODEL, cluster_of(1, 8), 8).setting.model
    wrong_stage = replace(LAYOUT, zero_stage=3)
    wrong_order = replace(LAYOUT, placement="tp-cp-pp-dp", context_parallel=2)
    both = replace(wrong_order, zero_stage=3)
    detail = refusal("megatron", model, [wrong_stage, both]).issues[0].detail
    assert "ZeRO stage" in detail
    assert "--use-tp-pp-dp-mapping" not in detail
    detail = refusal("megatron", model, [wrong_stage, wrong_order, both]).issues[0].detail
    assert "ZeRO stage" in detail
    assert "--use-tp-pp-dp-mapping" in detail


def test_a_search_of_cuts_asks_in_all_of_its_parts_whether_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it ends, its bound holds."""
    programs, solve = [], pywraplp.Solver.Solve

    def solved(program: Any) -> Any:
        programs.append(program)
        return solve(program)

    monkeypatch.setattr(pywraplp.Solver, "Solve", solved)
    request = request_of(MODEL, cluster_of(1, 4), 8, microbatch_size=1, pipeline_parallel=4)

    def search(cancelled: Cancelled) -> Ranking:
        options = SearchOptions("quick")
        return executor_layouts(request.layouts, request.setting, "megatron", 2, options, cancelled)

    askers: Counter[str] = Counter()

    def ask() -> bool:
        askers.update({Path(frame.f_code.co_filename).stem for frame, _ in traceback.walk_stack(None)})
        return False

    whole = search(ask)
    assert {"relaxation", "descent", "order_search", "executor_search"} <= set(askers)
    assert askers["relaxation"] > 1.5 * len(programs), "also before it makes a bound of a program's solution"
    for count in (10, 40, 160):
        left = repeat(False, count)
        early = search(partial(next, left, True))
        assert early.no_layout_below <= whole.best[0].step_time * (1 + 1e-9)
        assert early.considered == early.planned + early.pruned + early.unsettled


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_large_orders_wait_and_may_stay_unsettled(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(MODEL, cluster_of(1, 4), 8, microbatch_size=1)
    settled = executor_layouts(request.layouts, request.setting, "megatron", top=2)
    monkeypatch.setattr(executor_module, "LARGE", 64)
    monkeypatch.setitem(executor_module.MOST_BOUNDED, "quick", budget)
    found = executor_layouts(request.layouts, request.setting, "megatron", top=2)
    assert found.considered == settled.considered == found.planned + found.pruned + found.unsettled
    assert found.no_layout_below <= settled.best[0].step_time
    assert (found.unsettled > 0) == (budget == 0)
    if budget:
        assert found.best[0].step_time == pytest.approx(settled.best[0].step_time, rel=1e-9)
        assert found.no_layout_below == pytest.approx(settled.no_layout_below, rel=1e-9)


@pytest.mark.parametrize("executor", ["torch", "torchtitan", "megatron"])
def test_a_search_counts_what_an_executor_holds_for_transfers(executor: str) -> None:
    parts = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 2, "microbatch_size": 1}
    cluster = cluster_of(1, 2)
    request = request_of(MODEL, cluster, 8, executor, **parts, recompute="none")
    (best,) = executor_layouts(request.layouts, request.setting, executor).best
    problem, largest = best.plan.problem, max(each.output_bytes for each in best.estimated.estimate.layers)
    assert problem.model is not None
    buffers = STATES[executor].buffers(8, largest) * problem.placement.chunks
    assert (buffers > 0) == (executor != "megatron")
    one, two = (best.estimated.with_buffers(executor, stages).static[0] for stages in (1, 2))
    assert two - one == STATES[executor].buffers(8, largest)
    model = problem.model.model
    memory = {name: each.costs.memory for name, each in zip(model.names, model.each, strict=True)}
    for static, stages in zip(problem.memory.static, problem.placement.stages_of, strict=True):
        hosted = [memory[name] for stage in stages for name in problem.model.partition[stage]]
        of_layers = sum(each.static for each in hosted) + max(each.workspace for each in hosted)
        assert static - of_layers == pytest.approx(cluster.reserve + buffers)


def test_gradients_that_pass_are_those_of_all_halves_of_a_block() -> None:
    request = request_of(MODEL, cluster_of(1, 4), 8, "torchtitan", pipeline_parallel=2, data_parallel=2)
    setting = request.setting.of_executor("torchtitan")
    layout = next(each for each in request.layouts if each.zero_stage == 1)
    whole = EstimatedLayout.of(layout, setting).estimate.layers
    training = replace(setting.training, by_halves=True)
    halves = EstimatedLayout.of(layout, replace(setting, training=training)).estimate.layers
    assert sum(each.passing * each.copies for each in whole) == sum(
        each.passing * each.copies for each in halves
    )
    assert all(each.passing > 0 for each in whole)
