"""How the user trains some parameters: whether they require gradients, and their optimizers' settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zbv_worker.model.optimizers import AFTER_STEP

Treatment = Mapping[str, str]
"""In words that are equal in all processes if the treatment is: ``requires_grad``, ``optimizer``, ``lr`` …"""


class Treatments:
    """The treatments of some parameters, noted after every step of any optimizer."""

    def __init__(self, parameters: Iterable[Tensor]):
        self._parameters = set(parameters)
        self._settings: dict[Tensor, Treatment] = {}
        if self._parameters:
            AFTER_STEP.add(self.note)

    def of(self, parameter: Tensor) -> Treatment:
        """The treatment of a parameter in the newest step of an optimizer that had it."""
        if not parameter.requires_grad:
            return {"requires_grad": "False"}
        return {"requires_grad": "True", **self._settings.get(parameter, {"optimizer": "None"})}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the settings of an optimizer, after one of its steps."""
        for group in optimizer.param_groups:
            known = [parameter for parameter in group["params"] if parameter in self._parameters]
            if known:
                settings = {name: _in_words(group.get(name)) for name in sorted(optimizer.defaults)}
                settings = {"optimizer": type(optimizer).__name__, **settings}
                self._settings |= dict.fromkeys(known, settings)


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 and value.device.type == "cpu" else "a tensor"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_in_words, value))})"
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
