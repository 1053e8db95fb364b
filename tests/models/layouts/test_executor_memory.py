"""What a device holds under each executor, against published figures, and the settings that ask for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from zbv_models.estimate.config import PRECISIONS, estimate_layers, parse_config
from zbv_models.estimate.sections import with_presets
from zbv_models.estimate.states import OPTIMIZER_STATES, HeldBytes, StateBytes
from zbv_models.layouts.cluster import Cluster, equal_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_memory import STATES, fsdp, megatron, torch, worker
from zbv_models.layouts.executor_rules import executors_of, layouts_of_executors
from zbv_models.layouts.executor_search import ExecutorLayout, executor_layouts
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import Request, parse_request
from zbv_solver.errors import InvalidInput, NoLayoutFits

GB = 1e9


def chosen(name: str, **changes: Any) -> StateBytes:
    return replace(StateBytes(**PRECISIONS[name].model_dump()), **changes)


def held(kept: HeldBytes, replicas: int, *, is_shared: bool) -> float:
    """All bytes per parameter, with those of the update."""
    return kept.of(1, replicas).total + kept.copied / (replicas if is_shared else 1)


@pytest.mark.parametrize(
    ("state", "alone", "distributed"),
    [
        # The table of Megatron-LM, docs/user-guide/features/dist_optimizer.md.
        (chosen("mixed", dtype="float16"), 20, (4, 16)),
        (chosen("mixed-fp32-gradients"), 18, (6, 12)),
        (chosen("single", dtype="float32"), 16, (8, 8)),
        # --grad-reduce-in-bf16: as with fp16, the update works on a copy in float32.
        (chosen("mixed"), 20, (4, 16)),
        # The precision-aware optimizer holds 2 bytes of the master copy, and works on 16-bit gradients.
        (chosen("bf16-states"), 6 + 2 + 4, (6, 6)),
        (chosen("bf16-states", gradients=2), 4 + 2 + 4, (4, 6)),
        (chosen("fp8-states"), 6 + 2 + 2, (6, 4)),
        (chosen("mixed-fp32-gradients", optimizer="muon"), 14, (6, 8)),
        # FusedSGD makes a momentum even if it is 0; SGD is not distributed.
        (chosen("mixed-fp32-gradients", optimizer="sgd"), 14, (6, 8)),
        (chosen("mixed-fp32-gradients", optimizer="sgd-momentum"), 14, (6, 8)),
        (chosen("mixed-fp32-gradients", offloaded=0.5), 12, (6, 6)),
        (chosen("mixed-fp32-gradients", offloaded=1.0), 6, (6, 0)),
    ],
)
def test_megatrons_bytes_per_parameter(
    state: StateBytes, alone: float, distributed: tuple[float, float]
) -> None:
    assert held(megatron(state, 0), 8, is_shared=False) == alone
    whole, divided = distributed
    for replicas in (1, 4, 64):
        expected = whole + divided / replicas
        assert held(megatron(state, 1), replicas, is_shared=True) == pytest.approx(expected)


def test_fsdp_keeps_parameters_and_gradients_of_a_pipeline_whole() -> None:
    """Shards of parameters, gradients and two states in float32, all the time."""
    state = chosen("mixed-fp32-gradients")
    assert fsdp(state, 1).of(1, 8).total == 2 + 4 + (4 + 4 + 8) / 8
    assert fsdp(state, 3).of(1, 8).total == (4 + 4 + 8) / 8
    assert fsdp(replace(state, state=2), 1).of(1, 8).total == 2 + 4 + (4 + 4 + 4) / 8
    assert torch(state, 0).of(1, 8).total == 18
    gathered = fsdp(replace(state, gathered=1.0), 1)
    assert gathered.of(1, 8).total == 1 + 4 + (4 + 4 + 8) / 8
    assert gathered.buffers == 2 + 4 + 2 * 1
    assert fsdp(replace(state, gathered=1.0), 1, tables=True) == fsdp(state, 1, tables=True)
    assert fsdp(state, 1).reduced == 4


def test_zbvs_worker_holds_its_part_besides_the_whole() -> None:
    state = chosen("mixed-fp32-gradients")
    assert worker(state, 0).of(1, 8).total == 18
    assert worker(state, 1).of(1, 8).total == 6 + (2 + 4 + 12) / 8


def test_static_memory_of_a_16b_model_is_that_of_flagscale() -> None:
    """FlagScale#454: 46983.28 MiB of parameters, gradients and optimizer states, by Megatron-LM's report."""
    model = {
        **{"hidden": 5120, "layers": 54, "heads": 40, "kv_heads": 8, "ffn": 13824, "gated": True},
        **{"norm": "rmsnorm", "bias": False, "qkv_bias": True, "positions": "rotary", "vocabulary": 152064},
        "sequence": 4096,
    }
    parallel = {
        **{"pp_degree": 1, "microbatches": 1, "tensor_parallel": 4, "sequence_parallel": True},
        **{"data_parallel": 2, "zero_stage": 1, "recompute": "none"},
    }
    document = {"model": model, "parallel": parallel, "device": {"data_parallel_bandwidth": 100}}
    layers = estimate_layers(parse_config(with_presets(document, ["h100"], {})))
    assert sum(each.static.total * each.copies for each in layers) == pytest.approx(
        46983.28 * 2**20, rel=1e-4
    )


