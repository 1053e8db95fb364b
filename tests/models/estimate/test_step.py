"""What a layer costs per step: volumes of ZeRO, and the optimizer's memory traffic."""

from __future__ import annotations

from typing import Any

import pytest
from support.estimates import but, estimate_config, llama
from zbv_models.estimate.config import EstimateConfig, estimate_layers
from zbv_models.estimate.config import estimate_config as estimate
from zbv_models.estimate.layers import LayerEstimate

DATA = {"data_parallel_bandwidth": 20.0, "data_parallel_latency": 3.0}


def config(stage: int, **changes: Any) -> EstimateConfig:
    """Gradients of 2 bytes, as in the papers, unless something else is said."""
    parallel = {"data_parallel": 4, "zero_stage": stage, "precision": "mixed", **changes}
    made = estimate_config(llama(layers=2), **parallel)
    return but(made, device=but(made.device, **DATA))


def block(stage: int, **changes: Any) -> LayerEstimate:
    return estimate_layers(config(stage, **changes))[1]


def time(size: float, calls: int = 2) -> float:
    """Of both halves of a block."""
    return size / 20e9 * 1e6 + calls * 3


def test_an_all_reduce_sends_gradients_twice_and_zero_sends_them_once() -> None:
    """Rajbhandari et al. 2020, §7: the volume is the same, 2 Ψ."""
    share = 2 * block(0).parameters * 3 / 4
    assert block(0).step.gradient_reduction == pytest.approx(time(2 * share))
    assert block(0).step.parameter_gathering == 0
    assert block(1).step.gradient_reduction == pytest.approx(time(share))
    assert block(1).step.parameter_gathering == pytest.approx(time(share))


def test_shared_gradients_are_reduced_in_every_w() -> None:
    """Compute hides none here, because the overlap is 0."""
    share = 2 * block(1).parameters * 3 / 4
    before, after = block(1).plain.times, block(2).plain.times
    assert after.backward_weight - before.backward_weight == pytest.approx(time(share))
    assert after.forward == before.forward
    assert block(2).step.gradient_reduction == 0
    assert block(2).step.parameter_gathering == pytest.approx(time(share))


def test_shared_parameters_are_gathered_in_every_f_and_i() -> None:
    """Rajbhandari et al. 2020, §7: 3 Ψ."""
    share = 2 * block(1).parameters * 3 / 4
    before, after = block(1).plain.times, block(3).plain.times
    for action in ("forward", "backward_input", "backward_weight"):
        assert getattr(after, action) - getattr(before, action) == pytest.approx(time(share))
    assert block(3).step.gradient_reduction == block(3).step.parameter_gathering == 0


def test_an_action_holds_what_it_gathers() -> None:
    """A whole block is gathered at once, or half of it: of the MLP, 3 · 4096 · 16384 and a norm."""
    assert block(3).plain.workspace == block(1).plain.workspace + 2 * block(1).parameters
    halves = [estimate_layers(config(stage, granularity="half"))[2].plain.workspace for stage in (1, 3)]
    assert halves[1] == halves[0] + 2 * (3 * 4096 * 16384 + 4096)


def test_compute_hides_at_most_its_own_time() -> None:
    slow = config(3)
    hidden = but(slow, device=but(slow.device, data_parallel_overlap=1.0, data_parallel_bandwidth=0.1))
    found, alone = (estimate_layers(each)[1].plain.times.forward for each in (hidden, config(1)))
    share = 2 * block(1).parameters * 3 / 4
    assert found == pytest.approx(share / 0.1e9 * 1e6 + 2 * 3)
    assert found > alone
    fast = but(slow, device=but(slow.device, data_parallel_overlap=1.0))
    assert estimate_layers(fast)[1].plain.times == block(1).plain.times


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [
        # Gradients twice, master copy and two states both ways, parameters; gradients set to zero.
        ("mixed", 2 * 2 + 2 * 12 + 2 + 2),
        ("single", 2 * 4 + 2 * 8 + 2 * 4 + 4),
    ],
)
def test_the_optimizer_reads_and_writes_its_states(precision: str, per_parameter: int) -> None:
    found = block(0, precision=precision)
    assert found.step.optimizer == pytest.approx(found.parameters * per_parameter / 1000e9 * 1e6)


def test_the_optimizer_moves_large_tensors() -> None:
    made = config(0)
    faster = but(made, device=but(made.device, product_bandwidth=4000.0))
    assert estimate_layers(faster)[1].step.optimizer == pytest.approx(block(0).step.optimizer / 4)
    assert estimate_layers(faster)[1].plain == block(0).plain


def test_zero_divides_the_update_but_not_the_gradients_that_every_replica_holds() -> None:
    count = block(0).parameters
    assert block(1).step.optimizer == pytest.approx(count * ((4 + 24 + 2) / 4 + 2) / 1e6)
    assert block(2).step.optimizer == pytest.approx(count * (4 + 24 + 2 + 2) / 4 / 1e6)


def test_devices_of_a_sequence_are_replicas_too() -> None:
    shared = block(1, data_parallel=2, context_parallel=2)
    assert shared.static == block(1).static
    assert shared.step == block(1).step


def test_two_copies_of_a_table_are_summed_over_the_pipeline() -> None:
    tied = estimate_config(llama(tied_embeddings=True), placement="loop", chunks=2)
    assert estimate(tied).table_reduction == pytest.approx(4 * 32000 * 4096 / 50e9 * 1e6 + 7)
    predicting = estimate_config(llama(prediction_layers=1), placement="loop", chunks=2)
    assert estimate(predicting).table_reduction == estimate(tied).table_reduction
    assert estimate(estimate_config(llama(tied_embeddings=True))).table_reduction == 0
    assert estimate(estimate_config(llama())).table_reduction == 0
