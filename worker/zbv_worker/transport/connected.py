"""The control plane, and transports that join it to the channels of a backend.

Messages of the control plane carry no tensor of the model. Agreement, barriers, notes and sums of host
tensors never touch a GPU, so they work while its kernels wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.transport.channels import Transport
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


ABORT_SECONDS = 10.0
"""How long a failed rank tries to end its operations before its process ends anyway."""


class ConnectedTransport(Transport):
    """A transport whose control messages go through a :class:`ControlPlane`.

    Use it as a context: an exit without an error closes it, an exit with an error aborts it.
    """

    def __init__(self, control: ControlPlane):
        self.control = control
        self.rank = control.rank
        self.layout = control.layout

    @property
    @abstractmethod
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same stages; None when there is one replica."""

    @abstractmethod
    def abort(self, timeout: float) -> bool:
        """End all pending operations after a failure, from any thread; takes at most ``timeout`` seconds.

        Returns whether all have ended. Otherwise the transport must not be closed: closing waits for them. It
        is unusable in any case.
        """

    def __enter__(self) -> ConnectedTransport:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abort(ABORT_SECONDS)

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        return self.control.gather(value, timeout)

    @override
    def barrier(self, timeout: float) -> None:
        self.control.barrier(timeout)

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        self.control.tell(peer, value, timeout)

    @override
    def hear(self, peer: int, timeout: float) -> int:
        return self.control.hear(peer, timeout)

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return self.control.sum_over_ranks(values.cpu(), timeout).to(values.device)

    @override
    def post(self, name: str, value: str) -> None:
        self.control.post(name, value)

    @override
    def posted(self, name: str) -> str | None:
        return self.control.posted(name)
