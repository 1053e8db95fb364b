"""The control plane of a fake cluster: the ranks' messages, barriers and notes, in virtual time."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override
from zbv_worker.transport.connected import ControlPlane
from zbv_worker.transport.world import Layout

from support.fake_nccl.simulation import Simulation, this_host

_MESSAGE_SECONDS = 1e-4
_POLL_SECONDS = 1e-4


class ControlState:
    """What the ranks share."""

    def __init__(self, simulation: Simulation, layout: Layout):
        self.simulation = simulation
        self.layout = layout
        self.gathered: dict[int, dict[int, str]] = defaultdict(dict)
        self.told: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.posted: dict[tuple[int, int], int] = defaultdict(int)
        self.notes: dict[str, str] = {}


class FakeControl(ControlPlane):
    """One rank's control plane.

    Parameters
    ----------
    destroy
        Destroys the rank's groups, as ``destroy_process_group`` does when the real control plane closes.
    """

    def __init__(self, state: ControlState, rank: int, destroy: Callable[[], None]):
        self.rank = rank
        self._destroy = destroy
        self.layout = state.layout
        self.ranks_on_host = state.layout.world_size
        self._state = state
        self._turn = 0

    @override
    def gather(self, value: Any, timeout: float) -> list[Any]:
        found = self._state.gathered[self._turn]
        self._turn += 1
        ranks = range(self.layout.world_size)
        self._change(lambda: found.update({self.rank: json.dumps(value)}))

        def absent() -> str:
            return f"ranks {[rank for rank in ranks if rank not in found]} did not take part"

        self._wait(lambda: len(found) == len(ranks), timeout, absent)
        return [json.loads(found[rank]) for rank in ranks]

    @override
    def barrier(self, timeout: float) -> None:
        self.gather(None, timeout)

    @override
    def tell(self, peer: int, value: int, timeout: float) -> None:
        self._change(lambda: self._state.told[self.rank, peer].append(value))

    @override
    def hear(self, peer: int, timeout: float) -> int:
        told = self._state.told[peer, self.rank]
        self._wait(lambda: bool(told), timeout, lambda: f"rank {peer} sent no number")
        return told.popleft()

    @override
    def send(self, tensor: Tensor, peer: int, timeout: float) -> None:
        raise NotImplementedError

    @override
    def start_send(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        pair = self.rank, peer
        sent, posted = self._state.sent[pair], self._state.posted
        with torch._C.DisableTorchFunction():  # a clone in host memory
            content = tensor.clone()
        self._change(lambda: sent.append(content), peer)
        turn = len(sent)
        return lambda timeout: self._wait(
            lambda: posted[pair] >= turn, timeout, lambda: f"rank {peer} did not take a tensor"
        )

    @override
    def start_receive(self, tensor: Tensor, peer: int) -> Callable[[float], None]:
        pair = peer, self.rank
        sent, posted = self._state.sent[pair], self._state.posted
        turn = posted[pair]
        self._change(lambda: posted.update({pair: turn + 1}), peer)

        def wait(timeout: float) -> None:
            self._wait(lambda: len(sent) > turn, timeout, lambda: f"rank {peer} sent no tensor")
            tensor.copy_(sent[turn])

        return wait

    @override
    def receive(self, tensor: Tensor, peer: int, timeout: float) -> None:
        raise NotImplementedError

    @override
    def sum_over_ranks(self, values: Tensor, timeout: float) -> Tensor:
        return torch.tensor(self.gather(values.tolist(), timeout), dtype=values.dtype).sum(0)

    @override
    def post(self, name: str, value: str) -> None:
        self._change(lambda: self._state.notes.update({name: value}))

    @override
    def posted(self, name: str) -> str | None:
        host = this_host()
        host.time += _MESSAGE_SECONDS
        host.catch_up()
        return self._state.notes.get(name)

    @override
    @contextlib.contextmanager
    def naming_absent(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        yield

    @override
    def abort(self) -> None:
        raise NotImplementedError

    @override
    def close(self, groups: Sequence[object] = ()) -> None:
        this_host().spend(_MESSAGE_SECONDS)
        self._destroy()

    def _change(self, change: Callable[[], object], seen_by: int | None = None) -> None:
        host = this_host()
        host.spend(_MESSAGE_SECONDS)
        host.catch_up()
        change()
        if seen_by is None:
            self._state.simulation.changed_everywhere()
        else:
            self._state.simulation.changed(seen_by)

    def _wait(self, condition: Callable[[], bool], timeout: float, late: Callable[[], str]) -> None:
        host = this_host()
        deadline = host.time + timeout
        host.catch_up()
        while not condition():
            if host.time > deadline:
                raise TimeoutError(late())
            host.pause(_POLL_SECONDS, late())
        host.idle_polls = 0
