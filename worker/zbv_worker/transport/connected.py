"""A transport that joins the control plane to the channels of a backend."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from zbv_worker.transport.channels import Transport
from zbv_worker.transport.control import ControlPlane

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
