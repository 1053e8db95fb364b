"""A pipeline's arguments, and what they name: a plan in one of many forms, a device, the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.stated_shapes import ShapeOf
from zbv_worker.execution.turns import Overlap
from zbv_worker.stage.program import AUTOCAST, Precision, Program
from zbv_worker.transport.connect import open_transport
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Backend, Layout, World, select_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from zbv_solver.errors import InvalidInput, InvalidPlan
from zbv_solver.plans.plan import Plan

from zbv_worker.execution.plan_source import (
    PlanSource,
    WholePlan,
    naming_plan_file,
    plan_of_document,
    require_rank,
)
from zbv_worker.execution.rank_plan import PlannedCut, RankPlan
from zbv_worker.model.layer_list import even_partition

PlanLike = Plan | WholePlan | PlanSource | Mapping[str, Any] | str | Path
"""A plan, the plan of an agent's run, a decoded plan file, a path, a plan's URL, or a plan's id."""


def rank_plan(plan: PlanLike, rank: int, service: str | None, timeout: float) -> RankPlan:
    """One rank's part of a plan.

    Parameters
    ----------
    service
        The URL of the service that has the plan, if ``plan`` is an id.
    timeout
        Seconds to wait for the service.

    Raises
    ------
    InvalidRun
        If there is no such plan, or it has no such rank.
    PeerLost
        If the service does not answer.
    """
    if isinstance(plan, Plan | WholePlan):
        require_rank(rank, plan.problem.pp_degree)
        return RankPlan.of(plan.plan_id, plan.problem, plan.orders, rank)
    if isinstance(plan, PlanSource):
        return plan.rank_plan(rank, timeout)
    if isinstance(plan, Mapping):
        return _of_document(plan, rank)
    if not isinstance(plan, str | Path):
        raise InvalidRun(
            f"found a {type(plan).__name__} as the plan; must be a plan (zbv_solver.plan), a decoded plan "
            f"file, a path, a plan's URL, or a plan's id with service=URL."
        )
    text = str(plan)
    if text.lstrip().startswith("{"):
        raise InvalidRun(
            "found the text of a plan; must be decoded. Pass json.loads(text), or the file's path."
        )
    is_address = text.startswith(("http://", "https://"))
    if service is not None and (is_address or len(Path(text).parts) > 1):
        raise InvalidRun(
            f"found {text} as the plan, and service=; with a service, the plan must be an id. Omit service=."
        )
    if service is not None:
        return PlanSource(server=service, plan_id=text).rank_plan(rank, timeout)
    return _of_url(text).rank_plan(rank, timeout) if is_address else _of_file(Path(plan), rank)


def cut_evenly(plan: RankPlan, names: Sequence[str]) -> RankPlan:
    """Divide layers among the stages of a plan that was made without layers, in about equal numbers.

    Returns a plan with layers as it is.
    """
    stages = plan.placement.n_stages
    if plan.cut.partition is not None:
        return plan
    if len(names) < stages:
        raise InvalidRun(
            f"found {len(names)} layers; the plan has {stages} stages, and every one needs a layer. Divide "
            f"the model into at least {stages} layers, or plan for fewer ranks."
        )
    return replace(plan, cut=PlannedCut(even_partition(names, stages), plan.cut.recompute))


def _of_document(document: Mapping[str, Any], rank: int) -> RankPlan:
    try:
        return plan_of_document(document, rank)
    except (InvalidInput, InvalidPlan) as error:
        raise InvalidRun(f"the plan: {error}") from error


def _of_url(url: str) -> PlanSource:
    server, separator, plan_id = url.rstrip("/").rpartition("/plans/")
    if not separator:
        raise InvalidRun(f"found {url} as the plan; a plan's URL must end with /plans/ID.")
    return PlanSource(server=server.removesuffix("/v1"), plan_id=plan_id)


