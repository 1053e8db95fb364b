"""Calls of a model's methods that check the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zbv_worker.errors import ModelError
from zbv_worker.model.protocol import Layered, Microbatch, PipelineModel, Tied


def has_ties(model: PipelineModel) -> bool:
    """Whether stages share parameters."""
    return isinstance(model, Tied) and bool(model.tied_parameters())


def checked_microbatch(found: Any) -> Microbatch:
    """The data that a model's ``microbatch`` returned; raises :class:`ModelError` if it is something else."""
    if isinstance(found, Microbatch):
        return found
    if isinstance(found, tuple | list) and len(found) in (2, 3):
        microbatch = Microbatch(*found)
        if isinstance(microbatch.keywords, Mapping):
            return microbatch
    raise ModelError(
        f"microbatch returned {_shown(found)}; must be a Microbatch, (input, target), or (input, target, "
        f"keywords) with a dict of keywords."
    )


def _shown(found: Any) -> str:
    count = f" of {len(found)} values" if isinstance(found, tuple | list) else ""
    return f"a {type(found).__name__}{count}"


def build_stage(model: PipelineModel, stage: int, n_stages: int, device: torch.device) -> nn.Module:
    """Build a model's stage and check its type; raises :class:`ModelError`."""
    module = model.build_stage(stage, n_stages, device)
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"build_stage({stage}, {n_stages}) returned a {type(module).__name__}; must be an nn.Module."
        )
    return module


def layer_names(model: Layered) -> tuple[str, ...]:
    """The names of a model's layers, checked to be unique; raises :class:`ModelError`."""
    names = tuple(model.layer_names())
    for at, name in enumerate(names):
        if not isinstance(name, str) or not name or name in names[:at]:
            again = " again" if name in names[:at] else ""
            raise ModelError(
                f"layer_names of a {type(model).__name__}: layer {at} is {name!r}{again}; every layer "
                f"needs a unique, non-empty name."
            )
    if not names:
        raise ModelError(
            f"layer_names of a {type(model).__name__} is empty; a model must have at least one layer."
        )
    return names


def build_layers(model: Layered, names: Sequence[str], device: torch.device) -> nn.Sequential:
    """Build some layers of a model and check their number; raises :class:`ModelError`.

    Without names, returns a module that passes its input on.
    """
    if not names:
        return nn.Sequential()
    module = model.build_layers(names, device)
    if not isinstance(module, nn.Sequential) or len(module) != len(names):
        count = f" of {len(module)} modules" if isinstance(module, nn.Sequential) else ""
        raise ModelError(
            f"build_layers of {', '.join(names)} returned a {type(module).__name__}{count}; must be an "
            f"nn.Sequential of {len(names)}, one module per layer."
        )
    return module
