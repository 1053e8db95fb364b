"""Prepares one rank of a pipeline: reads its part of the plan, and builds its layers and no others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from zbv_worker.errors import Disagreement, InvalidRun, naming_errors
from zbv_worker.execution.agreement import Statement, agree, keywords_by_rank
from zbv_worker.execution.binding import keywords_of
from zbv_worker.execution.build_stages import build_stages
from zbv_worker.execution.rank_plan import RankPlan, require_layers
from zbv_worker.execution.stated_shapes import ShapeOf, digest_of, stated_structures
from zbv_worker.model.checks import layer_names
from zbv_worker.model.layer_list import LayerList, Layers, as_layered
from zbv_worker.model.loss_module import loss_module, ties_of
from zbv_worker.model.protocol import Layered, PipelineModel
from zbv_worker.pipeline.connecting import PipelineOptions, PlanLike, RankDevice, cut_evenly, rank_plan
from zbv_worker.stage.layers import Keywords
from zbv_worker.stage.loss import no_loss
from zbv_worker.stage.stage import Stage
from zbv_worker.transport.channels import Transport
from zbv_worker.transport.world import Backend
from zbv_worker.values.structure import Structure

_REMEDY = "Plan for these layers, or give the layers the plan's names: {'name': layer, …}"


@dataclass(frozen=True)
class Prepared:
    """One rank's part of a pipeline, by stage."""

    plan: RankPlan
    stages: dict[int, Stage]
    has_loss: bool = True
    """Whether there is a loss; without one, the model can only be evaluated."""
    keywords_by_rank: Sequence[Keywords] = ()
    """The keyword arguments that the layers of each rank take."""
    ties: Sequence[tuple[str, str]] = ()
    """Pairs of names of parameters that are one parameter."""
    stated: Sequence[Structure] = ()
    """The structures of what crosses boundaries, by microbatch, if the layers state them; else empty."""
    shape_of: ShapeOf | None = None
    """The function that states them."""
    absent: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The parameters of given layers that this rank does not run, by name."""

    @property
    def keywords(self) -> Keywords:
        """The keyword arguments that layers of the whole model take."""
        return Keywords.union(self.keywords_by_rank)

    @property
    def modules(self) -> dict[int, nn.Module]:
        """The stages' modules; their children are the layers."""
        return {index: stage.module for index, stage in self.stages.items()}

    @property
    def layers(self) -> dict[int, tuple[str, ...]]:
        """The names of the stages' layers."""
        partition = self.plan.cut.partition or ()
        return {index: partition[index] for index in self.stages}


class LayersWithLoss:
    """Layers and a loss, in the form from which stages are built."""

    def __init__(self, layers: Layered, loss: Callable[[Any, Any], Any] | None):
        self._layers = layers
        self.loss = no_loss if loss is None else loss
        self.loss_module = loss_module(loss, layers)
        self.layer_names = layers.layer_names
        self.build_layers = layers.build_layers

    def tied_parameters(self) -> Sequence[tuple[str, str]]:
        """Pairs of names of parameters that layers share."""
        return ties_of(self._layers, self.loss_module)


def prepare(
    options: PipelineOptions,
    layers: Layers,
    loss: Callable[[Any, Any], Any] | None,
    transport: Transport,
    place: RankDevice,
) -> Prepared:
    """Read the plan, build this rank's layers, agree with the other ranks, and open the channels. Collective.

    Raises
    ------
    InvalidRun, Disagreement
        If plan, layers and ranks do not fit together, on this rank or another.
    ChannelTimeout, PeerLost
        If a rank does not take part.
    """
    given_plan = "no plan" if options.plan is None else "a plan"
    with starting_together(transport, options.patience, given_plan):
        layered = as_layered(layers)
        names = layer_names(layered)
    given = _planned(options, layered, loss, transport, place) if options.plan is None else options.plan
    with starting_together(transport, options.patience):
        plan = cut_evenly(_own_part(given, options, transport), names)
        require_layers(layered, plan.cut, _REMEDY)
        prepared = _build(options, plan, layered, loss, transport.layout.replicas, place.device)
    open_channels(
        plan,
        transport,
        model=model_digest(plan, prepared.ties),
        backend=place.backend,
        patience=options.patience,
        stated=prepared.stated,
        options=options.common,
    )
    with naming_errors(transport.rank, "exchanging keywords"):
        own = keywords_of(prepared.stages.values())
        return replace(prepared, keywords_by_rank=keywords_by_rank(transport, own, options.patience))


def _planned(
    options: PipelineOptions,
    layers: Layered,
    loss: Callable[[Any, Any], Any] | None,
    transport: Transport,
    place: RankDevice,
) -> dict[str, Any]:
    """Measure and plan the layers; returns the plan as a document. Collective."""
    from zbv_worker.pipeline.automatic_plan import plan_layers  # imports the profiler

    return plan_layers(
        layers,
        loss,
        options.example or (),
        transport,
        place.device,
        microbatches=options.microbatches or 1,
        program=options.program,
        backend=place.backend,
        timeout=options.patience,
        service=options.service,
    )


