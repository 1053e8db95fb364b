"""What a device holds under each executor, against published figures, and the settings that ask for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.executor_layouts import EXPERTS, Document, best_of, cluster_of, request_of
from zbv_models.estimate.config import PRECISIONS
from zbv_models.estimate.states import OPTIMIZER_STATES, HeldBytes, StateBytes
from zbv_models.fixed_orders.schedules import Schedule, torch_schedule
from zbv_models.layouts.cluster import equal_cluster
from zbv_models.layouts.estimated_layout import EstimatedLayout
from zbv_models.layouts.executor_memory import STATES, fsdp, in_order, megatron, torch, worker
from zbv_models.layouts.executor_search import score_given_cut
from zbv_models.layouts.layout import Fixed
from zbv_models.layouts.request import Request, parse_request
from zbv_solver.problem.cut import Cut
from zbv_solver.problem.layer import Layer, LayerCosts, LayerMemory, Model
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.verify.verifier import verify

WIDE = "mixed-fp32-gradients"


def chosen(name: str, **changes: Any) -> StateBytes:
    return replace(StateBytes(**PRECISIONS[name].model_dump()), **changes)


def held(kept: HeldBytes, replicas: int, *, is_shared: bool) -> float:
    """All bytes per parameter, with those of the update."""
    return kept.of(1, replicas).total + kept.copied / (replicas if is_shared else 1)


@pytest.mark.parametrize(("state", "alone", "distributed"), [
    # The table of Megatron-LM, docs/user-guide/features/dist_optimizer.md.
    (chosen("mixed", dtype="float16"), 20, (4, 16)),
    (chosen(WIDE), 18, (6, 12)),
    (chosen("single", dtype="float32"), 16, (8, 8)),
    # --grad-reduce-in-bf16: as with fp16, the update works on a copy in float32.
    (chosen("mixed"), 20, (4, 16)),
    # The precision-aware optimizer holds 2 bytes of the master copy, and works on 16-bit gradients.
    (chosen("bf16-states"), 6 + 2 + 4, (6, 6)),
    (chosen("bf16-states", gradients=2), 4 + 2 + 4, (4, 6)),
    (chosen("fp8-states"), 6 + 2 + 2, (6, 4)),
    # FusedSGD makes a momentum even if it is 0; SGD is not distributed.
    *((chosen(WIDE, optimizer=name), 14, (6, 8)) for name in ("muon", "sgd", "sgd-momentum")),
    (chosen(WIDE, offloaded=0.5), 12, (6, 6)),
    (chosen(WIDE, offloaded=1.0), 6, (6, 0)),
])  # fmt: skip
def test_bytes_of_megatron(state: StateBytes, alone: float, distributed: tuple[float, float]) -> None:
    assert held(megatron(state, 0), 8, is_shared=False) == alone
    whole, divided = distributed
    for replicas in (1, 4, 64):
        expected = whole + divided / replicas
        assert held(megatron(state, 1), replicas, is_shared=True) == pytest.approx(expected)


STATE = chosen(WIDE)


@pytest.mark.parametrize(("kept", "expected"), [
    # FSDP has shards of parameters, gradients and two states in float32; a pipeline, whole ones, too.
    (fsdp(STATE, 1), 2 + 4 + (4 + 4 + 8) / 8),
    (fsdp(STATE, 3), (4 + 4 + 8) / 8),
    (fsdp(replace(STATE, state=2), 1), 2 + 4 + (4 + 4 + 4) / 8),
    (fsdp(replace(STATE, gathered=1.0), 1), 1 + 4 + (4 + 4 + 8) / 8),
    (fsdp(replace(STATE, gathered=1.0), 1, tables=True), 2 + 4 + (4 + 4 + 8) / 8),
    (torch(STATE, 0), 18),
    # zbv's worker holds its part besides the whole.
    (worker(STATE, 0), 18),
    (worker(STATE, 1), 6 + (2 + 4 + 12) / 8),
])  # fmt: skip
def test_bytes_of_other_programs(kept: HeldBytes, expected: float) -> None:
    assert kept.of(1, 8).total == expected
    gathered = fsdp(replace(STATE, gathered=1.0), 1)
    assert (gathered.buffers, gathered.reduced) == (2 + 4 + 2 * 1, 4)


def flags_to_state(flags: dict[str, str]) -> StateBytes:
    """What Megatron-LM makes of flags (arguments.py, ``validate_args``; ``OptimizerConfig``)."""
    dtype = "bfloat16" if "--bf16" in flags else "float16" if "--fp16" in flags else "float32"
    bytes_of = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
    is_aware = "--use-precision-aware-optimizer" in flags
    is_half = "--grad-reduce-in-bf16" in flags or flags.get("--main-grads-dtype") == "bf16"
    if dtype == "float16":
        is_half = "--accumulate-allreduce-grads-in-fp32" not in flags
    assert is_aware or not {"--main-grads-dtype", "--exp-avg-dtype", "--optimizer-cpu-offload"} & set(flags)
    optimizer = flags.get("--optimizer", "adam")
    has_momentum = optimizer == "sgd" and flags.get("--sgd-momentum") != "0"
    return StateBytes(
        parameters=4.0 if dtype == "float32" else 2.0,
        gradients=2.0 if is_half and dtype != "float32" else 4.0,
        master=0.0 if dtype == "float32" else bytes_of[flags.get("--main-params-dtype", "fp32")],
        state=bytes_of[flags.get("--exp-avg-dtype", "fp32")],
        optimizer="sgd-momentum" if has_momentum else optimizer,
        dtype=dtype,
        offloaded=float(flags.get("--optimizer-offload-fraction", "0")),
    )


SIZES = (2.0, 4.0), (2.0, 4.0), (0.0, 2.0, 4.0), (1.0, 2.0, 3.0, 4.0)
KINDS = sorted(OPTIMIZER_STATES), ("bfloat16", "float16", "float32"), (0.0, 0.5), (0.0, 1.0)
EVERY_STATE = [StateBytes(*values) for values in product(*SIZES, *KINDS)]


def test_settings_ask_for_the_states_that_the_account_holds() -> None:
    held_by = {name: [s for s in EVERY_STATE if not STATES[name].refusal(s)] for name in STATES}
    of_megatron, of_torchtitan = held_by["megatron"], held_by["torchtitan"]
    assert {state.optimizer for state in of_megatron} == set(OPTIMIZER_STATES)
    for state in of_megatron:
        assert flags_to_state(STATES["megatron"].settings(state)) == state
    assert len(of_torchtitan) == 8
    for state in of_torchtitan:
        keys = STATES["torchtitan"].settings(state)
        assert (state.gradients, state.optimizer, state.offloaded) == (4, "adam", 0)
        # What asks for parameters in float8 is in no version that zbv writes settings for.
        assert state.gathered in (0, 1)
        assert (state.parameters == 4) == (keys.get("training.mixed_precision_param") == "float32")
        updated = 2 if keys.get("training.dtype") == "bfloat16" else 4
        assert (state.master or state.parameters) == updated
        assert state.state == (2 if updated == 2 or "optimizer.implementation" in keys else 4)


def asked(nodes: int, fixed: Fixed, executor: str, **document: Any) -> Request:
    """Of Llama 3.1 8B, unless the document says otherwise, on nodes of 8 H100."""
    cluster = {"nodes": nodes, "gpus_per_node": 8, "device": "h100", "memory": 95.04 * 2**30}
    document = {"presets": ["llama-3.1-8b"], **document}
    return parse_request(document, equal_cluster(cluster), fixed, executor=executor)


@pytest.mark.parametrize(("cut", "schedule", "published"), [
    ("15,16x6,15", "1F1B", 82.5), ("7,8x14,7", "Interleaved1F1B", 72.7),
])  # fmt: skip
def test_torchtitans_table_of_llama_405b_is_met(cut: str, schedule: str, published: float) -> None:
    """Table 5 of benchmarks/llama3_h100_202412_torchtitan.md, with the cuts of commit 9dec370.

    ``train_configs/llama3_405b.toml`` gathers parameters in float8. The memory is what torchtitan's logger
    reads: the most that PyTorch reserved on any device.
    """
    document: Document = {"model": {"product_dtype": "fp8"}, "parallel": {"precision": "float8-gather"}}
    document |= {"presets": ["llama-3.1-405b"], "global_batch": 256, "sequence_length": 8192}
    fixed = Fixed(8, 1, data_parallel=8, pipeline_parallel=8, microbatch_size=4, recompute="full")
    scored = score_given_cut(asked(64, fixed, "torchtitan", **document), cut, time_limit=0.1)
    assert scored.score.schedule.name == schedule
    assert scored.reserved_memory == pytest.approx(published * 2**30, rel=0.1)
    assert (scored.score.settings, "enable_fsdp_float8_all_gather" in scored.score.remark) == (None, True)


def layered(blocks: int, ranks: int, microbatches: int) -> LayeredProblem:
    """Blocks that hold a parameter and ten times as much as gradients."""
    costs = LayerCosts(1, 1, 1, None, LayerMemory(2, -1, -1, static=11))
    model = Model((Layer("block", costs, output_bytes=1, repeat=blocks),))
    return LayeredProblem(model, ranks, microbatches, (5.0,) * ranks, placement="auto")


def most_alive(schedule: Schedule, sizes: list[int], rank: int) -> int:
    """The obvious way: walk through the actions, and add up the stages that are between their backwards."""
    orders = schedule.orders()
    own = orders.slice_of(rank)
    actions = list(zip(orders.stage[own].tolist(), orders.letter[own].tolist(), strict=True))
    alive: list[int] = []
    for place in range(len(actions)):
        began, to_end = actions[: place + 1], actions[place:]
        between = {stage for stage, letter in began if letter} & {stage for stage, letter in to_end if letter}
        alive.append(sum(sizes[stage] for stage in between))
    return max(alive)


@given(st.data())
def test_a_rank_counts_the_gradients_that_its_order_holds_at_once(data: st.DataObject) -> None:
    kinds = [("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("ZBVZeroBubble", 2)]
    name, chunks = data.draw(st.sampled_from(kinds))
    ranks = data.draw(st.integers(2, 3))
    microbatches = ranks * data.draw(st.integers(2 if name == "ZBVZeroBubble" else 1, 2))
    schedule = torch_schedule(name, ranks, microbatches, chunks)
    sizes = [data.draw(st.integers(1, 4)) for _ in range(schedule.placement.n_stages)]
    bounds = np.concatenate(([0], np.cumsum(sizes)))
    problem = layered(sum(sizes), ranks, microbatches).cut_into(schedule.placement, Cut.at(bounds))
    held = in_order(problem, schedule.orders(), {"block": 10.0})
    for rank, stages in enumerate(schedule.placement.stages_of):
        expected = 5 + sum(sizes[stage] for stage in stages) + 10 * most_alive(schedule, sizes, rank)
        assert held.memory.static[rank] == pytest.approx(expected)
    assert in_order(problem, schedule.orders(), {"block": 0.0}) is problem
    assert held.costs == problem.costs


def test_the_plan_of_one_round_of_an_interleaved_schedule_holds_the_gradients_of_one_stage() -> None:
    fixed = Fixed(1, 1, 1, 4, 4, 1, 1, "none")
    request = asked(2, fixed, "torchtitan", global_batch=16, sequence_length=4096)
    best: Any = best_of(request)
    assert best.plan.problem.placement.chunks > 1
    verify(best.plan)
    before, held = best.best.problem.memory.static, best.plan.problem.memory.static
    for rank, stages in enumerate(best.plan.problem.placement.stages_of):
        partition = best.plan.problem.model.partition
        blocks = [sum(name.startswith("block") for name in partition[stage]) for stage in stages]
        freed = best.estimated.passing["block"] * (sum(blocks) - max(blocks))
        assert before[rank] - held[rank] >= freed * 0.99
    # Those of all halves of a block are those of the block.
    setting = request.setting.of_executor("torchtitan")
    halved = replace(setting, training=replace(setting.training, by_halves=True))
    whole, halves = (
        sum(each.passing * each.copies for each in EstimatedLayout.of(best.layout, of).estimate.layers)
        for of in (setting, halved)
    )
    assert whole == halves > 0


def test_experts_and_tables_are_not_gathered_in_float8() -> None:
    model = {**EXPERTS, "hidden": 512, "product_dtype": "fp8", "kv_heads": 8, "gated": False}
    parts, states = Fixed(1, 1, 1, 2, 2, 1, 1, "none"), {"precision": "float8-gather"}
    cluster = cluster_of(1, 4, 80, fp8_tflops=600)
    request = request_of(model, cluster, 8, "torch", parallel=states, **vars(parts))
    narrow = request.setting.of_executor("torch")
    state = replace(narrow.training.state, gathered=0.0)
    wide = replace(narrow, training=replace(narrow.training, state=state))
    estimates = (EstimatedLayout.of(request.layouts[0], setting).estimate for setting in (wide, narrow))
    before, after = ({each.name: each.static.total for each in of.layers} for of in estimates)
    saved = {name: before[name] - after[name] for name in before}
    # One of two bytes of query, key, value and output; the router and the norms are dense, too.
    assert (saved.pop("embedding"), saved.pop("head")) == (0, 512)  # the head has the last norm
    (block,) = saved.values()
    assert 4 * 512**2 <= block <= 4 * 512**2 + 20 * 512


def test_operands_that_torchao_keeps() -> None:
    """``matmul_with_hp_or_float8_args`` saves its input, which only tensor parallelism casts before."""
    gathered = {"precision": "float8-gather"}
    for tensor, states, is_narrow in ((2, {}, False), (2, gathered, True), (1, gathered, False)):
        kept = []
        for dtype, parallel in (("fp8", states), ("bfloat16", {})):
            fixed, model = Fixed(tensor, 1, 1, 4 // tensor, 2, 1, 1, "none"), {"product_dtype": dtype}
            request = asked(1, fixed, "torchtitan", model=model, global_batch=8, parallel=parallel)
            estimated = EstimatedLayout.of(request.layouts[0], request.setting.of_executor("torchtitan"))
            kept.append(estimated.estimate.layers[1].plain.after_forward)
        assert (kept[0] < kept[1], kept[0] == kept[1]) == (is_narrow, not is_narrow)
