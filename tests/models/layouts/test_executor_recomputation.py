"""What executors offer to recompute: modules, the first layers of every stage, everything or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.executor_layouts import EXPERTS, MODEL, best_of, cluster_of, flags_of, request_of
from support.paths import ROOT
from zbv_models.layouts.answer import ranking_json
from zbv_models.layouts.cluster import parse_cluster
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import parse_request
from zbv_models.layouts.setting import module_sets
from zbv_solver.errors import InvalidInput
from zbv_solver.verify.verifier import verify

PIPED: dict[str, Any] = {"pipeline_parallel": 2, "microbatch_size": 1, "data_parallel": 1}


def test_selective_recomputation_of_a_dense_model_needs_no_modules_from_the_user() -> None:
    request = request_of(MODEL, cluster_of(1, 2), 4, "megatron", **PIPED, recompute="selective")
    ranking = executor_layouts(request.layouts, request.setting, "megatron")
    best, (row,) = ranking.best[0], ranking_json(ranking, request, with_plans=False)["layouts"]
    assert isinstance(best, ExecutorLayout)
    assert (row["recompute"], row["recompute_modules"]) == ("selective", list(best.layout.recompute_modules))
    flags = flags_of(best)
    assert flags["--recompute-granularity"] == "selective"
    assert flags["--recompute-modules"].split() == row["recompute_modules"]
    # transformer_config.py, __post_init__: selective recomputation has no method and no number of layers.
    assert not {"--recompute-method", "--recompute-num-layers"} & set(flags)
    assert row["composition"]["recomputation"] > 0
    assert sum(row["composition"].values()) == pytest.approx(best.step_time, rel=1e-9)


@pytest.mark.parametrize(
    ("executor", "model", "gigabytes", "size"),
    [("megatron", EXPERTS, 9.0, {"microbatch_size": 2}), ("torchtitan", MODEL, 6.0, {"microbatch_size": 4})],
)
def test_a_user_who_fixes_nothing_gets_the_recomputation_with_the_shortest_step(
    executor: str, model: dict[str, Any], gigabytes: float, size: dict[str, int]
) -> None:
    fixed = {"pipeline_parallel": 2, "data_parallel": 1, "tensor_parallel": 1, **size}
    steps = {}
    for recompute in ("none", "selective", "full", None):
        request = request_of(model, cluster_of(1, 2, gigabytes), 32, executor, **fixed, recompute=recompute)
        best = best_of(request, executor)
        steps[recompute] = best.step_time
    assert steps[None] == steps["selective"] < min(steps["none"], steps["full"])
    if executor == "torchtitan":
        assert best.layout.recompute_modules == ("op",)
        assert "activation_checkpoint = SelectiveAC.Config()" in (best.settings or "")


def test_a_layout_recomputes_the_first_layers_of_every_stage() -> None:
    request = request_of(MODEL, cluster_of(1, 2), 4, "megatron", **PIPED, recompute_layers=2)
    ranking = executor_layouts(request.layouts, request.setting, "megatron")
    best, (row,) = ranking.best[0], ranking_json(ranking, request, with_plans=False)["layouts"]
    assert isinstance(best, ExecutorLayout)
    assert (row["recompute"], row["recompute_layers"]) == ("full", 2)
    flags = flags_of(best)
    assert (flags["--recompute-method"], flags["--recompute-num-layers"]) == ("block", "2")
    blocks = [name for stage in row["partition"] for name in stage if name.startswith("block")]
    of_stages = [[name for name in stage if name in blocks][:2] for stage in row["partition"]]
    assert best.recomputed == {name for stage in of_stages for name in stage}
    shown = sum(row["costs"]["estimated"].get(name, 0) for name in ("block (recomputed)",))
    assert shown == len(best.recomputed)
    assert sum(row["composition"].values()) == pytest.approx(best.step_time, rel=1e-9)
    verify(best.plan)


@pytest.mark.parametrize(
    ("model", "sets"),
    [
        (MODEL, [("mlp",)]),
        (EXPERTS, [("moe_act", "layernorm"), ("layernorm", "moe")]),
        (
            {**EXPERTS, "shared_expert_ffn": 512, "dense_layers": 1},
            [
                ("moe_act", "layernorm"),
                ("moe_act", "layernorm", "mlp", "shared_experts"),
                ("layernorm", "mlp", "moe"),
            ],
        ),
        ({**MODEL, "attention": "plain"}, [("core_attn",), ("core_attn", "mlp")]),
    ],
)
def test_modules_are_those_that_drop_something_of_the_model(
    model: dict[str, Any], sets: list[tuple[str, ...]]
) -> None:
    assert list(module_sets(request_of(model, cluster_of(1, 2), 4).setting.model)) == sets


def test_plain_attention_recomputes_its_scores() -> None:
    fixed: dict[str, Any] = {"pipeline_parallel": 2, "data_parallel": 1, "recompute": "selective"}
    model = {**MODEL, "attention": "plain"}
    best = best_of(request_of(model, cluster_of(1, 2), 4, "megatron", **fixed), "megatron")
    assert flags_of(best)["--recompute-modules"] == "core_attn"
    free = request_of(model, cluster_of(1, 2), 4)
    assert "selective" in {layout.recompute for layout in free.layouts}
    assert free.setting.training.modules == {"core_attn"}


def test_modules_of_the_document_replace_the_sets() -> None:
    document = {
        "model": EXPERTS,
        "parallel": {"recompute_modules": ["mla_up_proj", "moe_act"]},
        "global_batch": 4,
    }
    fixed = Fixed(pipeline_parallel=2, data_parallel=1, recompute="selective")
    request = parse_request(document, cluster_of(1, 2), fixed, executor="megatron")
    # Megatron-LM refuses mla_up_proj without latent attention (transformer_config.py, __post_init__).
    assert flags_of(best_of(request, "megatron"))["--recompute-modules"] == "moe_act"


def test_glm_4_5_recomputes_selectively_on_128_h100() -> None:
    """Megatron-Bridge, issue 5551: 92 layers, TP 2, PP 8, EP 16, selective recomputation."""
    config = json.loads((ROOT / "tests/models/layouts/glm45.json").read_text(encoding="utf-8"))
    cluster = parse_cluster({"nodes": 16, "gpus_per_node": 8, "device": "h100", "allocator_share": 1})
    fixed = Fixed(2, 2, 16, 4, 8, 1, 1, "selective", None, "tp-cp-dp-pp")
    request = parse_request(
        config, cluster, fixed, executor="megatron", global_batch=2048, sequence_length=4096
    )
    ranking = executor_layouts(request.layouts, request.setting, "megatron")
    best = ranking.best[0]
    assert isinstance(best, ExecutorLayout)
    flags = flags_of(best)
    assert flags["--recompute-granularity"] == "selective"
    assert "moe_act" in flags["--recompute-modules"].split()
    # moe_act needs it (transformer_config.py, __post_init__).
    assert "--moe-grouped-gemm" in flags
    assert max(best.plan.metrics.peak_memory) <= 80e9


def test_torchtitan_has_no_modules_and_no_selective_recomputation_of_unknown_blocks() -> None:
    fixed = Fixed(pipeline_parallel=2, recompute="selective")
    document = {"model": MODEL, "parallel": {"recompute_modules": ["mlp"]}, "global_batch": 4}
    with pytest.raises(InvalidInput, match="found mlp; torchtitan has op alone"):
        _ = parse_request(document, cluster_of(1, 2), fixed, executor="torchtitan").layouts
    gated = request_of(
        {**MODEL, "output_gate": True}, cluster_of(1, 2), 4, "torchtitan", recompute="selective"
    )
    with pytest.raises(InvalidInput, match="without selective recomputation blocks that it does not have"):
        executor_layouts(gated.layouts, gated.setting, "torchtitan")
