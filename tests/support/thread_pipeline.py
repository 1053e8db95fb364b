"""Pipelines whose ranks are threads of one process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any
from unittest import mock

import torch
import zbv_solver
from torch import Tensor
from typing_extensions import override
from zbv_worker.errors import PeerLost
from zbv_worker.model.layer_list import Layers
from zbv_worker.pipeline import pipeline
from zbv_worker.pipeline.connecting import RankDevice
from zbv_worker.pipeline.pipeline import Pipeline

from support.thread_transport import ThreadHub, ThreadTransport

TIMEOUT = 40.0  # no test waits for it to pass; a busy machine may stop a thread for long


class ConnectedHub(ThreadHub):
    """Connects ranks that also send tensors of the host, and counts the bytes of these by rank."""

    def __init__(self, pp_degree: int, replicas: int):
        super().__init__(pp_degree, replicas)
        self.sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.sent_bytes: dict[int, list[int]] = defaultdict(list)

    @override
    def transport(self, rank: int) -> ThreadTransport:
        return _Connected(self, rank)


class _Connected(ThreadTransport):
    """A rank's transport with what a pipeline needs to gather its state and to fail."""

    def __init__(self, hub: ConnectedHub, rank: int):
        super().__init__(hub, rank)
        self._sent, self._sent_bytes = hub.sent, hub.sent_bytes[rank]
        self.control = self

    def abort(self, seconds: float = 0.0) -> bool:
        self.close()
        return True

    def start_send(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        self.send(tensor, peer, TIMEOUT)
        return lambda timeout: None

    def start_receive(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        return lambda timeout: self.receive(tensor, peer, timeout)

    def send(self, tensor: Tensor, peer: int, timeout: float) -> None:
        with self._hub.changed:
            self._sent_bytes.append(tensor.nbytes)
            self._sent[self.rank, peer].append(tensor.clone())
            self._hub.changed.notify_all()

    def receive(self, tensor: Tensor, peer: int, timeout: float) -> None:
        sent, lost = self._sent[peer, self.rank], self._hub.lost
        with self._hub.changed:
            if not self._hub.changed.wait_for(lambda: sent or peer in lost, timeout):
                raise TimeoutError(f"rank {peer} sent no tensor")
            if not sent:
                raise ConnectionError(f"rank {peer} has closed its transport")
            tensor.copy_(sent.popleft())


@cache
def plan_of(p: int, placement: str, microbatches: int = 4) -> Any:
    costs = {"forward": 1, "backward_input": 1, "backward_weight": 1}
    problem = {"pp_degree": p, "microbatches": microbatches, "placement": placement, "costs": costs}
    return zbv_solver.plan(zbv_solver.parse(problem), "quick")


def on_ranks(
    plan: Any,
    layers: Callable[[], Layers],
    loss: Callable[[Any, Any], Any] | None,
    program: Callable[[Pipeline], Any],
    *,
    ranks: int | None = None,
    replicas: int = 1,
    loss_of: Callable[[Any], Any] | None = None,
    **options: Any,
) -> list[Any]:
    """What a program returns or raises on every rank; each makes its own layers.

    ``loss_of`` makes each rank's loss from its layers. Documents of plans need ``ranks``. Further options are
    those of :class:`Pipeline`.
    """
    hub, place = (
        ConnectedHub(ranks or plan.problem.pp_degree, replicas),
        RankDevice(torch.device("cpu"), "gloo"),
    )
    # In one thread, because all threads draw from torch's default generator.
    local, made = threading.local(), [layers() for _ in range(hub.layout.world_size)]
    losses = [loss if loss_of is None else loss_of(each) for each in made]

    def connected(*_: object) -> tuple[ThreadTransport, RankDevice]:
        return local.transport, place

    def run(rank: int) -> Any:
        local.transport = hub.transport(rank)
        try:
            made_with = {"timeout": TIMEOUT, "startup_timeout": TIMEOUT, **options}
            with Pipeline(plan, made[rank], losses[rank], **made_with) as pipe:
                return program(pipe)
        except Exception as error:
            local.transport.close()  # a process would end here, and its connections with it
            return error

    with (
        mock.patch.object(pipeline, "connected_world", connected),
        ThreadPoolExecutor(hub.layout.world_size) as pool,
    ):
        return list(pool.map(run, range(hub.layout.world_size)))


def rank_of(pipe: Pipeline) -> int:
    """The rank whose pipeline it is."""
    return pipe._transport.rank


def returned(found: list[Any]) -> list[Any]:
    """What all ranks returned; raises the error of one that failed, which a peer's loss only repeats."""
    errors = [each for each in found if isinstance(each, Exception)]
    for error in sorted(errors, key=lambda error: isinstance(error, PeerLost)):
        raise error
    return found
