"""Sends the outputs of measured actions to the ranks that a pipeline would send them to.

On a CPU, sending occupies the core that computes: the action's thread copies the tensor to the network's
buffers, and the network's thread needs the same core. So an action is measured together with its send, while
the tensors of other ranks arrive. On a GPU the host only queues a send, and actions are measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from zbv_solver.problem.stages import Placement

from zbv_worker.measure.profile.captured import Captured
from zbv_worker.transport.channels import ChannelKey, Pending, Transport
from zbv_worker.transport.endpoints import Crossing
from zbv_worker.values.structure import Structure

_CPU = torch.device("cpu")


class Traffic:
    """The transfers of one rank while its actions are measured.

    Parameters
    ----------
    captured
        The rank's stages by index.
    """

    def __init__(self, transport: Transport, placement: Placement, captured: Mapping[int, Captured]):
        self._transport = transport
        self._placement = placement
        self._captured = captured
        self._pending: list[Pending] = []

    def begin(self, order: Sequence[str]) -> None:
        """Post the receives of a round.

        Parameters
        ----------
        order
            The letters of a round, equal on all ranks. Each is measured for all stages of a rank in turn.
        """
        for peer in range(self._placement.pp_degree):
            for letter in order:
                for stage in self._placement.stages_of[peer]:
                    boundary = self._boundary(stage, letter)
                    if boundary is not None and self._receiver(stage, letter) == self._transport.pp_rank:
                        receive = self._transport.receiver(ChannelKey(peer, self._transport.pp_rank))
                        crossing = self._crossing(boundary)
                        travelling = crossing.activation if letter == "F" else crossing.gradient
                        self._pending.append(receive(travelling.spec))

    def sending(self, stage: int, letter: str, action: Callable[[], Any]) -> Callable[[], Any]:
        """An action that also sends its output, if a pipeline would send it to another rank."""
        receiver, boundary = self._receiver(stage, letter), self._boundary(stage, letter)
        if receiver is None or boundary is None:
            return action
        crossing = self._crossing(boundary)
        packed = crossing.packed if letter == "F" else crossing.packed_gradient
        send = self._transport.sender(ChannelKey(self._transport.pp_rank, receiver))

        def run() -> Any:
            output = action()
            if output is not None:
                send(output if crossing.is_plain else packed(output, _CPU), f"{stage}{letter}")
            return output

        return run

    def end(self, timeout: float) -> None:
        """Wait until everything that the other ranks sent has arrived."""
        for pending in self._pending:
            pending.wait(timeout)
        self._pending.clear()

    def _boundary(self, stage: int, letter: str) -> int | None:
        """The boundary that an action's output crosses; None if it has none."""
        if letter == "W":
            return None
        boundary = stage if letter == "F" else stage - 1
        return boundary if 0 <= boundary < self._placement.n_stages - 1 else None

    def _receiver(self, stage: int, letter: str) -> int | None:
        """The rank that an action's output is sent to; None if it stays on its rank."""
        if self._boundary(stage, letter) is None:
            return None
        own, other = (self._placement.rank_of[at] for at in (stage, stage + (1 if letter == "F" else -1)))
        return None if own == other else other

    def _crossing(self, boundary: int) -> Crossing:
        """What crosses a boundary that this rank sends or receives."""
        above = self._captured.get(boundary)
        return Crossing(Structure.of(self._captured[boundary + 1].input if above is None else above.output))
