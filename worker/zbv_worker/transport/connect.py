"""Connects the ranks of a run: the control plane, and the channels of its backend."""

from __future__ import annotations

import torch

from zbv_worker.host.process import HostClock
from zbv_worker.transport.connected import ConnectedTransport, ControlPlane
from zbv_worker.transport.gloo import GlooTransport
from zbv_worker.transport.gloo_control import GlooControl
from zbv_worker.transport.nccl import NcclTransport
from zbv_worker.transport.torch_api import TorchNccl, torch_cuda
from zbv_worker.transport.world import Backend, Layout, World


def connect(
    world: World, backend: Backend, device: torch.device, timeout: float, layout: Layout | None = None
) -> ConnectedTransport:
    """Meet the other ranks; returns the transport. Collective.

    Parameters
    ----------
    device
        Where the rank computes and received tensors go.
    timeout
        Seconds to meet and to connect.
    layout
        The places of the ranks, for example of a device mesh; by default one pipeline.

    Raises
    ------
    TimeoutError, ConnectionError
        If the ranks do not meet; names those that did not arrive.
    """
    return open_transport(GlooControl(world, timeout, layout), backend, device, timeout)


def open_transport(
    control: ControlPlane,
    backend: Backend,
    device: torch.device,
    timeout: float,
    *,
    sums_over_ranks: bool = False,
) -> ConnectedTransport:
    """Connect ranks that have met; returns the transport, still without channels. Collective.

    Parameters
    ----------
    sums_over_ranks
        Whether tensors of devices will be summed over all ranks; needs another communicator with NCCL.
    """
    if backend == "gloo":
        return GlooTransport(control, device, timeout)
    return NcclTransport(
        control,
        device,
        timeout,
        api=TorchNccl(),
        cuda=torch_cuda(),
        clock=HostClock(),
        sums_over_ranks=sums_over_ranks,
    )
