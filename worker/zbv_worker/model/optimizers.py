"""The optimizers of a rank's parameters: the default one, and the call of a model's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zbv_worker.errors import ModelError
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