def _own_part(given: PlanLike, options: PipelineOptions, transport: Transport) -> RankPlan:
    """This rank's part of a plan, checked against the ranks."""
    service = None if options.plan is None else options.service
    plan = rank_plan(given, transport.pp_rank, service, options.patience)
    found, needed = transport.layout.pp_degree, plan.placement.pp_degree
    if found != needed:
        raise InvalidRun(
            f"found {found} ranks; the plan is for {needed}. Start {needed} ranks, for instance with "
            f"torchrun --nproc-per-node {needed}, or plan for {found}."
        )
    if options.microbatches not in (None, plan.microbatches):
        raise InvalidRun(
            f"found microbatches={options.microbatches}; the plan has {plan.microbatches}. Omit the "
            f"argument, or plan for {options.microbatches}."
        )
    if options.data_rank is not None and not 0 <= options.data_rank < needed:
        raise InvalidRun(
            f"found data_rank={options.data_rank}; must be a rank of the pipeline, 0 to {needed - 1}."
        )
    return plan


def _build(
    options: PipelineOptions,
    plan: RankPlan,
    layers: Layered,
    loss: Callable[[Any, Any], Any] | None,
    replicas: int,
    device: torch.device,
) -> Prepared:
    given = loss if loss is not None else getattr(layers, "loss", None)
    if given is not None and (isinstance(given, type) or not callable(given)):
        raise InvalidRun(
            f"loss: found {given!r}; must be a function of output and target, such as "
            f"torch.nn.functional.mse_loss or torch.nn.MSELoss()."
        )
    model = LayersWithLoss(layers, given)
    ties = model.tied_parameters()
    stages = build_stages(
        cast("PipelineModel", model), plan, device, replicas=replicas, program=options.program
    )
    shape_of = options.shape_of or getattr(layers, "shape_of", None)
    return Prepared(
        plan,
        stages,
        given is not None,
        ties=ties,
        stated=stated_structures(shape_of, plan.features),
        shape_of=shape_of,
        absent=_absent(layers, stages),
    )


def _absent(layered: Layered, stages: Mapping[int, Stage]) -> dict[str, nn.Parameter]:
    present = {parameter for stage in stages.values() for parameter in stage.module.parameters()}
    given = layered.given if isinstance(layered, LayerList) else {}
    return {
        f"{layer}.{name}": parameter
        for layer, module in given.items()
        for name, parameter in module.named_parameters()
        if parameter not in present
    }


def model_digest(plan: RankPlan, ties: Sequence[tuple[str, str]] = ()) -> str:
    """A text that stands for a plan's layers and the parameters that they share."""
    layers = json.dumps([plan.cut.partition, [*map(list, ties)]])
    return hashlib.sha256(layers.encode()).hexdigest()


def open_channels(
    plan: RankPlan,
    transport: Transport,
    *,
    model: str,
    backend: Backend,
    patience: float,
    steps: int = 0,
    is_traced: bool = False,
    stated: Sequence[Structure] = (),
    options: Sequence[tuple[str, str]] = (),
) -> None:
    """Check that all ranks were started alike, and open the plan's channels. Collective.

    Parameters
    ----------
    model
        A text that stands for the model's layers and how they share parameters.
    options
        Names and values of what must be equal on all ranks, besides what the other parameters say.
    """
    statement = Statement(
        plan_id=plan.plan_id,
        pp_rank=plan.rank,
        pp_degree=plan.placement.pp_degree,
        world_size=transport.world_size,
        model=model,
        backend=backend,
        steps=steps,
        channels=plan.channels,
        traced=is_traced,
        replicas=transport.layout.replicas,
        options=(*options, ("shape_of", digest_of(stated))),
    )
    keys = agree(transport, statement, patience)
    with naming_errors(transport.rank, "opening the channels"):
        transport.open(keys, patience)


def prepare_change(
    options: PipelineOptions,
    given: PlanLike,
    current: RankPlan,
    shape_of: ShapeOf | None,
    transport: Transport,
) -> tuple[RankPlan, Sequence[Structure]]:
    """Read another plan of the same stages; returns this rank's part, and what crosses boundaries.

    Raises
    ------
    InvalidRun
        If the plan needs other ranks, stages or microbatches.
    """
    plan = rank_plan(given, transport.pp_rank, options.service, options.timeout)
    if plan.cut.partition is None:
        plan = replace(plan, cut=replace(plan.cut, partition=current.cut.partition))
    if (plan.placement, plan.microbatches) != (current.placement, current.microbatches):
        raise InvalidRun(
            f"found a plan with {plan.placement.pp_degree} ranks, placement {plan.placement.kind} and "
            f"{plan.microbatches} microbatches; a pipeline can only change to a plan with "
            f"{current.placement.pp_degree} ranks, placement {current.placement.kind} and "
            f"{current.microbatches} microbatches. Make another pipeline."
        )
    if plan.cut.partition != current.cut.partition:
        raise InvalidRun(
            "found a plan with another partition; a pipeline can only change to a plan with the same layers "
            "on every stage. Save a checkpoint and resume it in another pipeline: it fits every partition."
        )
    return plan, stated_structures(shape_of, plan.features)


@contextmanager
def starting_together(transport: Transport, timeout: float, found: str = "") -> Iterator[None]:
    """A block that a rank runs alone; if it fails on one rank, all ranks raise an error after it.

    Parameters
    ----------
    found
        What this rank was given, in words; must be equal on all ranks.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    with naming_errors(transport.rank, "starting"):
        said = transport.gather([found, None if error is None else str(error)], timeout)
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(said):
        if text is not None:
            raise InvalidRun(f"rank {rank} cannot start: {text}")
    for rank, (other, _) in enumerate(said):
        if other != said[0][0]:
            raise Disagreement(
                f"found {said[0][0]} on rank 0, and {other} on rank {rank}; give all ranks the same."
            )
