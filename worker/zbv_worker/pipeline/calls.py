"""The first message of every call: a rank tells its neighbours what it calls, before it uses their tensors.

Ranks that call different methods, or have different batches, would train on each other's wrong tensors or
wait for a timeout. So every call of a collective method begins with a small message to the ranks that this
rank exchanges tensors with, and to those that hold the same stages. It does not wait: a rank reads the
message of a neighbour before the first tensor that it takes from it, and at the end of the call at the
latest. The neighbour sent it before it computed that tensor, so a rank never waits for it alone.

Neighbours that agree in pairs agree all together, because the ranks of a pipeline form a chain.

A channel's receives are posted before their tensors are sent, so both ends must also know the shapes of all
microbatches' data, or know that they do not (:mod:`zbv_worker.transport.endpoints`). If every rank of a
pipeline is given the batch, every rank sees the shapes; the ranks then make sure of that, once for each new
combination. With a data rank, that rank tells the others (:mod:`zbv_worker.pipeline.data`). If some ranks are
given only what their layers need, the first call decides: either all microbatches of all steps have equal
shapes, or every activation has a header. The first call also finds ranks that lack a keyword, which their
layers would silently do without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from zbv_solver.plans.channels import Channel

from zbv_worker.errors import Disagreement, InvalidRun
from zbv_worker.failures.progress import CurrentProgress
from zbv_worker.model.protocol import Microbatch
from zbv_worker.stage.layers import Keywords
from zbv_worker.transport.connected import ConnectedTransport

Call = Literal["step", "evaluate"]
Shapes = tuple[int, ...]
"""By microbatch, numbers that stand for the shapes of its data."""

_NAMES = (
    "",
    "step",
    "evaluate",
    "change_plan",
    "clip_grad_norm_",
    "full_state_dict",
    "checkpoints",
    "checkpoints.save",
    "checkpoints.finish",
    "trace",
    "close",
)
CALLS = {name: number for number, name in enumerate(_NAMES)}
"""The numbers of the collective methods."""
_Wait = Callable[[float], None]
_SAMPLES = 16
"""How many numbers of a tensor are compared."""
_MOST_KNOWN = 4096
"""Combinations of shapes that are remembered."""
_ACCEPTED, _REFUSED = 1, 2


class Given(NamedTuple):
    """What a rank was given in a call."""

    keywords: list[str]
    """Their names."""
    shapes: Shapes
    are_equal: bool
    """Whether all microbatches have equal shapes."""
    combination: int
    """Stands for all shapes."""
    rows: int
    """Of the batch; 0 if they are not known."""

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], *, equal: bool, rows: int = 0) -> Given:
        """Describe microbatches: any nested containers of tensors.

        Parameters
        ----------
        equal
            Whether they are known to have equal shapes.
        """
        names = sorted({name for each in microbatches for name in each.keywords})
        shapes = tuple(map(_shapes_of, microbatches[:1] if equal else microbatches))
        shapes *= len(microbatches) if equal else 1
        are_equal = len(set(shapes)) == 1
        return cls(names, shapes, are_equal, shapes[0] if are_equal else digest(shapes), rows)


def _shapes_of(microbatch: Microbatch) -> int:
    leaves, structure = tree_flatten(tuple(microbatch))
    shapes = [(*x.shape, str(x.dtype)) if isinstance(x, Tensor) else type(x).__name__ for x in leaves]
    return digest((structure, shapes))


class Announcement(NamedTuple):
    """What a rank calls; all fields are integers, and 0 stands for what it does not know."""

    call: int
    """The number of the method in :data:`CALLS`."""
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
    acceptance: int = _ACCEPTED
    """Whether the rank can take its batch."""

    def of_batch(
        self, given: Given, microbatches: Sequence[Microbatch], *, has_first: bool, has_last: bool
    ) -> Announcement:
        """The announcement with what the rank was given.

        Parameters
        ----------
        has_first, has_last
            Whether the rank has the first layer, and the last one.
        """
        some = microbatches[0], microbatches[-1]
        keywords = [sorted(each.keywords.items()) for each in some]
        return self._replace(
            rows=given.rows,
            inputs=_contents([each.input for each in some], is_used=has_first),
            targets=_contents([each.target for each in some], is_used=has_last),
            names=digest(given.keywords),
            keywords=_contents([value for items in keywords for _, value in items]),
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
        self._mine = Announcement(CALLS[""])
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
            self.begin(Announcement(CALLS[call], acceptance=_REFUSED))

    def meet(self, peer: int) -> None:
        """Compare the call with that of a neighbour, once; raises like :meth:`begin`."""
        waiting = self._waiting.pop(peer, None)
        if waiting is None:
            return
        sent, received, theirs = waiting
        seconds = self._patience if self._number == 1 else self._timeout
        before, self._progress.waiting_for = self._progress.waiting_for, peer
        try:
            received(seconds)
            sent(seconds)
        except TimeoutError as error:
            raise TimeoutError(
                f"rank {peer} has not called {_NAMES[self._mine.call]} for {seconds:g} s. Check what it "
                f"does; if it is only slow, raise timeout"
            ) from error
        self._progress.waiting_for = before
        self._compare(peer, Announcement(*theirs.tolist()))

    def meet_all(self) -> None:
        """Compare the call with those of all neighbours; raises like :meth:`begin`."""
        for peer in sorted(self._waiting):
            self.meet(peer)

    def _compare(self, peer: int, theirs: Announcement) -> None:
        """Raise :class:`Disagreement` if a neighbour's call is another one, as far as both ranks know."""
        fields = zip(Announcement._fields, self._mine, theirs, strict=True)
        different = {name for name, one, other in fields if one and other and one != other}
        matters = {"call", "acceptance"} | ({"trained"} if peer in self._siblings else _OF_BATCHES)
        if different & matters:
            self._require_equal(peer, theirs, different)

    def _require_equal(self, peer: int, theirs: Announcement, different: set[str]) -> None:
        mine, me = self._mine, f"rank {self._rank}"
        if "call" in different:
            raise Disagreement(
                f"rank {peer} called {_NAMES[theirs.call]}, and {me} called {_NAMES[mine.call]}. All ranks "
                f"must make the same calls in the same order."
            )
        if "acceptance" in different and mine.acceptance == _REFUSED:
            raise Disagreement(f"{me} refused its batch, and rank {peer} did not.")
        if "acceptance" in different:
            why = self._control.posted(f"refused/{self._number}/{peer}") or "its batch cannot be used"
            raise Disagreement(f"rank {peer} refused its batch, and {me} did not: {why}")
        if peer in self._siblings:
            raise Disagreement(
                f"{me} and rank {peer} hold the same stages and train other parameters of them. Freeze "
                f"and add parameters alike on all replicas."
            )
        require_same_rows({self._rank: mine.rows, peer: theirs.rows})
        if mine.inputs == theirs.inputs != 0 or mine.targets == theirs.targets != 0:
            # Equal targets belong to both inputs, for example with random augmentation: one rank's are used.
            different -= {"inputs", "targets"}
        if mine.names != theirs.names:
            different.discard("keywords")
        for what in ("inputs", "targets", "keywords"):
            if what in different:
                raise Disagreement(
                    f"rank {peer} and {me} were given different {what}. Load the same batches on all ranks "
                    f"of a pipeline, in the same order. A rank that does not use its {what} may pass None."
                )
        if "shapes" in different:
            raise Disagreement(
                f"the batches of ranks {self._rank} and {peer} have different shapes. Load the same batches "
                f"on all ranks of a pipeline, in the same order."
            )