def flags_to_state(flags: dict[str, str]) -> StateBytes:
    """What Megatron-LM makes of flags (arguments.py, ``validate_args``; ``OptimizerConfig``)."""
    dtype = "bfloat16" if "--bf16" in flags else "float16" if "--fp16" in flags else "float32"
    bytes_of = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
    is_aware = "--use-precision-aware-optimizer" in flags
    gradients = 4.0
    if dtype == "bfloat16" and (
        "--grad-reduce-in-bf16" in flags or flags.get("--main-grads-dtype") == "bf16"
    ):
        gradients = 2.0
    if dtype == "float16" and "--accumulate-allreduce-grads-in-fp32" not in flags:
        gradients = 2.0
    assert is_aware or not {"--main-grads-dtype", "--exp-avg-dtype", "--optimizer-cpu-offload"} & set(flags)
    optimizer = flags.get("--optimizer", "adam")
    if optimizer == "sgd" and flags.get("--sgd-momentum") != "0":
        optimizer = "sgd-momentum"
    return StateBytes(
        parameters=4.0 if dtype == "float32" else 2.0,
        gradients=gradients,
        master=0.0 if dtype == "float32" else bytes_of[flags.get("--main-params-dtype", "fp32")],
        state=bytes_of[flags.get("--exp-avg-dtype", "fp32")],
        optimizer=optimizer,
        dtype=dtype,
        offloaded=float(flags.get("--optimizer-offload-fraction", "0")),
    )


EVERY_STATE = [
    StateBytes(*sizes)
    for sizes in product(
        (2.0, 4.0),
        (2.0, 4.0),
        (0.0, 2.0, 4.0),
        (1.0, 2.0, 3.0, 4.0),
        sorted(OPTIMIZER_STATES),
        ("bfloat16", "float16", "float32"),
        (0.0, 0.5),
        (0.0, 1.0),
    )
]


def test_megatrons_flags_ask_for_the_states_that_the_account_holds() -> None:
    expressed = [state for state in EVERY_STATE if not STATES["megatron"].refusal(state)]
    assert {state.optimizer for state in expressed} == set(OPTIMIZER_STATES)
    for state in expressed:
        assert flags_to_state(STATES["megatron"].settings(state)) == state


def test_torchtitans_keys_ask_for_the_states_that_the_account_holds() -> None:
    expressed = [state for state in EVERY_STATE if not STATES["torchtitan"].refusal(state)]
    assert len(expressed) == 8
    for state in expressed:
        keys = STATES["torchtitan"].settings(state)
        assert (state.gradients, state.optimizer, state.offloaded) == (4, "adam", 0)
        # What asks for parameters in float8 is in no version that zbv writes settings for.
        assert state.gathered in (0, 1)
        assert (state.parameters == 4) == (keys.get("training.mixed_precision_param") == "float32")
        updated = 2 if keys.get("training.dtype") == "bfloat16" else 4
        assert (state.master or state.parameters) == updated
        assert state.state == (2 if updated == 2 or "optimizer.implementation" in keys else 4)


def cluster_of(nodes: int) -> Cluster:
    """All of its memory is for tensors."""
    return equal_cluster({"nodes": nodes, "gpus_per_node": 8, "device": "h100", "allocator_share": 1})


def asked(nodes: int, fixed: Fixed | None = None, **document: Any) -> Request:
    return parse_request({"presets": ["llama-3.1-8b"], **document}, cluster_of(nodes), fixed)


@pytest.mark.parametrize(
    ("executor", "parallel", "message"),
    [
        ("torchtitan", {"optimizer": "muon"}, r"torchtitan requires adam \(found muon\)"),
        ("torchtitan", {"precision": "mixed"}, "requires parameters of 2 bytes and gradients of 4"),
        ("torchtitan", {"offloaded_states": 0.5}, "requires no offloaded states"),
        ("torch", {"offloaded_states": 0.5}, "requires no offloaded states"),
        ("megatron", {"precision": "half"}, "because its optimizers update a master copy"),
        ("megatron", {"precision": "bf16-states", "optimizer": "lion"}, "requires adam and bfloat16"),
    ],
)
def test_states_that_an_executor_cannot_have_are_refused_by_name(
    executor: str, parallel: dict[str, Any], message: str
) -> None:
    setting = asked(1, global_batch=8, parallel=parallel).setting
    with pytest.raises(InvalidInput, match=message):
        executors_of(executor, setting)
    assert executor not in executors_of("any", setting)


