"""Builds the stages that the plan places on a rank, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from zbv_worker.errors import InvalidRun
from zbv_worker.execution.rank_plan import RankPlan, require_layers
from zbv_worker.model.checks import build_layers, build_stage
from zbv_worker.model.layer_list import whole_name
from zbv_worker.model.protocol import Layered, PipelineModel, Tied, Weighted
from zbv_worker.stage.dtensors import fully_sharded_modules
from zbv_worker.stage.layers import add_loss_module
from zbv_worker.stage.loss import WeightedLoss
from zbv_worker.stage.program import AUTOCAST, PLAIN, Program
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import Transport


def build_modules(
    model: PipelineModel,
    plan: RankPlan,
    device: torch.device,
    divide: Callable[[nn.Module], None] | None = None,
) -> dict[int, nn.Module]:
    """Build the modules of a rank's stages, cut as the plan requires, with tied parameters shared.

    ``divide`` changes each of them in place, such as by ``fully_shard``.

    Tied parameters on different ranks stay copies, as do those with ``fully_shard``:
    :mod:`zbv_worker.gradients.ties` keeps them equal.

    Raises
    ------
    InvalidRun
        If the plan's layers are not the model's, or the shapes of tied parameters differ.
    """
    require_layers(model, plan.cut)
    modules = {index: _module(model, index, plan, device) for index in plan.stages}
    if divide is not None:
        for module in modules.values():
            divide(module)
    loss, end = getattr(model, "loss_module", None), modules.get(plan.placement.n_stages - 1)
    if loss is not None and end is not None:
        add_loss_module(end, loss.to(device))
    if isinstance(model, Tied):
        for first, last in model.tied_parameters():
            _tie(modules, first, last)
    return modules


def build_stages(
    model: PipelineModel,
    plan: RankPlan,
    device: torch.device,
    *,
    replicas: int = 1,
    program: Program = PLAIN,
    divide: Callable[[nn.Module], None] | None = None,
) -> dict[int, Stage]:
    """Build a rank's stages, by index; raises like :func:`build_modules`."""
    n_stages = plan.placement.n_stages
    is_weighted = isinstance(model, Weighted)
    loss = WeightedLoss(model.loss_sum) if isinstance(model, Weighted) else model.loss
    stages = {
        index: Stage(
            index,
            n_stages,
            module,
            plan.microbatches * replicas,
            loss if index == n_stages - 1 else None,
            AUTOCAST[program.precision],
            layers=_layers(module, plan),
            is_recomputed=plan.cut.recomputes(index),
            is_compiled=program.is_compiled,
        )
        for index, module in build_modules(model, plan, device, divide).items()
    }
    for stage in stages.values():
        stage.is_weighted = is_weighted
    return stages


def note_training(
    stages: Iterable[Stage],
    n_stages: int,
    transport: Transport,
    timeout: float,
    *,
    of_batch: bool = False,
) -> bool:
    """Tell every stage whether anything below it trains. Collective.

    Returns whether a stage other than the first one has nothing below it that trains.

    Parameters
    ----------
    stages
        Those of this rank.
    of_batch
        Whether the first stage's input needs a gradient, on its rank.
    """
    own = list(stages)
    mine = [
        stage.index
        for stage in own
        if (of_batch and stage.index == 0)
        or any(parameter.requires_grad for parameter in stage.module.parameters())
    ]
    # Numbers of the hosts: a sum of tensors would wait for a GPU.
    trained = {int(index) for indices in transport.gather(mine, timeout) for index in indices}
    for stage in own:
        stage.trains_below = min(trained, default=n_stages) < stage.index
    return n_stages > 1 and 0 not in trained


def _module(model: PipelineModel, index: int, plan: RankPlan, device: torch.device) -> nn.Module:
    partition = plan.cut.partition
    if partition is not None and isinstance(model, Layered):
        return build_layers(model, partition[index], device)
    return build_stage(model, index, plan.placement.n_stages, device)


def _layers(module: nn.Module, plan: RankPlan) -> tuple[nn.Module, ...] | None:
    """A stage's layers; None if only the model knows them."""
    return tuple(module) if plan.cut.partition is not None and isinstance(module, nn.Sequential) else None


def _tie(modules: Mapping[int, nn.Module], first: str, last: str) -> None:
    """Share one parameter between two stages of this rank, such as the first and the last stage of a V."""
    source, target = _holder(modules, first), _holder(modules, last)
    if (
        source is None
        or target is None
        or any(fully_sharded_modules(module) for module, _ in (source, target))
    ):
        return
    shared = source[0].get_parameter(source[1])
    path, _, leaf = target[1].rpartition(".")
    holder = target[0].get_submodule(path)
    if holder.get_parameter(leaf).shape != shared.shape:
        raise InvalidRun(f"{first} and {last} are tied, but their shapes differ.")
    holder.register_parameter(leaf, shared)


def _holder(modules: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str] | None:
    """The stage that has a parameter, and the parameter's name there."""
    for module in modules.values():
        for path, _ in module.named_parameters(remove_duplicate=False):
            if whole_name(path) == whole_name(name):
                return module, path
    return None