_OF_BATCHES = {"rows", "shapes", "inputs", "targets", "keywords"}


class AgreedShapes:
    """The shapes on which the ranks of one pipeline agree.

    Parameters
    ----------
    keywords_by_rank
        Those that the layers of each rank take.
    calls
        Compare new shapes with those of the neighbours.
    startup_timeout
        Seconds to wait for all ranks in the first call of each kind.
    may_differ
        Whether the plan says that microbatches differ.

    Attributes
    ----------
    rule
        By call, what the ranks know since the first one: the shapes that each sees in its own batch, that all
        microbatches are equal, or nothing.
    """

    def __init__(
        self,
        transport: ConnectedTransport,
        calls: Calls,
        keywords_by_rank: Sequence[Keywords],
        startup_timeout: float,
        *,
        may_differ: bool = False,
    ):
        self._transport = transport
        self._calls = calls
        layout = transport.layout
        self._column = [layout.global_rank(at, transport.column) for at in range(layout.pp_degree)]
        self._takes = keywords_by_rank
        self._startup_timeout = startup_timeout
        self._may_differ = may_differ
        self._known: dict[Call, set[int]] = {}
        self.rule: dict[Call, Literal["seen", "equal", "unknown"]] = {}

    def agree(self, call: Call, given: Given) -> Shapes | None:
        """Return the shapes of a call's microbatches; None if the ranks cannot know them.

        Collective in the first call of each kind, and over the pipeline if the shapes are new.

        Raises
        ------
        InvalidRun
            If a rank lacks a keyword that its layers take.
        Disagreement
            If the ranks of the pipeline have different batches, or do not make the same call.
        TimeoutError, ConnectionError
            If a rank does not take part.
        """
        known, combination = self._known.get(call), given.combination
        if known is None:
            self._known[call] = {combination}
            self.rule[call] = self._agree_first(call, given)
        elif self.rule[call] == "seen" and combination not in known:
            self._calls.meet_all()
            if len(known) == _MOST_KNOWN:
                known.clear()
            known.add(combination)
        elif self.rule[call] == "equal" and combination not in known:
            raise InvalidRun(
                f"found a batch of other shapes than in the first {call}. They may change if all ranks or "
                f"only the data_rank are given the whole batch."
            )
        if self.rule[call] == "equal":
            return (0,) * len(given.shapes)
        return given.shapes if self.rule[call] == "seen" else None

    def _agree_first(self, call: Call, given: Given) -> Literal["seen", "equal", "unknown"]:
        """Who knows the shapes: all ranks of the pipeline, because they were given the same, or none."""
        self._calls.meet_all()
        said = self._transport.gather(
            [given.keywords, given.combination, given.are_equal, given.rows], self._startup_timeout
        )
        require_same_rows({rank: said[rank][3] for rank in self._column})
        self._require_keywords({rank: said[rank][0] for rank in self._column})
        if len({said[rank][1] for rank in self._column}) == 1:
            return "seen"
        all_equal = all(said[rank][2] for rank in self._column)
        return "equal" if all_equal and not self._may_differ else "unknown"

    def _require_keywords(self, given: Mapping[int, Sequence[str]]) -> None:
        names = {name: rank for rank, own in reversed([*given.items()]) for name in own}
        for rank, own in given.items():
            takes = self._takes[rank]
            lacking = [n for n in names if n not in own and (takes.takes_any or n in takes.names)]
            if lacking:
                raise InvalidRun(
                    f"rank {rank} was not given the keyword {lacking[0]!r}, which its layers take and rank "
                    f"{names[lacking[0]]} was given. Pass it on every rank, or pass data_rank= to Pipeline "
                    f"and the batch on that rank only."
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
    if not leaves or any(
        type(each) is not Tensor or each.device.type != "cpu" or each.layout is not torch.strided
        for each in tensors
    ):
        return 0
    samples = [_sample(tensor) for tensor in tensors]
    if not is_used and len(set(map(str, chain(*samples)))) <= 1:
        return 0
    what = [
        (*leaf.shape, str(leaf.dtype)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in leaves
    ]
    return digest((structure, what, samples))


def _sample(tensor: Tensor) -> list[Any]:
    """Some numbers; their places follow from the shape alone, not from the order in memory."""
    places = torch.arange(0, tensor.numel(), max(1, tensor.numel() // _SAMPLES), device="cpu")
    if tensor.is_contiguous():
        found = tensor.detach().reshape(-1)[places]
    else:
        found = tensor.detach()[torch.unravel_index(places, tensor.shape)]
    numbers: list[Any] = found.tolist()
    return numbers
