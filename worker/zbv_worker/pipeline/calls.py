"""The first message of every call: a rank tells its neighbours what it calls, before it uses their tensors.

Ranks that call different methods, or have different batches, would train on each other's wrong tensors or
wait for a timeout. So every call of a collective method begins with a small message to the ranks that this
rank exchanges tensors with, and to those that hold the same stages. It does not wait: a rank reads the
message of a neighbour before the first tensor that it takes from it, and at the end of the call at the
latest. The neighbour sent it before it computed that tensor, so a rank never waits for it alone.

Neighbours that agree in pairs agree all together, because the ranks of a pipeline form a chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from zbv_solver.plans.channels import Channel

from zbv_worker.errors import Disagreement
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.model.protocol import Microbatch
from zbv_worker.pipeline.batch import Batch
from zbv_worker.transport.connected import ConnectedTransport

CALLS = (
    "step",
    "evaluate",
    "clip_grad_norm_",
    "full_state_dict",
    "checkpoints",
    "checkpoints.save",
    "checkpoints.finish",
    "trace",
    "close",
)
_Wait = Callable[[float], None]
_SAMPLES = 16
"""How many numbers of a tensor are compared."""


class Announcement(NamedTuple):
    """What a rank calls; all fields are integers, and 0 stands for what it does not know."""

    call: int
    """The place of the method in :data:`CALLS`."""
    rows: int = 0
    """Of the batch."""
    shapes: int = 0
    """Stands for the shapes of all microbatches, if every rank is given the whole batch."""
    inputs: int = 0
    targets: int = 0
    names: int = 0
    keywords: int = 0
    """Stand for the inputs, the targets, the names of keywords, and their values: shapes, and some
    numbers."""
    trained: int = 0
    """Stands for the parameters that require a gradient."""
    is_refused: int = 0
    """Whether the rank cannot take its batch."""

    @classmethod
    def of(cls, call: str, **more: int) -> Announcement:
        """An announcement of a method, by its name."""
        return cls(CALLS.index(call), **more)

    def of_batch(
        self, batch: Batch, microbatches: Sequence[Microbatch], *, has_first: bool, has_last: bool
    ) -> Announcement:
        """The announcement with what the rank was given.

        Parameters
        ----------
        has_first, has_last
            Whether the rank has the first layer, and the last one.
        """
        some = microbatches[0], microbatches[-1]
        given = [sorted(each.keywords.items()) for each in some]
        return self._replace(
            rows=batch.rows,
            inputs=_contents([each.input for each in some], is_used=has_first),
            targets=_contents([each.target for each in some], is_used=has_last),
            names=digest([name for name, _ in given[0]]),
            keywords=_contents([value for items in given for _, value in items]),
        )


class Calls:
    """The announcements of one rank.

    Parameters
    ----------
    channels
        Those of this rank's list.
    progress
        Updated while the rank waits for another one.
    timeout, patience
        Seconds to wait for another rank's announcement, and for those of the first call.
    """

    def __init__(
        self,
        transport: ConnectedTransport,
        channels: Iterable[Channel],
        progress: CurrentProgress,
        timeout: float,
        patience: float,
    ):
        self._progress = progress
        layout, position, column = transport.layout, transport.pp_rank, transport.column
        positions = {position - 1, position + 1, *chain(*((each.sender, each.receiver) for each in channels))}
        positions &= set(range(layout.pp_degree))
        columns = {(column + by) % layout.columns for by in (-1, 1)}
        self._siblings = {layout.global_rank(position, each) for each in columns} - {transport.rank}
        self._peers = {layout.global_rank(at, column) for at in positions} | self._siblings
        self._peers.discard(transport.rank)
        self._rank, self._control = transport.rank, transport.control
        self._timeout, self._patience = timeout, patience
        self._mine = Announcement(0)
        self._number = 0
        self._waiting: dict[int, tuple[_Wait, _Wait, Tensor]] = {}

    def begin(self, mine: Announcement) -> None:
        """Announce a call; waits only for what other ranks have announced before.

        Raises
        ------
        Disagreement
            If a neighbour's call before was another one.
        TimeoutError, ConnectionError
            If a neighbour did not take part in it.
        """
        self.meet_all()
        self._mine, self._number = mine, self._number + 1
        message = torch.tensor(mine, dtype=torch.int64, device="cpu")
        for peer in sorted(self._peers):
            theirs = torch.empty_like(message)
            sent = self._control.start_send(message, peer)
            self._waiting[peer] = sent, self._control.start_receive(theirs, peer), theirs

    def refuse(self, call: str, why: str) -> None:
        """Announce that this rank cannot take its batch. If all ranks refuse theirs, they may go on."""
        if self._peers:
            self._control.post(f"refused/{self._number + 1}/{self._rank}", why)
            self.begin(Announcement.of(call, is_refused=1))

    def meet(self, peer: int) -> None:
        """Compare the call with that of a neighbour, once; raises like :meth:`begin`."""
        waiting = self._waiting.pop(peer, None)
        if waiting is None:
            return
        sent, received, theirs = waiting
        seconds = self._patience if self._number == 1 else self._timeout
        name = CALLS[self._mine.call]
        before, self._progress.waiting_for = self._progress.waiting_for, peer
        try:
            received(seconds)
            sent(seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {peer} has not called {name} for {seconds:g} s. Check what it does; if it is only "
                f"slow, raise timeout"
            ) from error
        self._progress.waiting_for = before
        self._compare(peer, Announcement(*theirs.tolist()))

    def meet_all(self) -> None:
        """Compare the call with those of all neighbours; raises like :meth:`begin`."""
        for peer in sorted(self._waiting):
            self.meet(peer)

    def _compare(self, peer: int, theirs: Announcement) -> None:
        mine, me = self._mine, f"rank {self._rank}"
        if mine.call != theirs.call:
            raise Disagreement(
                f"rank {peer} called {CALLS[theirs.call]}, and {me} called {CALLS[mine.call]}. All ranks "
                f"must make the same calls in the same order."
            )
        if mine.is_refused and theirs.is_refused:
            return
        if theirs.is_refused:
            why = self._control.posted(f"refused/{self._number}/{peer}") or "its batch cannot be used"
            raise Disagreement(f"rank {peer} refused its batch, and {me} did not: {why}")
        if mine.is_refused:
            raise Disagreement(f"{me} refused its batch, and rank {peer} did not.")
        if peer in self._siblings:
            if mine.trained != theirs.trained:
                raise Disagreement(
                    f"{me} and rank {peer} hold the same stages and train other parameters of them. Freeze "
                    f"and add parameters alike on all replicas."
                )
            return
        self._compare_batches(peer, theirs)

    def _compare_batches(self, peer: int, theirs: Announcement) -> None:
        mine, me = self._mine, f"rank {self._rank}"
        require_same_rows({self._rank: mine.rows, peer: theirs.rows})
        kinds = [("inputs", mine.inputs, theirs.inputs), ("targets", mine.targets, theirs.targets)]
        different = [what for what, one, other in kinds if _differ(one, other)]
        if different and any(one == other != 0 for _, one, other in kinds):
            # Equal targets belong to both inputs, for example with random augmentation: one rank's are used.
            different = []
        if mine.names == theirs.names and _differ(mine.keywords, theirs.keywords):
            different.append("keywords")
        for what in different:
            raise Disagreement(
                f"rank {peer} and {me} were given different {what}. Load the same batches on all ranks "
                f"of a pipeline, in the same order. A rank that does not use its {what} may pass None."
            )
        if _differ(mine.shapes, theirs.shapes):
            raise Disagreement(
                f"the batches of ranks {self._rank} and {peer} have different shapes. Load the same batches "
                f"on all ranks of a pipeline, in the same order."
            )


def require_same_rows(rows: Mapping[int, int]) -> None:
    """Raise :class:`Disagreement` if ranks have batches of different sizes; 0 is no batch."""
    known = {rank: count for rank, count in sorted(rows.items()) if count}
    first = next(iter(known), None)
    for rank, count in known.items():
        if first is not None and count != known[first]:
            raise Disagreement(
                f"rank {first} has a batch of {known[first]} rows, and rank {rank} one of {count}. Load the "
                f"same batches on all ranks of a pipeline, or pass data_rank= to Pipeline."
            )


def _differ(one: int, other: int) -> bool:
    return bool(one and other and one != other)


def digest(value: object) -> int:
    """A number that is equal on all ranks, and not 0; hash() is not."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:6]) + 1


def _contents(value: Any, *, is_used: bool = True) -> int:
    """A number that stands for tensors in containers: their structure, shapes, and some of their numbers.

    It is 0 for None; for tensors that this rank cannot read at once, for example on a GPU; and for a single
    number in all places if the rank does not use it: that takes the place of a batch.
    """
    leaves, structure = tree_flatten(value)
    leaves = [leaf for leaf in leaves if leaf is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not leaves or not all(map(_is_readable, tensors)):
        return 0
    samples = [_sample(tensor) for tensor in tensors]
    if not is_used and len(set(map(str, chain(*samples)))) <= 1:
        return 0
    what = [
        (*leaf.shape, str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    ]
    return digest((structure, what, samples))


def _is_readable(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _sample(tensor: Tensor) -> list[Any]:
    """Some numbers; their places follow from the shape alone, not from the order in memory."""
    places = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _SAMPLES), device="cpu")
    if tensor.is_contiguous():
        found = tensor.detach().reshape(-1)[places]
    else:
        found = tensor.detach()[torch.unravel_index(places, tensor.shape)]
    numbers: list[Any] = found.tolist()
    return numbers
