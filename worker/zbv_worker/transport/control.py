"""The control plane: messages between ranks that carry no tensor of the model.

Agreement, barriers, notes and sums of host tensors never touch a GPU, so they work while its kernels wait.
:class:`~.connected.ConnectedTransport` joins the control plane to the channels of a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zbv_worker.transport.world import Layout


class ControlPlane(ABC):
    """Control messages of one rank. Methods behave as those of :class:`Transport` with the same name."""

    rank: int
    layout: Layout
    ranks_on_host: int
    """Ranks of this world that run on this host, including those of other launchers."""

    @abstractmethod
    def gather(self, value: Any, timeout: float) -> list[Any]:
        """Return every rank's JSON value, ordered by rank. Collective."""

    @abstractmethod
    def barrier(self, timeout: float) -> None:
        """Wait for all ranks; the TimeoutError names absent ones."""

    @abstractmethod
    def tell(self, peer: int, value: int, timeout: float) -> None:
        """Send a 64-bit number to any rank."""

    @abstractmethod
    def hear(self, peer: int, timeout: float) -> int:
        """Receive the next number that ``peer`` sends."""

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, timeout: float) -> None:
        """Send a contiguous CPU tensor to any rank; waits until the peer receives it."""

    @abstractmethod
    def start_send(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        """Like :meth:`send` without waiting; the result waits, at most that many seconds.

        Until then the tensor must not change.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int, timeout: float) -> None:
        """Receive the next tensor that ``peer`` sends, of the same shape and dtype."""

    @abstractmethod
    def start_receive(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        """Like :meth:`receive` without waiting; the result waits, at most that many seconds."""

    @abstractmethod
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        """Sum a CPU tensor over all ranks. Collective."""

    @abstractmethod
    def post(self, name: str, value: str) -> None:
        """Publish a note that every rank can read."""

    @abstractmethod
    def posted(self, name: str) -> str | None:
        """Return a note, or None if no rank has published it. Does not wait."""

    @abstractmethod
    def naming_absent(self, name: str, ranks: Sequence[int]) -> AbstractContextManager[None]:
        """In this context, a TimeoutError gets the names of those ``ranks`` that do not report it as well.

        Parameters
        ----------
        name
            Equal on all of ``ranks``, and used once.
        """

    @abstractmethod
    def close(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """Destroy the worker's process groups: its own, and ``groups``, those of the channels.

        Only after a barrier of all ranks.
        """

    @abstractmethod
    def abort(self) -> None:
        """End all pending operations after a failure, on other ranks too; notes still work."""
