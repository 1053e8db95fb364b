"""What training keeps per parameter, and what a layer costs per step: ZeRO, optimizers, tables."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, estimate_config, llama, parts
from zbv_models.estimate.config import PRECISIONS, EstimateConfig, estimate_layers
from zbv_models.estimate.config import estimate_config as estimate
from zbv_models.estimate.layers import LayerEstimate
from zbv_models.estimate.states import StateBytes, StaticBytes, by_zero

DATA = {"data_parallel_bandwidth": 20.0, "data_parallel_latency": 3.0}


def held(
    precision: str, optimizer: str = "adam", count: int = 1, stage: int = 0, replicas: int = 1
) -> StaticBytes:
    state = StateBytes(**PRECISIONS[precision].model_dump(), optimizer=optimizer)
    return by_zero(state, stage).of(count, replicas)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_on_7_5_billion_parameters_and_64_replicas(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1."""
    kept = held("mixed", "adam", 7_500_000_000, stage, 64)
    assert kept.total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("precision", "optimizer", "per_parameter"),
    [
        ("mixed", "adam", (2, 2, 12)),
        ("mixed-fp32-gradients", "adam", (2, 4, 12)),
        ("bf16-states", "adam", (2, 4, 8)),
        ("fp8-states", "adam", (2, 4, 6)),
        ("single", "adam", (4, 4, 8)),
        ("half", "adam", (2, 2, 4)),
        ("mixed", "muon", (2, 2, 8)),
        ("mixed", "lion", (2, 2, 8)),
        ("mixed", "sgd", (2, 2, 4)),
        ("single", "sgd", (4, 4, 0)),
    ],
)
def test_bytes_per_parameter(precision: str, optimizer: str, per_parameter: tuple[int, int, int]) -> None:
    assert held(precision, optimizer) == StaticBytes(*per_parameter)


def test_muon_leaves_the_tables_to_adam() -> None:
    """Megatron-LM, ``_is_nonlinear_or_embedding``: matrices of blocks have one state, tables two."""
    adam, muon = (
        estimate_layers(estimate_config(llama(layers=2), optimizer=name, zero_stage=1, data_parallel=4))
        for name in ("adam", "muon")
    )
    assert muon[0] == adam[0]
    less = [first.static.optimizer - then.static.optimizer for first, then in zip(adam, muon, strict=True)]
    assert less[1] == pytest.approx(4 * adam[1].parameters / 4, abs=4)
    assert less[2] == 4 * 4096 / 4  # the norm
    assert muon[1].step.optimizer < adam[1].step.optimizer


