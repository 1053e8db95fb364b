"""Builds a rank's stages from the model: those that the plan places on it, and no others."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.planned_cut import require_layers
from zbv_worker.execution.precision import AUTOCAST, Precision
from zbv_worker.execution.rank_plan import RankPlan
from zbv_worker.execution.stage import Stage
from zbv_worker.model.protocol import Layered, PipelineModel, Tied, Weighted, build_layers, build_stage


def build_modules(model: PipelineModel, plan: RankPlan, device: torch.device) -> dict[int, nn.Module]:
    """The modules of the stages that a rank hosts, cut as the plan says, tied where the model says so.

    Raises
    ------
    InvalidRun
        When tied parameters lie on different ranks, or the plan's layers are not the model's.
    """
    require_layers(model, plan.cut)
    modules = {index: _module(model, index, plan, device) for index in plan.stages}
    if isinstance(model, Tied):
        for first, last in model.tied_parameters():
            _tie(modules, first, last, plan)
    return modules


def build_stages(
    model: PipelineModel,
    plan: RankPlan,
    device: torch.device,
    *,
    replicas: int = 1,
    precision: Precision = "float32",
) -> dict[int, Stage]:
    """A rank's stages, by index; raises as :func:`build_modules`."""
    n_stages = plan.placement.n_stages
    return {
        index: Stage(
            index,
            n_stages,
            module,
            plan.microbatches * replicas,
            None if index < n_stages - 1 else model.loss_sum if isinstance(model, Weighted) else model.loss,
            AUTOCAST[precision],
            layers=_layers(module, plan),
            is_recomputed=plan.cut.recomputes(index),
            is_weighted=index == n_stages - 1 and isinstance(model, Weighted),
        )
        for index, module in build_modules(model, plan, device).items()
    }


def _module(model: PipelineModel, index: int, plan: RankPlan, device: torch.device) -> nn.Module:
    partition = plan.cut.partition
    if partition is not None and isinstance(model, Layered):
        return build_layers(model, partition[index], device)
    return build_stage(model, index, plan.placement.n_stages, device)


def _layers(module: nn.Module, plan: RankPlan) -> tuple[nn.Module, ...] | None:
    """A stage's layers, None where only the model knows them."""
    return tuple(module) if plan.cut.partition is not None and isinstance(module, nn.Sequential) else None


def _tie(modules: Mapping[int, nn.Module], first: str, last: str, plan: RankPlan) -> None:
    """Make two parameters one. In a V the first stage and the last are on one rank, so this is all."""
    owners = {name: _owner(modules, name) for name in (first, last)}
    if all(owner is None for owner in owners.values()):
        return
    for name, owner in owners.items():
        if owner is None:
            raise InvalidRun(
                f"rank {plan.rank}: {first} and {last} are tied, but {name} is on another rank. Tied "
                f"parameters need a placement that has both on one rank; for the first and the last stage "
                f"that is placement v."
            )
    source, target = owners[first], owners[last]
    if source is not None and target is not None:
        shared = source.get_parameter(first)
        path, _, leaf = last.rpartition(".")
        holder = target.get_submodule(path)
        if holder.get_parameter(leaf).shape != shared.shape:
            raise InvalidRun(f"{first} and {last} are tied, but their shapes differ.")
        holder.register_parameter(leaf, shared)


def _owner(modules: Mapping[int, nn.Module], name: str) -> nn.Module | None:
    for module in modules.values():
        if any(name == own for own, _ in module.named_parameters(remove_duplicate=False)):
            return module
    return None
