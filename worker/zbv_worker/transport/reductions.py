"""Sums over replicas in progress, on :mod:`zbv_worker.transport.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from zbv_worker.transport.receives import HostReceive, StreamReceive


class Summed:
    """The sum over a single replica."""

    def wait(self, timeout: float) -> None:
        """Return at once: nothing to add."""


@dataclass(frozen=True, eq=False)
class Summing:
    """A sum in a buffer of the network's device, copied to the target tensor when complete."""

    sum: HostReceive | StreamReceive
    target: Tensor
    naming_absent: Callable[[], AbstractContextManager[None]]

    def wait(self, timeout: float) -> None:
        """Wait until ``target`` holds the sum."""
        with self.naming_absent():
            found = self.sum.wait(timeout)
        if found is not self.target:
            self.target.copy_(found)
