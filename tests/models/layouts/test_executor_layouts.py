"""Layouts for executors: rules, settings, recomputation, and that the best of all layouts is found."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.executor_layers import flags_of
from support.executor_layouts import (
    EXPERTS,
    LONE,
    MODEL,
    SEEING,
    TIED,
    Document,
    best_of,
    cluster_of,
    request_of,
)
from support.titan_configuration import VERSIONS, configured
from zbv_models.fixed_orders.best_cut import BestCut
from zbv_models.fixed_orders.executor_cut import cut_for_executor
from zbv_models.fixed_orders.megatron_layout import parse_layout
from zbv_models.layouts import executor_rules as rules
from zbv_models.layouts import executor_search as executor_module
from zbv_models.layouts.answer import memory_of_ranks, ranking_json
from zbv_models.layouts.cluster import Cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout, layers_on_ranks
from zbv_models.layouts.executor_memory import STATES
from zbv_models.layouts.executor_rules import NAMES, executors_of, refusal, runs_layout
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Layout
from zbv_models.layouts.request import Request
from zbv_models.layouts.search import best_layouts
from zbv_models.layouts.setting import SECONDS, module_sets
from zbv_solver.errors import InfeasibleMemory, InvalidInput, NoLayoutFits
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.search.options import SearchOptions
from zbv_solver.verify.verifier import verify

SHALLOW = {**MODEL, "layers": 4}
PLAIN, PREDICTING = {**MODEL, "attention": "plain"}, {**MODEL, "prediction_layers": 1}


def every_step(request: Request, executor: str) -> list[float]:
    """The step of every layout with its best cut, and every recomputation."""
    setting, steps = replace(request.setting.of_executor(executor), has_loops=True), []
    for layout in filter(partial(runs_layout, executor, setting.model), request.layouts):
        variants = [layout]
        if layout.recompute == "selective":
            variants = [replace(layout, recompute_modules=of) for of in setting.modules_of(executor)]
        elif layout.recompute == "per-stage" and executor != "megatron":
            # Megatron-LM's cut chooses how many layers of every stage are recomputed.
            variants = [replace(layout, recompute="none"), replace(layout, recompute="full")]
        for estimated in (EstimatedLayout.of(variant, setting) for variant in variants):
            cut = best_cuts_step(estimated.problem, executor)
            if cut is not None:
                steps.append(cut.objective * SECONDS + estimated.once(layers_on_ranks(cut.problem)))
                assert estimated.has_room_for_states
                bounds = [setting.least_work(estimated.layout), estimated.mean_bound]
                assert max([*bounds, estimated.memory_bound, estimated.load_bound]) <= steps[-1] * (1 + 1e-9)
    return steps


@cache
def best_cuts_step(problem: LayeredProblem, executor: str) -> BestCut | None:
    """None if there is no cut, or the executor refuses the numbers of ranks and microbatches."""
    chunks = (1,) if problem.pp_degree == 1 else None
    try:
        return cut_for_executor(problem, executor, virtual_stages=chunks, effort="quick").best
    except (InfeasibleMemory, InvalidInput):
        return None


# Updates take no time: cuts with equal pipelines may differ in what a rank does once per step.
QUICK = partial(cluster_of, speed=1e5)
CLUSTERS = st.builds(QUICK, st.sampled_from([1, 3]), st.sampled_from([1, 2]), st.floats(3.0, 30.0))


@settings(max_examples=2)
@given(CLUSTERS, st.sampled_from([MODEL, EXPERTS]), st.booleans(), st.sampled_from(list(NAMES)))
def test_the_best_cut_is_found(cluster: Cluster, model: Document, is_tied: bool, executor: str) -> None:
    model = {**model, "tied_embeddings": is_tied, "sequence": 512, "layers": 5}
    request = request_of(model, cluster, 2 * cluster.devices, executor, **LONE, placement="tp-cp-dp-pp")
    steps = every_step(request, executor)
    if not steps:
        with pytest.raises(NoLayoutFits, match=r"no layout (that )?fits"):
            executor_layouts(request.layouts, request.setting, executor)
        return
    ranking = executor_layouts(request.layouts, request.setting, executor)
    best = ranking.best[0]
    assert best.step_time == pytest.approx(min(steps), rel=1e-5)
    assert ranking.no_layout_below <= min(steps) * (1 + 1e-9)
    assert best.lower_bound <= best.step_time
    runs = [runs_layout(executor, request.setting.model, layout) for layout in request.layouts]
    assert ranking.considered == sum(runs)


def test_all_executors_together_are_as_good_as_each() -> None:
    request = request_of(SHALLOW, cluster_of(1, 2, 6.0), 4, pipeline_parallel=2, microbatch_size=1)
    layouts, setting = request.layouts, request.setting
    ranking = executor_layouts(layouts, setting, "any", top=4)
    rows = ranking_json(ranking, request, with_plans=False)["layouts"]
    # Every pair of a layout and an executor is listed once.
    assert {row["executor"] for row in rows} == {"zbv", *NAMES}
    assert ranking.considered > len(layouts)
    steps = [each.step_time for each in ranking.best]
    alone = [executor_layouts(layouts, setting, executor).best[0].step_time for executor in NAMES]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(min(best_layouts(layouts, setting).best[0].step_time, *alone), rel=1e-9)
    # The order of an executor is no faster than the bound of any order.
    for each, row in zip(ranking.best, rows, strict=True):
        if isinstance(each, ExecutorLayout):
            assert each.free is not None
            assert each.free.lower_bound <= each.step_time
            assert row["free_order"]["step_time"] == each.free.step_time <= each.step_time * (1 + 1e-9)
            shown = row["virtual_stages"], row["settings"]
            assert shown == (each.best.schedule.placement.chunks, each.settings)


@pytest.mark.parametrize(
    ("executor", "names"), [("megatron", "Megatron-Bridge"), ("torchtitan", "LoRAConverter")]
)
def test_settings_of_a_model_with_adapters_say_that_they_train_all_of_it(executor: str, names: str) -> None:
    changes: list[Document] = [{}, {"lora_rank": 4}, {"frozen": ["embedding", "0"]}]
    for more in changes:
        model: Document = {**SHALLOW, **more}
        request = request_of(model, cluster_of(1, 2), 4, executor, pipeline_parallel=2, microbatch_size=1)
        best = best_of(request)
        assert best.settings is not None
        assert (names in best.remark) == bool(best.remark) == bool(more)
        assert ("nothing below them trains" in best.remark) == ("frozen" in more and executor == "megatron")


def test_a_search_of_cuts_asks_in_all_of_its_parts_whether_to_end() -> None:
    """Wherever it ends, its bound holds."""
    request = request_of(SHALLOW, cluster_of(1, 2), 4, microbatch_size=1, pipeline_parallel=2)
    askers: set[str] = set()

    def ask() -> bool:
        askers.update(Path(frame.f_code.co_filename).stem for frame, _ in traceback.walk_stack(None))
        return False

    quick = "megatron", 2, SearchOptions("quick")
    search = partial(executor_layouts, request.layouts, request.setting, *quick)
    whole = search(ask)
    assert {"relaxation", "descent", "order_search", "executor_search"} <= askers
    for count in (10, 40, 160):
        early = search(partial(next, repeat(False, count), True))
        assert early.no_layout_below <= whole.best[0].step_time * (1 + 1e-9)
        assert early.considered == early.planned + early.pruned + early.unsettled


def test_large_orders_wait_and_may_stay_unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of(SHALLOW, cluster_of(1, 4), 4, microbatch_size=1, tensor_parallel=1)
    search = partial(executor_layouts, request.layouts, request.setting, "megatron", top=2)
    settled = search()
    monkeypatch.setattr(executor_module, "LARGE", 64)
    for budget in (0.0, 1e9):
        monkeypatch.setitem(executor_module.MOST_BOUNDED, "quick", budget)
        found = search()
        assert found.considered == settled.considered == found.planned + found.pruned + found.unsettled
        assert found.no_layout_below <= settled.best[0].step_time
        assert (found.unsettled > 0) == (budget == 0)
    assert found.best[0].step_time == pytest.approx(settled.best[0].step_time, rel=1e-9)
    assert found.no_layout_below == pytest.approx(settled.no_layout_below, rel=1e-9)


LAYOUT = Layout(2, 1, 1, 2, 2, 1, 4, 1, "per-stage", "tp-cp-dp-pp")
ALONE, OTHER_ORDER = {"zero_stage": 3, "pipeline_parallel": 1}, {"placement": "tp-cp-pp-dp"}
RUN: list[tuple[str, Document, Document, bool]] = [
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
def test_executors_run(executor: str, model: Document, change: Document, is_run: bool) -> None:
    of_executor = (*rules.MODEL_RULES[executor], *rules.LAYOUT_RULES[executor])
    assert all(".py" in rule.source for rule in of_executor), "every rule has a source"
    transformer = request_of(model, cluster_of(1, 8), 8).setting.model
    assert runs_layout(executor, transformer, replace(LAYOUT, **change)) is is_run


def test_a_refusal_has_the_fewest_rules_that_refuse_every_layout() -> None:
    setting = request_of(MODEL, cluster_of(1, 8), 8).setting
    wrong_stage = replace(LAYOUT, zero_stage=3)
    wrong_order = replace(LAYOUT, placement="tp-cp-pp-dp", context_parallel=2)
    both = replace(wrong_order, zero_stage=3)
    for layouts, is_in in (([wrong_stage, both], False), ([wrong_stage, wrong_order, both], True)):
        detail = refusal("megatron", setting.model, layouts).issues[0].detail
        assert ("ZeRO stage" in detail, "--use-tp-pp-dp-mapping" in detail) == (True, is_in)
    seeing = request_of(SEEING, cluster_of(1, 2), 4).setting
    assert executors_of("any", seeing) == ("zbv", "torchtitan", "torch")
    packed = request_of({**MODEL, "frozen": ["0"], "frozen_dtype": "nf4"}, cluster_of(1, 2), 4).setting
    assert executors_of("any", packed) == ("zbv", "torch")
    # 4 GB hold the model only as a pipeline, which torchtitan does not offer.
    request = request_of(PREDICTING, cluster_of(1, 2, 1.0), 8, microbatch_size=1)
    with pytest.raises(NoLayoutFits, match=r"torchtitan .*--prediction-layers 0 leaves it out"):
        executor_layouts(request.layouts, request.setting, "torchtitan")


def test_megatrons_flags_are_those_of_the_layout() -> None:
    fixed: Document = {"tensor_parallel": 2, "context_parallel": 1, "expert_parallel": 2}
    fixed |= {"pipeline_parallel": 2, "zero_stage": 1, "placement": "tp-cp-pp-dp", "recompute": "full"}
    cluster, states = cluster_of(2, 4, data_parallel_overlap=0.5), {"precision": "bf16-states"}
    best = best_of(request_of(EXPERTS, cluster, 16, "megatron", parallel=states, **fixed))
    lone = ["sequence-parallel", "use-distributed-optimizer", "use-tp-pp-dp-mapping", "overlap-grad-reduce",
            "use-precision-aware-optimizer", "overlap-param-gather", "bf16"]  # fmt: skip
    expected = {
        **dict.fromkeys(lone, ""),
        **{f"{name}-model-parallel-size": "2" for name in ("tensor", "expert", "pipeline")},
        **{"context-parallel-size": "1", "expert-tensor-parallel-size": "1", "global-batch-size": "16"},
        **{"micro-batch-size": str(best.layout.microbatch_size), "recompute-granularity": "full"},
    }
    flags, model = flags_of(best), best.plan.problem.model
    assert {name: flags.get(f"--{name}") for name in expected} == expected
    assert model is not None
    stages = parse_layout(flags["--pipeline-model-parallel-layout"])
    assert [len(stage) for stage in stages] == [len(stage) for stage in model.partition]
    verify(best.plan)
    assert best.plan.orders == best.best.schedule.orders()


@pytest.mark.parametrize(("ranks", "batch", "model"), [(2, 8, MODEL), (1, 1, MODEL), (2, 8, SEEING)])
def test_torchtitans_settings_are_those_of_the_layout(ranks: int, batch: int, model: Document) -> None:
    """With a pipeline, a rank's batch has all microbatches; without one, it accumulates gradients."""
    fixed: Document = {**LONE, "data_parallel": 2, "tensor_parallel": 2}
    cluster = cluster_of(1, 4 * ranks)
    best = best_of(request_of(model, cluster, 16, "torchtitan", **fixed, pipeline_parallel=ranks))
    older, newer = (configured(best.settings or "", version) for version in VERSIONS)
    for own in (older.parallelism, newer.parallelism):
        degrees = own.data_parallel_shard_degree, own.tensor_parallel_degree, own.pipeline_parallel_degree
        assert degrees == (2, 2, ranks)
        parts = own.module_fqns_per_model_part
        assert (parts is None) == (ranks == 1)
        if parts is not None:
            assert own.pipeline_parallel_schedule == best.best.schedule.name
            assert sum(map(len, parts)) == MODEL["layers"] + 3 + 4 * ("vision" in model)
            assert ("vision_encoder" in parts[0]) == ("vision" in model)
    training = older.training
    assert (training.global_batch_size, training.seq_len, training.local_batch_size) == (16, 2048, batch)
    assert newer.training.num_tokens_per_train_step == 16 * MODEL["sequence"]
    assert newer.parallelism.num_pp_microbatches == (8 if ranks > 1 else None)
    assert best.layout.zero_stage == (1 if ranks > 1 else 3)


