"""What a forward and a backward that run as a pair hide of each other, against published numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from support.estimates import but, modern_configs, preset_config
from zbv_models.estimate.config import EstimateConfig, estimate_config, estimate_layers, problem_document
from zbv_models.estimate.device import Device
from zbv_models.estimate.layers import LayerEstimate
from zbv_solver.errors import InvalidInput
from zbv_solver.problem.layered_problem import LayeredProblem
from zbv_solver.problem.reading import parse_any_problem

TOKENS, HIDDEN, CHOSEN, NODES, INSIDE = 4096, 7168, 8, 8, 8
"""DeepSeek-V3 with 64-way expert parallelism on nodes of 8 devices: a token is sent to 8 experts."""
MOST_NODES = 4
"""Node-limited routing (DeepSeek-AI 2024b, §2.1.2)."""
MILLISECONDS = 1e3


def deepseek(pairs: str, **device: Any) -> EstimateConfig:
    """DeepSeek-V3 on 2048 H800; its preset takes all of the all-to-all as hidden."""
    config = preset_config("deepseek-v3", pairs=pairs)
    return but(config, device=but(config.device, expert_parallel_overlap=0.0, **device))


def moe(config: EstimateConfig) -> LayerEstimate:
    """A block with experts."""
    return next(layer for layer in estimate_layers(config) if layer.name == "moe")


def test_the_all_to_all_of_deepseek_v3_is_what_its_routing_sends() -> None:
    # Bytes of bfloat16: once to each of 4 of 8 nodes, 7 of 8 of which are other ones; inside a node 8 copies.
    between = TOKENS * HIDDEN * 2 * MOST_NODES * (NODES - 1) / NODES
    within = TOKENS * HIDDEN * 2 * CHOSEN * (INSIDE - 1) / INSIDE
    assert between / TOKENS == 50_176
    config = deepseek("experts")
    network, nvlink = config.device.link_bandwidth, config.device.tensor_parallel_bandwidth
    assert network is not None
    assert nvlink is not None
    # GB/s are bytes per nanosecond. Dispatch and combination are two calls.
    one = max(between / network, within / nvlink) / 1e3 + config.device.link_latency
    hidden = moe(config).plain.hidden
    assert (hidden.forward, hidden.backward_input) == pytest.approx((2 * one, 2 * one))
    assert hidden.backward_weight == 0


def test_a_pair_of_deepseek_v3_takes_as_long_as_in_its_published_profile() -> None:
    """github.com/deepseek-ai/profile-data, ``train.json``: F, I and W of 4 blocks on H800, in one pair.

    Kernels of dispatch and combine take 80.5 ms together, and from the first kernel to the last one 129.0 ms
    pass. Products have 112 of 132 processors, the all-to-all has 20. Dispatch is in FP8 there.
    """
    layer = moe(deepseek("experts")).plain
    times, hidden = layer.times, layer.hidden
    assert 4 * hidden.total / MILLISECONDS == pytest.approx(80.5, rel=0.1)
    apart = times.forward - hidden.forward + times.backward_input - hidden.backward_input
    pair = layer.pair_factor * max(apart, hidden.total, times.forward, times.backward_input)
    assert layer.pair_factor == 132 / 112
    assert 4 * (pair + times.backward_weight) / MILLISECONDS == pytest.approx(129.0, rel=0.05)
    # One after the other they take much longer, so the profile is not one of actions that run alone.
    assert 4 * times.total / MILLISECONDS > 1.5 * 129.0


@pytest.mark.parametrize(
    ("device", "factor"),
    [
        ({}, 132 / 112),
        ({"processors": 132}, 132 / 112),
        ({"processors": 80}, 80 / 60),
        ({"processors": 24}, 2.0),
        ({"processors": 132, "pair_factor": 1.05}, 1.05),
    ],
)
def test_the_factor_of_a_pair_is_what_its_all_to_all_leaves_of_a_device(
    device: dict[str, Any], factor: float
) -> None:
    assert Device(achieved_tflops=100, **device).cost_of_pairs == pytest.approx(factor)


@given(modern_configs())
def test_stating_communication_changes_no_cost_and_is_a_part_of_each(config: EstimateConfig) -> None:
    without, experts, both = (
        estimate_layers_of(but(config, parallel=but(config.parallel, pairs=pairs)))
        for pairs in ("none", "experts", "all")
    )
    for plain, some, every in zip(without, experts, both, strict=True):
        assert plain.plain.hidden.total == 0
        assert some.plain.hidden.total == pytest.approx(some.shares.expert_parallel)
        assert every.plain.hidden.total <= every.exchanged.total * (1 + 1e-9)
        for kind in ("plain", "full", "selective"):
            running = [getattr(layer, kind) for layer in (plain, some, every)]
            if running[0] is None:
                continue
            assert len({(each.times, each.after_forward, each.after_input) for each in running}) == 1
            times, parts = running[0].times, [each.hidden for each in running]
            for action in ("forward", "backward_input"):
                of_action = [getattr(part, action) for part in parts]
                assert of_action == sorted(of_action)
                assert of_action[-1] <= getattr(times, action)
            # What no plan is shorter than: less than alone, unless nothing is hidden.
            least = [each.shortest.total for each in running]
            assert least == sorted(least, reverse=True)
            assert least[-1] > 0 or times.total == 0


def estimate_layers_of(config: EstimateConfig) -> tuple[LayerEstimate, ...]:
    """The layers, or those without pairs if pairs have nothing to hide."""
    try:
        return estimate_layers(config)
    except InvalidInput:
        return estimate_layers(but(config, parallel=but(config.parallel, pairs="none")))


def test_the_problem_has_the_communication_of_its_layers() -> None:
    config = deepseek("experts")
    plain, problem = (parse_any_problem(problem_document(each)) for each in (deepseek("none"), config))
    assert isinstance(plain, LayeredProblem)
    assert isinstance(problem, LayeredProblem)
    assert (plain.has_pairs, problem.has_pairs) == (False, True)
    assert problem.pair_factor == pytest.approx(132 / 112, rel=1e-5)
    for before, layer in zip(plain.model.layers, problem.model.layers, strict=True):
        assert (before.costs.forward, before.costs.split) == (layer.costs.forward, layer.costs.split)
        assert (layer.costs.communication is not None) == (layer.name in ("moe", "prediction"))
        if layer.recompute is not None:  # what a recomputed I exchanges again is not hidden
            assert layer.recompute.communication == layer.costs.communication


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (preset_config("deepseek-v3", pairs="experts"), "expert_parallel_overlap"),
        (preset_config("llama-3.1-8b", pairs="experts"), "expert_parallel"),
        (preset_config("gpt-1.5b", pairs="all"), "collectives"),
    ],
)
def test_pairs_that_have_nothing_to_hide_are_refused(config: EstimateConfig, remedy: str) -> None:
    with pytest.raises(InvalidInput, match=remedy) as error:
        estimate_config(config)
    assert error.value.issues[0].pointer == "/parallel/pairs"
