"""A model put together from layers, a loss, data and an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.model.model import Model
from zbv_worker.model.optimizers import adamw, optimizer_of
from zbv_worker.model.protocol import (
    Evaluated,
    Layered,
    NamedOptimizer,
    PipelineModel,
    Scheduled,
    Tied,
    Weighted,
)

CPU = torch.device("cpu")
SAMPLES = [(torch.full((2,), float(at)), torch.tensor(at)) for at in range(50)]
mse = nn.functional.mse_loss


def layers() -> list[nn.Module]:
    return [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]


def model(**changed: Any) -> Model:
    return Model(layers(), **{"loss": mse, "data": SAMPLES, "samples": 4, **changed})


def test_it_satisfies_the_protocols_that_its_parts_allow() -> None:
    plain = model()
    for protocol in (PipelineModel, Layered, NamedOptimizer, Tied):
        assert isinstance(plain, protocol)
    assert not isinstance(plain, Evaluated | Scheduled | Weighted)
    full = model(evaluation_data=SAMPLES, schedule=lambda optimizer: None)
    assert isinstance(full, Evaluated)
    assert isinstance(full, Scheduled)


def test_microbatches_of_a_data_set_are_the_same_on_every_rank() -> None:
    torch.manual_seed(1)
    one = model()
    torch.rand(3)
    torch.manual_seed(1)
    other = model()
    input, target = one.microbatch(3, 2)
    assert input.shape == (4, 2)
    assert torch.equal(input[:, 0].long(), target)  # samples stay together
    assert torch.equal(target, other.microbatch(3, 2)[1])
    drawn = {tuple(one.microbatch(step, index)[1].tolist()) for step in range(3) for index in range(3)}
    assert len(drawn) == 9


def test_evaluation_draws_other_samples() -> None:
    evaluated = model(evaluation_data=SAMPLES)
    assert not torch.equal(evaluated.microbatch(0, 0)[1], evaluated.evaluation_microbatch(0, 0)[1])


def test_data_may_be_a_function() -> None:
    found = model(data=lambda step, index: (step, index)).microbatch(5, 6)
    assert found == (5, 6)


class Own:
    def layer_names(self) -> list[str]:
        return ["only"]

    def build_layers(self, names: Sequence[str], device: torch.device) -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()


class Weighing(Own):
    def loss_sum(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return output.sum(), target.sum()


@pytest.mark.parametrize(("layers", "is_weighted", "loss"), [(Own(), False, 2), (Weighing(), True, 1)])
def test_layers_may_bring_their_loss(layers: Own, is_weighted: bool, loss: int) -> None:
    """Of two, the sum and its weight."""
    own = Model(layers, data=SAMPLES, samples=1)
    assert isinstance(own, Weighted) == is_weighted
    assert own.loss(torch.ones(2), torch.ones(2)) == loss


def weighed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return output.sum(), target.sum()


def test_a_loss_may_be_a_sum_and_its_weight() -> None:
    built = model(loss=None, loss_sum=weighed)
    assert isinstance(built, Weighted)
    assert isinstance(built, PipelineModel)
    assert built.loss(torch.ones(6), torch.ones(3)) == 2
    assert built.loss(torch.ones(6), torch.zeros(3)) == 6  # nothing counts


def test_a_mean_and_a_sum_are_not_both_taken() -> None:
    with pytest.raises(InvalidRun, match="found loss and loss_sum; pass one of them"):
        model(loss_sum=weighed)


def test_the_optimizer_gets_names() -> None:
    seen: list[str] = []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        listed = list(named)
        seen.extend(name for name, _ in listed)
        return torch.optim.SGD(listed, lr=0.1)

    built = model(optimizer=optimizer)
    module = built.build_stage(0, 1, CPU)
    made = optimizer_of(built, list(module.named_parameters()))
    assert seen == ["0.weight", "0.bias", "2.weight", "2.bias"]
    # Checkpoints have names of their format, and those of the group would differ between ranks.
    assert all("param_names" not in group for group in made.param_groups)


def test_without_names_the_optimizer_gets_the_parameters() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert model().optimizer(parameters).param_groups[0]["params"] == parameters


def test_adamw_is_not_fused_on_cpus_and_takes_settings() -> None:
    (group,) = adamw(nn.Linear(2, 2).named_parameters(), lr=0.5).param_groups
    assert (group["fused"], group["lr"]) == (None, 0.5)


def test_an_optimizer_of_another_type_is_refused() -> None:
    built = model(optimizer=list)
    with pytest.raises(ModelError, match="named_optimizer returned a list"):
        optimizer_of(built, [])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": None}, "found no loss"),
        ({"samples": None}, "data is a data set of class list. Pass samples="),
        ({"samples": 0}, "found samples=0 and 50 samples"),
        ({"data": []}, "found samples=4 and 0 samples"),
        ({"data": iter(SAMPLES)}, "data is a list_iterator; must be a function"),
        ({"evaluation_data": 3}, "evaluation_data is a int; must be a function"),
    ],
)
def test_missing_or_wrong_parts_are_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRun, match=said):
        model(**changed)
