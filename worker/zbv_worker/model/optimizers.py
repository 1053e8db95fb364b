"""The optimizers of a rank's parameters: the default one, the call of a model's, and those that cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zbv_worker.errors import InvalidRun, ModelError
from zbv_worker.model.protocol import NamedOptimizer, PipelineModel

Named = tuple[str, nn.Parameter]

_USED = ("param_groups", "step", "state_dict", "load_state_dict")
"""The parts of an optimizer that a run uses; it need not derive from torch's class."""


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