def _of_file(path: Path, rank: int) -> RankPlan:
    if not path.exists():
        raise InvalidRun(
            f"found no file {path} in {Path.cwd()}. Give the path of a plan file; for the id of a plan on a "
            f"service, pass service=URL too."
        )
    with naming_plan_file(path, "plan file"):
        return plan_of_document(json.loads(path.read_text()), rank)


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of a :class:`~zbv_worker.pipeline.pipeline.Pipeline` other than layers, loss and mesh."""

    plan: PlanLike | None
    microbatches: int | None
    example: tuple[Any, ...] | None
    device: torch.device | str | None
    backend: Backend | None
    precision: Precision
    is_compiled: bool
    timeout: float
    startup_timeout: float
    service: str | None
    data_rank: int | None = None
    shape_of: ShapeOf | None = None
    overlap: Overlap | None = None

    def __post_init__(self) -> None:
        if not (self.overlap is None or callable(self.overlap)):
            raise InvalidRun(
                f"found a {type(self.overlap).__name__} as overlap; must be a function that takes the "
                f"forward and the backward of a pair, and calls each once."
            )
        if self.precision not in AUTOCAST:
            raise InvalidRun(f"found precision {self.precision!r}; must be one of {', '.join(AUTOCAST)}.")
        if self.plan is None and (self.microbatches is None or self.example is None):
            raise InvalidRun(
                "plan=None plans the layers, and needs microbatches= (the number per step) and "
                "example=(input, target) of one microbatch, to measure them. Pass both, or a plan."
            )
        if self.microbatches is not None and not (type(self.microbatches) is int and self.microbatches >= 1):
            raise InvalidRun(f"found microbatches={self.microbatches!r}; must be an integer of at least 1.")
        if self.plan is None and not isinstance(self.example, tuple):
            raise InvalidRun(
                f"found a {type(self.example).__name__} as the example; must be a tuple of the input, the "
                f"target and perhaps the keywords of one microbatch."
            )
        if self.backend not in (None, "gloo", "nccl"):
            raise InvalidRun(f"found backend {self.backend!r}; must be 'gloo' or 'nccl'.")

    @property
    def program(self) -> Program:
        """The program that the stages run."""
        return Program(self.precision, self.is_compiled)

    @property
    def common(self) -> tuple[tuple[str, str], ...]:
        """Names and values of what must be equal on all ranks, besides plan, layers and shapes."""
        return (
            ("precision", self.precision),
            ("compiling", str(self.is_compiled)),
            ("data rank", str(self.data_rank)),
        )

    @property
    def patience(self) -> float:
        """Seconds to wait for other ranks while they start."""
        return max(self.timeout, self.startup_timeout)


@dataclass(frozen=True)
class RankDevice:
    """Where a rank computes, and how it talks to others."""

    device: torch.device
    backend: Backend


def connected_world(
    options: PipelineOptions, mesh: DeviceMesh | None = None, *, layout: Layout | None = None
) -> tuple[ConnectedTransport, RankDevice]:
    """Meet the other ranks; returns the transport, still without channels. Collective.

    Parameters
    ----------
    layout
        The places of the ranks, without a mesh; by default one pipeline.

    Raises
    ------
    InvalidRun
        If the mesh or the device cannot be used.
    ChannelTimeout, PeerLost
        If the ranks do not meet.
    """
    world = World.current()
    layout = layout or Layout(world.world_size)
    if mesh is not None:
        layout = Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, world.world_size)
    place = _place(options, world.local_rank)
    with naming_errors(world.rank, "meeting the other ranks"):
        control = GlooControl(world, options.patience, layout)
        has_sums = place.backend == "nccl"  # gloo sums in host memory anyway
        transport = open_transport(
            control, place.backend, place.device, options.patience, sums_over_ranks=has_sums
        )
    return transport, place


def _place(options: PipelineOptions, local_rank: int) -> RankDevice:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    backend = options.backend or ("nccl" if has_nccl else "gloo")
    if options.device is None:
        return RankDevice(select_device(backend, local_rank), backend)
    try:
        device = torch.device(options.device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRun(f"found device {options.device!r}; must be 'cpu', 'cuda' or 'cuda:N'.") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidRun(f"found device {device}, but torch sees no GPU. Omit device=, or pass 'cpu'.")
        device = torch.device("cuda", device.index if device.index is not None else local_rank)
        if backend == "nccl":
            return RankDevice(select_device(backend, device.index), backend)
        torch.cuda.set_device(device)
    elif backend == "nccl":
        if options.backend is not None:
            raise InvalidRun(f"found device {device} and backend 'nccl', which moves tensors of GPUs only.")
        backend = "gloo"
    return RankDevice(device, backend)