@pytest.mark.parametrize("executor", ["torch", "torchtitan", "megatron"])
def test_a_search_counts_what_an_executor_holds_for_transfers(executor: str) -> None:
    cluster = cluster_of(1, 2)
    best = best_of(request_of(MODEL, cluster, 8, executor, **LONE, pipeline_parallel=2, recompute="none"))
    problem, largest = best.plan.problem, max(each.output_bytes for each in best.estimated.estimate.layers)
    assert problem.model is not None
    buffers = STATES[executor].buffers(8, largest) * problem.placement.chunks
    assert (buffers > 0) == (executor != "megatron")
    model, cut = problem.model.model, problem.model.cut.bounds
    for static, stages in zip(problem.memory.static, problem.placement.stages_of, strict=True):
        hosted = [each.costs.memory for stage in stages for each in model.each[cut[stage] : cut[stage + 1]]]
        of_layers = sum(each.static for each in hosted) + max(each.workspace for each in hosted)
        assert static - of_layers == pytest.approx(cluster.reserve + buffers)
    held, peaks = memory_of_ranks(best), best.plan.metrics.peak_memory
    assert [sum(each.values()) for each in held] == pytest.approx(list(peaks))
    gradients = sum(each.static.gradients * each.copies for each in best.estimated.estimate.layers)
    assert sum(each["gradients"] for each in held) == pytest.approx(gradients)
    assert min(each["buffers"] for each in held) >= cluster.reserve + buffers


