"""A small optimizer with state. Making one of torch's imports torch's compiler, which takes seconds.

For ranks that are separate processes. It has the methods of an optimizer that checkpoints need.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Momentum:
    """Gradient descent with momentum, as far as a run needs :class:`torch.optim.Optimizer`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.9):
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(parameters), "lr": lr, "momentum": momentum}
        ]
        self.state: defaultdict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Move every parameter that has a gradient."""
        (group,) = self.param_groups
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                velocity = state.setdefault("velocity", torch.zeros_like(parameter))
                velocity.mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(velocity, alpha=group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """With parameters by their number."""
        (group,) = self.param_groups
        numbers = {parameter: number for number, parameter in enumerate(group["params"])}
        state = {numbers[parameter]: dict(state) for parameter, state in self.state.items()}
        return {"state": state, "param_groups": [{**group, "params": list(numbers.values())}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`; parameters are matched by their order."""
        (group,), (found,) = self.param_groups, state_dict["param_groups"]
        parameters = dict(zip(found["params"], group["params"], strict=True))
        group.update({**found, "params": group["params"]})
        self.state.clear()
        for name, state in state_dict["state"].items():
            self.state[parameters[name]] = dict(state)