@pytest.mark.parametrize(
    ("replicas", "stage", "dense", "experts"), [(8, 0, 1, 1), (8, 1, 8, 1), (16, 1, 16, 2)]
)
def test_replicas_of_experts_share_their_optimizer(
    replicas: int, stage: int, dense: int, experts: int
) -> None:
    """Eight replicas with eight-way expert parallelism have no copies of experts, so ZeRO saves nothing."""
    model = llama(hidden=1024, heads=8, experts=16, experts_per_token=4, expert_ffn=512)
    whole = parts(model)["attention"].parameters.total + parts(model)["experts"].parameters.replicated
    parallel = {"data_parallel": replicas, "expert_parallel": 8, "zero_stage": stage}
    kept = estimate_layers(estimate_config(model, **parallel))[1].static.optimizer
    of_experts = 12 * (16 // 8) * 3 * 1024 * 512
    assert kept == pytest.approx(12 * whole / dense + of_experts / experts, abs=2)


def config(stage: int, **changes: Any) -> EstimateConfig:
    """Gradients of 2 bytes, as in the papers."""
    parallel = {"data_parallel": 4, "zero_stage": stage, "precision": "mixed", **changes}
    made = estimate_config(llama(layers=2), **parallel)
    return but(made, device=but(made.device, **DATA))


def block(stage: int, device: dict[str, float] | None = None, **changes: Any) -> LayerEstimate:
    made = config(stage, **changes)
    return estimate_layers(but(made, device=but(made.device, **(device or {}))))[1]


COUNT = block(0).parameters
SHARE = 2 * COUNT * 3 / 4
"""Bytes of gradients or parameters that a device sends once."""


def time(size: float, calls: int = 2) -> float:
    """Of both halves of a block."""
    return size / 20e9 * 1e6 + calls * 3


@pytest.mark.parametrize(
    ("stage", "reduction", "gathering", "forward", "weight"),
    [
        (0, 2 * SHARE, 0, 0, 0),  # an all-reduce sends gradients twice
        (1, SHARE, SHARE, 0, 0),
        (2, 0, SHARE, 0, SHARE),  # shared gradients are reduced in every W
        (3, 0, 0, SHARE, SHARE),  # shared parameters are gathered in every F and I: 3 Ψ
    ],
)
def test_replicas_exchange_the_volumes_of_zero(
    stage: int, reduction: float, gathering: float, forward: float, weight: float
) -> None:
    """Rajbhandari et al. 2020, §7; compute hides none here, because the overlap is 0."""
    layer = block(stage)
    found = [layer.step.gradient_reduction, layer.step.parameter_gathering]
    longer = layer.plain.times + block(0).plain.times.scaled(-1)
    found += [longer.forward, longer.backward_input, longer.backward_weight]
    expected = [time(size) if size else 0 for size in (reduction, gathering, forward, forward, weight)]
    assert found == pytest.approx(expected, abs=1e-9)


def test_an_action_holds_what_it_gathers_and_hides_at_most_its_own_time() -> None:
    """A whole block is gathered at once, or half of it: of the MLP, 3 · 4096 · 16384 and a norm."""
    assert block(3).plain.workspace == block(1).plain.workspace + 2 * COUNT
    halves = [estimate_layers(config(stage, granularity="half"))[2].plain.workspace for stage in (1, 3)]
    assert halves[1] == halves[0] + 2 * (3 * 4096 * 16384 + 4096)
    slow = block(3, {"data_parallel_overlap": 1.0, "data_parallel_bandwidth": 0.1})
    assert slow.plain.times.forward == pytest.approx(SHARE / 0.1e9 * 1e6 + 2 * 3)
    assert block(3, {"data_parallel_overlap": 1.0}).plain.times == block(1).plain.times
    # Devices that share a sequence are replicas, too.
    shared = block(1, data_parallel=2, context_parallel=2)
    assert (shared.static, shared.step) == (block(1).static, block(1).step)


@pytest.mark.parametrize(
    ("stage", "precision", "per_parameter"),
    [
        # Gradients twice, master copy and two states both ways, parameters; gradients set to zero.
        (0, "mixed", 2 * 2 + 2 * 12 + 2 + 2),
        (0, "single", 2 * 4 + 2 * 8 + 2 * 4 + 4),
        # ZeRO divides the update, but not the gradients that every replica holds.
        (1, "mixed", (4 + 24 + 2) / 4 + 2),
        (2, "mixed", (4 + 24 + 2 + 2) / 4),
    ],
)
def test_the_optimizer_reads_and_writes_its_states(stage: int, precision: str, per_parameter: float) -> None:
    expected = COUNT * per_parameter / 1000e9 * 1e6
    assert block(stage, precision=precision).step.optimizer == pytest.approx(expected)
    faster = block(stage, {"product_bandwidth": 4000.0}, precision=precision)
    assert faster.step.optimizer == pytest.approx(expected / 4)
    assert faster.plain == block(stage, precision=precision).plain
    if precision == "mixed":
        # The host reads gradients, reads and writes copies and states, and returns parameters, in float32.
        shared = 4 if stage else 1
        moved = per_parameter - 2 * 12 / shared
        offloaded = block(stage, precision=precision, offloaded_states=1.0).step.optimizer
        assert offloaded == pytest.approx(COUNT * (moved / 1000e9 + (4 * 6 + 2 * 8) / shared / 38e9) * 1e6)


@pytest.mark.parametrize(
    ("model", "parallel", "copies"),
    [
        ({"tied_embeddings": True}, {"placement": "loop", "chunks": 2}, True),
        ({"prediction_layers": 1}, {"placement": "loop", "chunks": 2}, True),
        ({"tied_embeddings": True}, {}, False),  # the ends of a V are on one rank
        ({}, {}, False),
    ],
)
def test_two_copies_of_a_table_are_summed_over_the_pipeline(
    model: dict[str, Any], parallel: dict[str, Any], copies: bool
) -> None:
    expected = 4 * 32000 * 4096 / 50e9 * 1e6 + 7 if copies else 0
    assert estimate(estimate_config(llama(**model), **parallel)).table_reduction == pytest.approx(expected)