@pytest.mark.parametrize(("model", "sets"), [
    (MODEL, [("mlp",)]),
    (EXPERTS, [("moe_act", "layernorm"), ("layernorm", "moe")]),
    ({**EXPERTS, "shared_expert_ffn": 512, "dense_layers": 1},
     [("moe_act", "layernorm"), ("moe_act", "layernorm", "mlp", "shared_experts"),
      ("layernorm", "mlp", "moe")]),
    (PLAIN, [("core_attn",), ("core_attn", "mlp")]),
])  # fmt: skip
def test_modules_of_a_model(model: Document, sets: list[tuple[str, ...]]) -> None:
    assert list(module_sets(request_of(model, cluster_of(1, 2), 4).setting.model)) == sets


KEPT, SELECTIVE = {"recompute_modules": ["mla_up_proj", "moe_act"]}, {"recompute": "selective"}


@pytest.mark.parametrize(("model", "parallel", "fixed", "flags"), [
    # transformer_config.py, __post_init__: selective recomputation has no method and no number of layers.
    (MODEL, {}, SELECTIVE, ("selective", "mlp", None, None)),
    (PLAIN, {}, SELECTIVE, ("selective", "core_attn", None, None)),
    # Megatron-LM refuses mla_up_proj without latent attention (transformer_config.py, __post_init__).
    (EXPERTS, KEPT, SELECTIVE, ("selective", "moe_act", None, None)),
    (MODEL, {}, {"recompute_layers": 2}, ("full", None, "block", "2")),
    (MODEL, {}, {"recompute": "full"}, ("full", None, "uniform", "1")),
    (MODEL, {}, {"recompute": "none"}, (None, None, None, None)),
])  # fmt: skip
def test_recomputation(model: Document, parallel: Document, fixed: Document, flags: tuple[Any, ...]) -> None:
    fixed = {"pipeline_parallel": 2, "microbatch_size": 1, "data_parallel": 1, **fixed}
    request = request_of(model, cluster_of(1, 2), 4, "megatron", parallel=parallel, **fixed)
    ranking = executor_layouts(request.layouts, request.setting, "megatron")
    (best,), (row,) = ranking.best, ranking_json(ranking, request)["layouts"]
    assert isinstance(best, ExecutorLayout)
    names = ("granularity", "modules", "method", "num-layers")
    assert tuple(flags_of(best).get(f"--recompute-{name}") for name in names) == flags
    assert flags_of(best).get("--attention-backend") == ("unfused" if model is PLAIN else None)
    granularity, modules, _, layers = flags
    assert row["recompute"] == (granularity or "none")
    assert row.get("recompute_modules") == (modules and modules.split())
    assert row.get("recompute_layers") == (layers and int(layers) if "recompute_layers" in fixed else None)
    assert (row["composition"]["recomputation"] > 0) == (granularity is not None)
    assert sum(row["composition"].values()) == pytest.approx(best.step_time, rel=1e-9)
    if granularity == "full":
        most = fixed.get("recompute_layers", 99)
        blocks = [[name for name in stage if name.startswith("block")] for stage in row["partition"]]
        again = {name for stage in blocks for name in stage[:most]}
        assert best.recomputed == again
        assert row["costs"]["estimated"]["block (recomputed)"] == len(again)
        verify(best.plan)


def test_the_best_recomputation_is_found() -> None:
    fixed: Document = {**LONE, "pipeline_parallel": 2, "data_parallel": 1, "microbatch_size": 4}
    steps = {}
    for recompute in ("none", "selective", "full", None):
        request = request_of(MODEL, cluster_of(1, 2, 6.0), 32, "torchtitan", **fixed, recompute=recompute)
        steps[recompute] = (best := best_of(request)).step_time
    assert steps[None] == steps["selective"] < min(steps["none"], steps["full"])
    assert best.layout.recompute_modules == ("op",)
    assert "activation_checkpoint = SelectiveAC.Config()" in (best.settings or "")
