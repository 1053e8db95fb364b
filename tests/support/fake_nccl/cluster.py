"""A cluster of fake GPUs, one per rank, with NCCL between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from zbv_worker.transport.torch_api import GroupOptions
from zbv_worker.transport.world import Layout

from support.fake_nccl.communicators import Communicators, FakeGroup, NcclModes
from support.fake_nccl.control import ControlState, FakeControl
from support.fake_nccl.cuda import FakeCuda, OnDevice
from support.fake_nccl.device import Device, DeviceModes, FakeStream
from support.fake_nccl.simulation import FakeClock, ModelError, Simulation


class FakeNccl:
    """Creates groups of one rank (:class:`zbv_worker.transport.torch_api.NcclApi`)."""

    def __init__(self, cluster: Cluster, device: Device):
        self._cluster = cluster
        self._device = device
        self._groups: list[FakeGroup] = []
        self._created = 0

    def version(self) -> str:
        return "model"

    def streams_of_groups(self) -> int:
        return 0

    def new_group(
        self, ranks: Sequence[int], timeout: timedelta, options: GroupOptions, name: str
    ) -> FakeGroup | None:
        """Create a group. Every rank of the world must call it, in the same order; none waits for another."""
        turn, self._created = self._created, self._created + 1
        self._cluster.check_order(turn, tuple(ranks), self._device)
        if self._device.rank not in ranks:
            return None
        group = FakeGroup(
            self._cluster.communicators,
            self._device,
            f"{name} #{turn}",
            ranks,
            timeout,
            high_priority=options.is_high_priority,
        )
        self._groups.append(group)
        return group

    def destroy(self) -> None:
        """Destroy all groups; hangs while one has unfinished operations."""
        for group in self._groups:
            group.shutdown()


@dataclass(frozen=True)
class FakeRank:
    """Everything that a rank's program gets."""

    rank: int
    device: Device
    torch_device: torch.device
    nccl: FakeNccl
    cuda: FakeCuda
    control: FakeControl
    clock: FakeClock


def _record_stream(tensor: Tensor, stream: FakeStream) -> None:
    stream.device.memory.record_stream(tensor, stream)


class Cluster:
    """Ranks with a fake GPU each.

    Parameters
    ----------
    deadlines_pass
        See :class:`Simulation`.
    """

    def __init__(
        self,
        ranks: int,
        *,
        replicas: int = 1,
        seed: int = 0,
        device: DeviceModes | None = None,
        nccl: NcclModes | None = None,
        deadlines_pass: bool = False,
    ):
        self.layout = Layout.of_world(ranks, replicas)
        self.simulation = Simulation(seed, deadlines_pass=deadlines_pass)
        self.devices = {rank: Device(self.simulation, rank, device or DeviceModes()) for rank in range(ranks)}
        self.communicators = Communicators(self.simulation, nccl or NcclModes())
        self._control = ControlState(self.simulation, self.layout)
        self._created: dict[int, tuple[int, ...]] = {}
        self.simulation.describe = lambda: [line for each in self.devices.values() for line in each.picture()]

    def run(self, main: Callable[[FakeRank], Any]) -> list[Any]:
        """Run a program on every rank; returns what each returns, by rank."""

        def on(rank: int) -> Callable[[], Any]:
            device = self.devices[rank]
            nccl = FakeNccl(self, device)
            here = FakeRank(
                rank,
                device,
                torch.device("cuda", rank),
                nccl,
                FakeCuda(device),
                FakeControl(self._control, rank, nccl.destroy),
                FakeClock(),
            )

            def body() -> Any:
                with OnDevice(device, rank):
                    return main(here)

            return body

        # A rank's thread has one device, so to choose it does nothing.
        with (
            patch.object(torch.cuda, "device", lambda device: nullcontext()),
            patch.object(torch.Tensor, "record_stream", _record_stream),  # which takes no other streams
        ):
            found = self.simulation.run({rank: on(rank) for rank in self.devices})
        return [found[rank] for rank in self.devices]

    def check_order(self, turn: int, ranks: tuple[int, ...], device: Device) -> None:
        """Check that all ranks create the same groups in the same order."""
        device.host().spend(1e-4)
        first = self._created.setdefault(turn, ranks)
        if first != ranks:
            raise ModelError(f"call {turn} of new_group is for ranks {ranks}, on another rank for {first}")
