"""If W has little to compute, the run and the profile report it and name the modules."""

from __future__ import annotations

from io import StringIO
from random import Random

import pytest
import torch
from rich.console import Console
from support.plans import unit_problem
from support.selfcheck import random_orders
from support.trained import Remembering, Trained, train_in_threads
from torch import Tensor, nn
from zbv_worker.measure.profile.profile import RankProfile, Spread, StageProfile, rank_json, read_rank
from zbv_worker.measure.profile.report import print_report
from zbv_worker.measure.stage_memory import StaticBytes
from zbv_worker.run.options import TrainingOptions
from zbv_worker.stage.recorder import SplitShare, defer_weight_gradients
from zbv_worker.stage.weight_grads import WeightGrads


class TELinear(nn.Linear):
    """A Linear that is not split, like TransformerEngine's."""


class Unsplit(Remembering):
    """A model without split modules in its last two layers."""

    def build_stage(self, stage: int, n_stages: int, device: torch.device) -> nn.Module:
        module = super().build_stage(stage, n_stages, device)
        for layer in (module.get_submodule(n) for n in ("layer6", "layer7.1") if hasattr(module, n[:6])):
            for child in layer.modules():
                if type(child) is nn.Linear:
                    child.__class__ = TELinear
        return module


def train(model: type[Remembering], fused: float, steps: int = 3) -> Trained:
    problem = unit_problem(2, 2)
    orders = random_orders(problem, Random(0), fused)
    return train_in_threads(problem, orders, TrainingOptions(), steps, model=model)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_reports_once_a_stage_with_little_w(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Before its first step."""
    (event,) = [event for report in train(Unsplit, 0.0, steps).reports for event in report.events]
    assert (event["kind"], event["step"], event["stage"], event["share"]) == ("little_to_split", 0, 3, 0.0)
    assert event["modules"][0] == "layer7.1 (TELinear)"
    assert "layer6.plain (TELinear)" in event["modules"]
    said = capsys.readouterr().err
    assert said.count("stage 3: W computes 0% of the weight gradients; I computes those of layer7.1") == 1


class HookedLater(Remembering):
    """A model that adds hooks in its first step."""

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        for module in self.built:
            for parameter in module.parameters():
                if not parameter._backward_hooks:
                    parameter.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
        return super().microbatch(step, index)


@pytest.mark.parametrize(("steps", "reported"), [(0, set()), (1, {(0, 0, 0.0)})])
def test_what_the_first_step_shows_is_said(steps: int, reported: set[tuple[int, int, float]]) -> None:
    events = [event for report in train(HookedLater, 0.0, steps).reports for event in report.events]
    assert {(e["stage"], e["step"], e["share"]) for e in events if e["stage"] == 0} == reported


@pytest.mark.parametrize(("model", "fused"), [(Remembering, 0.0), (Unsplit, 1.0)])
def test_a_sufficient_share_of_w_is_not_reported(model: type[Remembering], fused: float) -> None:
    assert [event for report in train(model, fused).reports for event in report.events] == []


def share_of(module: nn.Module, x: Tensor) -> SplitShare | None:
    queue = WeightGrads()
    with defer_weight_gradients(module).into(queue):
        module(x).sum().backward()
    return SplitShare.of(module, queue.parameters())


def test_the_share_counts_elements_and_the_largest_module_comes_first() -> None:
    frozen = nn.Linear(8, 1).requires_grad_(False)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), TELinear(4, 8), frozen)
    found = share_of(module, torch.randn(2, 4))
    assert found == SplitShare(20 / (20 + 8 + 40), ("2 (TELinear)", "1 (LayerNorm)"))
    assert share_of(nn.Linear(2, 2), torch.randn(2, 2)) == SplitShare(1.0, ())
    assert SplitShare.of(nn.GELU(), set()) is None


def test_a_profile_reports_stages_with_a_small_share_of_w() -> None:
    second = Spread(1.0, 1.0)
    little = SplitShare(0.25, tuple(f"{at} (TELinear)" for at in range(5)))
    stages = tuple(
        StageProfile(at, second, second, second, second, 1, 1, split=share)
        for at, share in enumerate((little, SplitShare(0.9, ("norm (LayerNorm)",)), None))
    )
    profile = RankProfile(0, stages, StaticBytes(), {})
    assert read_rank(rank_json(profile)) == profile
    out = StringIO()
    print_report([profile], Console(file=out, width=200))
    *_, fused = [line for line in out.getvalue().splitlines() if "does not split" in line]
    assert fused.endswith("does not split (share of W in the backward): 2 (100%).")
    (line,) = [line for line in out.getvalue().splitlines() if "W computes" in line]
    assert line == (
        "Stages, 0: W computes 25% of the weight gradients; I computes those of 0 (TELinear), 1 (TELinear), "
        "2 (TELinear) and 2 more."
    )


@pytest.mark.parametrize(
    ("split", "times", "expected"),
    [
        (SplitShare(1.0, ()), (2.0, 1.0, 2.5), (2.0, 1.0)),
        (SplitShare(0.3, ("norm (LayerNorm)",)), (2.0, 1.0, 2.5), (2.0, 1.0)),
        (SplitShare(1.0, ()), (2.0, 0.09, 2.5), (2.5, 0.0)),  # less than 5 % of the backward
        (SplitShare(0.0, ("0 (TELinear)",)), (2.0, 1.0, 2.5), (2.5, 0.0)),
        (None, (2.0, 1.0, 2.5), (2.5, 0.0)),  # no trainable parameters
        (SplitShare(1.0, ()), (30.0, 0.5, 30.0), (30.0, 0.5)),  # disturbed measurements of I and B
    ],
)
def test_a_stage_with_little_w_has_only_b_in_the_problem(
    split: SplitShare | None, times: tuple[float, float, float], expected: tuple[float, float]
) -> None:
    """``times`` are those of I, W and B."""
    forward, inputs, weights, fused = (Spread(us * 1e-6, us * 1e-6) for us in (1.0, *times))
    costs, _ = StageProfile(0, forward, inputs, weights, fused, 4, 2, split=split).costs
    assert (costs["backward_input"], costs["backward_weight"]) == expected
    assert (costs["forward"], costs["backward"]) == (1.0, times[2])
