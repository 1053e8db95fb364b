"""The tests' own optimizer equals torch's, and its state survives a checkpoint."""

from __future__ import annotations

from copy import deepcopy

import torch
from support.momentum import Momentum
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    for _ in range(3):
        module(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in module.parameters()]


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return Momentum(module.parameters(), lr=0.01)  # type: ignore[return-value]  # as far as it goes


def test_it_is_gradient_descent_with_momentum() -> None:
    mine, theirs = a_model(), a_model()
    expected = trained(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9), 1)
    torch.testing.assert_close(trained(mine, momentum(mine), 1), expected)


def test_it_resumes_from_a_checkpoint() -> None:
    first, second = a_model(), a_model()
    optimizer, other = momentum(first), momentum(second)
    trained(first, optimizer, 1)
    model, state = deepcopy(get_state_dict(first, [optimizer], options=OPTIONS))
    get_state_dict(second, [other], options=OPTIONS)  # as a run does before it loads one
    set_state_dict(second, [other], model_state_dict=model, optim_state_dict=state, options=OPTIONS)
    torch.testing.assert_close(trained(second, other, 2), trained(first, optimizer, 2), rtol=0, atol=0)
