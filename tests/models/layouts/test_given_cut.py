"""``zbv layout --cut``: what a given cut holds under an executor, against torchtitan's own table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zbv_models.estimate.model_layers import layer_kinds, shapes_of
from zbv_models.fixed_orders.schedules import Schedule, torch_schedule
from zbv_models.layouts.cluster import ALLOCATOR_SHARE, equal_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_memory import in_order
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import parse_request
from zbv_solver.commands.cli import main
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.verify.verifier import verify

Capture = pytest.CaptureFixture[str]
GIB = 2**30
OF_405B = {
    "presets": ["llama-3.1-405b"],
    "model": {"product_dtype": "fp8"},
    "global_batch": 256,
    "sequence_length": 8192,
}
H100_96 = {"nodes": 64, "gpus_per_node": 8, "device": "h100", "memory": 95.04 * GIB}
PARTS = "--tensor-parallel 8 --context-parallel 1 --data-parallel 8 --pipeline-parallel 8 --microbatch-size 4"
SMALL = {
    "model": {"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 1024, "sequence": 512},
    "global_batch": 8,
}
OF_SMALL = "--tensor-parallel 1 --context-parallel 1 --data-parallel 2 --pipeline-parallel 2 --recompute none"


def files_of(folder: Path, model: dict[str, Any], cluster: dict[str, Any]) -> list[str]:
    for name, document in (("model", model), ("cluster", cluster)):
        (folder / f"{name}.json").write_text(json.dumps(document))
    return [str(folder / "model.json"), "--cluster", str(folder / "cluster.json")]


@pytest.mark.parametrize(
    ("cut", "schedule", "published"),
    [("15,16x6,15", "1F1B", 82.5), ("7,8x14,7", "Interleaved1F1B", 72.7)],
)
def test_torchtitans_table_of_llama_405b_is_met_within_10_percent(
    cut: str, schedule: str, published: float, tmp_path: Path, capsys: Capture
) -> None:
    """Table 5 of benchmarks/llama3_h100_202412_torchtitan.md, with the cuts of commit 9dec370.

    ``train_configs/llama3_405b.toml`` gathers parameters in float8. The memory is what torchtitan's logger
    reads: the most that PyTorch reserved on any device.
    """
    path = tmp_path / "scored.json"
    flags = [
        "--executor",
        "torchtitan",
        *PARTS.split(),
        "--recompute",
        "full",
        "--precision",
        "float8-gather",
    ]
    files = files_of(tmp_path, OF_405B, H100_96)
    assert main(["layout", *files, *flags, "--cut", cut, "--time-limit", "0.1", "-o", str(path)]) == 0
    scored = json.loads(path.read_text())
    assert scored["schedule"] == schedule
    assert scored["reserved_memory"] == pytest.approx(published * GIB, rel=0.1)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"PyTorch reserves {scored['reserved_memory'] / 1e9:.3g} of 102 GB" in printed
    assert f"tensors of {scored['peak_memory'] / 1e9:.3g} GB" in printed
    assert "enable_fsdp_float8_all_gather" in printed
    assert scored["settings"] is None


def layered(blocks: int, ranks: int, microbatches: int) -> LayeredProblem:
    """Blocks that hold a parameter and ten times as much as gradients."""
    costs = LayerCosts(1, 1, 1, None, LayerMemory(2, -1, -1, static=11))
    return LayeredProblem(
        Model((Layer("block", costs, output_bytes=1, repeat=blocks),)),
        ranks,
        microbatches,
        (5.0,) * ranks,
        placement="auto",
    )


def most_alive(schedule: Schedule, sizes: list[int], rank: int) -> float:
    """The obvious way: walk through the actions, and add up the stages that are between their backwards."""
    orders = schedule.orders()
    begin, end = orders.offset[rank], orders.offset[rank + 1]
    actions = list(zip(orders.stage[begin:end].tolist(), orders.letter[begin:end].tolist(), strict=True))
    most = 0
    for place in range(len(actions)):
        alive = {
            stage
            for stage, _ in actions
            if any(s == stage and letter for s, letter in actions[: place + 1])
            and any(s == stage and letter for s, letter in actions[place:])
        }
        most = max(most, sum(sizes[stage] for stage in alive))
    return most


@given(st.data())
def test_a_rank_counts_the_gradients_that_its_order_holds_at_once(data: st.DataObject) -> None:
    name, chunks = data.draw(
        st.sampled_from([("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2)])
    )
    ranks = data.draw(st.integers(2, 3))
    microbatches = ranks * data.draw(st.integers(2 if name == "ZBVZeroBubble" else 1, 2))
    schedule = torch_schedule(name, ranks, microbatches, chunks)
    n_stages = schedule.placement.n_stages
    sizes = [data.draw(st.integers(1, 4)) for _ in range(n_stages)]
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    problem = layered(sum(sizes), ranks, microbatches).cut_into(schedule.placement, Cut.at(bounds))
    held = in_order(problem, schedule.orders(), {"block": 10.0})
    for rank, stages in enumerate(schedule.placement.stages_of):
        kept = sum(sizes[stage] for stage in stages)
        expected = 5 + kept + 10 * most_alive(schedule, sizes, rank)
        assert held.memory.static[rank] == pytest.approx(expected)
    assert in_order(problem, schedule.orders(), {"block": 0.0}) is problem
    assert held.costs == problem.costs


def test_one_round_of_an_interleaved_schedule_holds_the_gradients_of_one_stage() -> None:
    """The plan in the answer says so, too, and passes the verifier."""
    cluster = equal_cluster({"nodes": 2, "gpus_per_node": 8, "device": "h100"})
    fixed = Fixed(1, 1, 1, 4, 4, 1, 1, "none")
    document = {"presets": ["llama-3.1-8b"], "global_batch": 16, "sequence_length": 4096}
    request = parse_request(document, cluster, fixed, executor="torchtitan")
    (best,) = executor_layouts(request.layouts, request.setting, "torchtitan").best
    assert isinstance(best, ExecutorLayout)
    assert best.plan.problem.placement.chunks > 1
    verify(best.plan)
    whole, held = best.best.problem.memory.static, best.plan.problem.memory.static
    passing = best.estimated.passing["block"]
    for rank, stages in enumerate(best.plan.problem.placement.stages_of):
        blocks = [
            sum(name.startswith("block") for name in best.plan.problem.model.partition[stage])
            for stage in stages
            if best.plan.problem.model is not None
        ]
        freed = passing * (sum(blocks) - max(blocks))
        assert whole[rank] - held[rank] >= freed * 0.99


def test_memory_is_compared_with_what_the_allocator_leaves_to_tensors(tmp_path: Path) -> None:
    cluster = {"nodes": 1, "gpus_per_node": 4, "device": "h100", "reserve": 1e9}
    given_size = equal_cluster({**cluster, "memory": 11e9})
    assert given_size.size == 11e9
    assert given_size.memory == pytest.approx(1e9 + 10e9 / ALLOCATOR_SHARE)
    assert given_size.reserved(given_size.memory) == pytest.approx(11e9)
    alone = equal_cluster({**cluster, "memory": 11e9, "allocator_share": 1})
    assert alone.memory == 11e9
    request = parse_request(SMALL, given_size, Fixed(pipeline_parallel=2))
    problem = EstimatedLayout.of(request.layouts[0], request.setting).problem
    assert (problem.static, problem.limit) == ((1e9,) * 2, (given_size.memory,) * 2)
    path, tight = tmp_path / "layouts.json", {**cluster, "memory": 2e9}
    assert main(["layout", *files_of(tmp_path, SMALL, tight), "-o", str(path)]) == 0
    best = json.loads(path.read_text())["layouts"][0]
    expected = 1e9 + ALLOCATOR_SHARE * (best["peak_memory"] - 1e9)
    assert best["reserved_memory"] == pytest.approx(expected)
    assert best["reserved_memory"] <= 2e9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--executor zbv", "Name an executor with a fixed order"),
        ("--executor megatron", "a cut is that of one. Fix --microbatch-size, --zero-stage"),
        ("--executor megatron --microbatch-size 1 --zero-stage 1", "the model has 8"),
        ("--executor torchtitan --precision float8-gather", "Set product_dtype fp8"),
    ],
)
def test_what_a_given_cut_lacks_is_said(flags: str, message: str, tmp_path: Path, capsys: Capture) -> None:
    files = files_of(tmp_path, SMALL, {"nodes": 1, "gpus_per_node": 4, "device": "h100"})
    placed = "--placement tp-cp-dp-pp"
    arguments = ["layout", *files, *OF_SMALL.split(), *placed.split(), *flags.split(), "--cut", "4,5"]
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("executor", "rule"),
    [
        ("zbv", "zbv requires parameters that are gathered"),
        ("megatron", "Megatron-LM requires parameters that"),
    ],
)
def test_only_fsdp_gathers_parameters_in_float8(
    executor: str, rule: str, tmp_path: Path, capsys: Capture
) -> None:
    model = {**SMALL, "model": {**SMALL["model"], "product_dtype": "fp8"}}  # type: ignore[dict-item]
    files = files_of(tmp_path, model, {"nodes": 1, "gpus_per_node": 4, "device": "h100"})
    assert main(["layout", *files, "--executor", executor, "--precision", "float8-gather"]) == 2
    assert rule in " ".join(capsys.readouterr().err.split())


def test_experts_and_tables_are_not_gathered_in_float8() -> None:
    document = {
        "model": {
            **{"hidden": 512, "layers": 8, "heads": 8, "vocabulary": 1024, "sequence": 512},
            **{"experts": 8, "experts_per_token": 2, "product_dtype": "fp8"},
        },
        "global_batch": 8,
    }
    cluster = equal_cluster({"nodes": 1, "gpus_per_node": 4, "device": "h100"})
    narrow = parse_request(document, cluster, executor="torch", parallel={"precision": "float8-gather"})
    training = narrow.setting.of_executor("torch").training
    wide = replace(training, state=replace(training.state, gathered=0.0))
    layout = next(each for each in narrow.layouts if each.pipeline_parallel == 2 and each.zero_stage == 1)
    model, degrees = narrow.setting.model, layout.degrees(cluster)
    for kind in layer_kinds(model, 4.0, False):
        parameters = [half.part(shapes_of(model, kind, degrees, 1)).parameters for _, half in kind.halves]
        for each in parameters:
            kept = [
                sum(s.kept.whole.parameters * s.count for s in of.shares(each, degrees))
                for of in (wide, training)
            ]
            assert kept[0] - kept[1] == each.dense_on(degrees) - each.tables_on(degrees)


@pytest.mark.parametrize(
    ("tensor", "precision", "is_narrow"),
    [(2, None, False), (2, "float8-gather", True), (1, "float8-gather", False)],
)
def test_torchao_keeps_operands_of_float8_products_as_they_came(
    tensor: int, precision: str | None, is_narrow: bool
) -> None:
    """``matmul_with_hp_or_float8_args`` saves its input, which only tensor parallelism casts before."""
    cluster = equal_cluster({"nodes": 1, "gpus_per_node": 8, "device": "h100"})
    fixed = Fixed(tensor, 1, 1, 4 // tensor, 2, 1, 1, "none")
    kept = []
    for product_dtype in ("fp8", "bfloat16"):
        document = {"presets": ["llama-3.1-8b"], "model": {"product_dtype": product_dtype}, "global_batch": 8}
        chosen = {"precision": precision} if precision and product_dtype == "fp8" else None
        request = parse_request(document, cluster, fixed, parallel=chosen, executor="torchtitan")
        estimated = EstimatedLayout.of(request.layouts[0], request.setting.of_executor("torchtitan"))
        kept.append(estimated.estimate.layers[1].plain.after_forward)
    assert (kept[0] < kept[1]) == is_narrow
    assert is_narrow or kept[0] == kept[1]