def test_the_precision_aware_optimizer_is_distributed() -> None:
    """Megatron-LM, ``get_megatron_optimizer``: it is only supported with the distributed optimizer."""
    given = {"precision": "bf16-states"}
    request = asked(1, global_batch=8, parallel=given)
    found = layouts_of_executors("megatron", request.setting, request.layouts)
    assert {layout.zero_stage for _, layout in found if layout.data_parallel > 1} == {1}
    whole = asked(1, Fixed(zero_stage=0, data_parallel=2), global_batch=8, parallel=given)
    with pytest.raises(InvalidInput, match="requires ZeRO stage 1 for these optimizer states"):
        layouts_of_executors("megatron", whole.setting, whole.layouts)


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum"])
def test_the_distributed_optimizer_has_no_sgd(optimizer: str) -> None:
    """Megatron-LM, ``DistributedOptimizer.__init__``: only Adam, and optimizers with an ``init_state_fn``."""
    given = {"optimizer": optimizer}
    request = asked(1, global_batch=8, parallel=given)
    found = layouts_of_executors("megatron", request.setting, request.layouts)
    assert {layout.zero_stage for _, layout in found} == {0}
    for replicas in (1, 2):
        fixed = Fixed(zero_stage=1, data_parallel=replicas, context_parallel=1)
        shared = asked(1, fixed, global_batch=8, parallel=given)
        with pytest.raises(InvalidInput, match=r"requires ZeRO stage 0 for these .* \(found 1\)"):
            layouts_of_executors("megatron", shared.setting, shared.layouts)


@pytest.mark.parametrize("attention", ["flash", "plain"])
def test_plain_attention_asks_megatron_for_the_backend_that_keeps_scores(attention: str) -> None:
    fixed = Fixed(tensor_parallel=1, context_parallel=1, pipeline_parallel=4, recompute="none")
    request = asked(2, fixed, global_batch=16, sequence_length=1024, model={"attention": attention})
    (best,) = executor_layouts(request.layouts, request.setting, "megatron").best
    assert isinstance(best, ExecutorLayout)
    assert ("--attention-backend unfused" in (best.settings or "")) == (attention == "plain")


def test_the_answer_with_megatrons_default_is_that_with_the_same_precision_by_name() -> None:
    """Llama 3.1 70B on 64 H100, tp 4, pp 4: smaller states would have room for another order."""
    fixed = Fixed(4, 1, pipeline_parallel=4, microbatch_size=1, zero_stage=1, recompute="none")
    document = {"presets": ["llama-3.1-70b"], "global_batch": 256, "sequence_length": 8192}

    def best(parallel: dict[str, str]) -> ExecutorLayout:
        given = {**document, "parallel": parallel} if parallel else document
        request = parse_request(given, cluster_of(8), fixed)
        (found,) = executor_layouts(request.layouts, request.setting, "megatron").best
        assert isinstance(found, ExecutorLayout)
        return found

    unnamed, named = best({}), best({"precision": "mixed-fp32-gradients"})
    assert named.settings == unnamed.settings
    assert named.step_time == unnamed.step_time
    assert named.plan.metrics.peak_memory == unnamed.plan.metrics.peak_memory
    assert (named.plan.problem.placement.n_stages, named.layout.recompute) == (4, "none")
    assert 78e9 < max(named.plan.metrics.peak_memory) <= 80e9
    smaller = best({"precision": "bf16-states"})
    assert smaller.plan.problem.placement.n_stages > 4
    assert smaller.step_time < named.step_time
    assert "--use-precision-aware-optimizer" in (smaller.settings or "")


def test_a_layout_that_ends_out_of_memory_in_megatron_is_not_offered() -> None:
    """Llama 3.1 70B, tp 1, cp 4, pp 8: 94 of 80 GB with gradients in float32, 76.5 with others."""
    fixed = Fixed(1, 4, pipeline_parallel=8, microbatch_size=1, zero_stage=1, recompute="none")
    document = {"presets": ["llama-3.1-70b"], "global_batch": 1024}
    request = parse_request(document, cluster_of(16), fixed)
    with pytest.raises(NoLayoutFits):
        executor_layouts(request.layouts, request.setting, "megatron")
    smaller = parse_request(document, cluster_of(16), fixed, parallel={"precision": "mixed"})
    layout = EstimatedLayout.of(smaller.layouts[0], smaller.setting.of_executor("megatron"))
    assert layout.load_bound < float("inf")
