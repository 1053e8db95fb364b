"""Connects the ranks of a pipeline inside the user's processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zbv_worker.errors import InvalidRun, naming_errors
from zbv_worker.execution.stated_shapes import ShapeOf
from zbv_worker.pipeline.plans import PlanLike
from zbv_worker.stage.precision import Precision
from zbv_worker.stage.program import Program
from zbv_worker.transport.connect import open_transport
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.world import Backend, Layout, World, select_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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

    def __post_init__(self) -> None:
        if self.precision not in ("float32", "bfloat16"):
            raise InvalidRun(
                f"found precision {self.precision!r}; must be 'float32' or 'bfloat16'. float16 needs a loss "
                f"scale that follows the optimizer: train with `zbv-worker run --precision float16`."
            )
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
