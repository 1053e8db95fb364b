"""The optimizers of a rank's parameters: the default one, the call of a model's, and those that cannot be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.model.protocol import NamedOptimizer, PipelineModel

Named = tuple[str, nn.Parameter]

_USED = ("param_groups", "step", "state_dict", "load_state_dict")
"""The parts of an optimizer that a run uses; it need not derive from torch's class."""


class Watchers:
    """Methods that are called with every optimizer of the process that steps, while their objects exist.

    One hook of torch serves them all: torch reads its hooks while others come and go, in another thread or by
    the collection of garbage, and a step would fail.
    """

    def __init__(self, register: Callable[[Callable[..., None]], Any]):
        self._adding = threading.Lock()
        self._methods: list[WeakMethod[Callable[[torch.optim.Optimizer], None]]] = []
        register(self._call)

    def add(self, method: Callable[[torch.optim.Optimizer], None]) -> None:
        """Call this bound method from now on."""
        with self._adding:
            self._methods = [*(each for each in self._methods if each() is not None), WeakMethod(method)]

    def _call(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for each in self._methods:
            if (method := each()) is not None:
                method(optimizer)


BEFORE_STEP = Watchers(register_optimizer_step_pre_hook)
AFTER_STEP = Watchers(register_optimizer_step_post_hook)


def adamw(parameters: Iterable[Any], **settings: Any) -> torch.optim.Optimizer:
    """AdamW, as one fused kernel if all parameters are on GPUs.

    Parameters
    ----------
    parameters
        Parameters, or pairs of name and parameter.
    """
    listed = [each[1] if isinstance(each, tuple) else each for each in parameters]
    return torch.optim.AdamW(listed, fused=all(p.is_cuda for p in listed) or None, **settings)


def require_no_line_search(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Raise :class:`InvalidRun` if LBFGS updates some of these parameters, a part of the model's.

    LBFGS multiplies vectors of all parameters, and needs the loss after each of its moves.
    """
    if not isinstance(optimizer, torch.optim.LBFGS):
        return
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not updated.isdisjoint(map(id, parameters)):
        raise InvalidRun(
            "found LBFGS. It needs the loss, and products of vectors of all parameters, in one place; each "
            "rank of a pipeline has an optimizer for its own parameters only. Use an optimizer that updates "
            "every parameter from its own gradient, such as AdamW, or train on one rank."
        )


def optimizer_of(model: PipelineModel, parameters: Sequence[Named]) -> torch.optim.Optimizer:
    """A model's optimizer of some parameters; raises :class:`ModelError` if it returns something else."""
    if isinstance(model, NamedOptimizer):
        optimizer: Any = model.named_optimizer(parameters)
        method = "named_optimizer"
    else:
        optimizer = model.optimizer([parameter for _, parameter in parameters])
        method = "optimizer"
    absent = [name for name in _USED if not hasattr(optimizer, name)]
    if absent:
        raise ModelError(
            f"{method} returned a {type(optimizer).__name__} without {', '.join(absent)}; must be an "
            f"optimizer of the parameters that it was given, as those of torch.optim."
        )
    for group in optimizer.param_groups:
        # Names depend on the rank, and checkpoints name parameters themselves.
        group.pop("param_names", None)
    return optimizer  # type: ignore[no-any-return]  # it has what an optimizer needs
