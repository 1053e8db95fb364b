"""Tells the ranks that one of them failed, was killed or hangs, and which one.

Every rank publishes a sign of life and what it waits for, and polls the first failure that any rank
published. All of that goes through the ranks' store from the liveness thread, with a connection that no other
thread uses. Each rank watches the signs of the next one, so the store gets a constant number of requests per
rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from zbv_worker.failures.liveness import BEAT_SECONDS
from zbv_worker.host.process import Clock, HostClock

SILENT_SECONDS = 5 * BEAT_SECONDS
"""A rank without a sign of life for this long is said to be silent, once it is the cause of a failure."""
_SILENT = "it gives no sign of life; its process or host ended, or is stopped"
_FAILURE, _READ, _SIGN, _ENDED = "failure", "failure/read/{}", "sign/{}", "ended"


class Notes(Protocol):
    """Notes that every rank can read; both methods raise ConnectionError if the ranks' store is gone."""

    def post(self, name: str, value: str) -> None:
        """Publish a note."""

    def posted(self, name: str) -> str | None:
        """Return a note, or None if no rank has published it. Does not wait."""


@dataclass(frozen=True)
class Doing:
    """What a rank does: where it is, in words, and the rank that it waits for, if any."""

    at: str
    waits_for: int | None = None


@dataclass(frozen=True)
class Loss:
    """The rank that made the run fail, and why."""

    rank: int
    reason: str
    is_input_wrong: bool = False
    """Whether a retry with the same input is pointless."""

    def __str__(self) -> str:
        return f"rank {self.rank} lost: {self.reason}"


class _Sign(NamedTuple):
    beat: int
    doing: Doing


class FailureNotes:
    """The failure notes of one rank."""

    def __init__(self, notes: Notes, rank: int, clock: Clock | None = None):
        self._notes = notes
        self._rank = rank
        self._clock = clock or HostClock()

    def publish(self, loss: Loss) -> None:
        """Publish the cause of the run's failure, unless a rank has done so."""
        if self.first() is None:
            self._notes.post(_FAILURE, json.dumps(asdict(loss)))

    def first(self) -> Loss | None:
        """The cause that a rank has published."""
        found = self._notes.posted(_FAILURE)
        return None if found is None else Loss(**json.loads(found))

    def needs_no_more(self) -> None:
        """Announce that this rank knows the cause, and reads no more notes."""
        self._notes.post(_READ.format(self._rank), "")

    def readers(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks that may still read notes: they do not know the cause, and have not ended."""
        ended = json.dumps(_ENDED)
        return [
            rank
            for rank in ranks
            if self._notes.posted(_READ.format(rank)) is None
            and self._notes.posted(_SIGN.format(rank)) != ended
        ]

    def sign(self, beat: int, doing: Doing) -> None:
        """Publish a sign of life."""
        self._notes.post(_SIGN.format(self._rank), json.dumps({"beat": beat, **asdict(doing)}))

    def sign_last(self) -> None:
        """Announce that no sign of life will follow, because this rank has ended its run."""
        self._notes.post(_SIGN.format(self._rank), json.dumps(_ENDED))

    def sign_of(self, rank: int) -> _Sign | None:
        """The newest sign of life of a rank; None if there is none, or none is expected."""
        found = json.loads(self._notes.posted(_SIGN.format(rank)) or "null")
        if not isinstance(found, dict):
            return None
        return _Sign(found["beat"], Doing(found["at"], found["waits_for"]))

    def cause(self, peer: int) -> Loss:
        """Find the rank to blame after this rank waited for ``peer`` without success.

        The peer may itself wait for another rank, and so on. The first silent rank of that chain is to blame,
        or else the last one. Takes little more than :data:`SILENT_SECONDS`.
        """
        seen: dict[int, tuple[int | None, float]] = {}
        while True:
            found = self.first() or self._follow(peer, seen)
            if found is not None:
                return found
            self._clock.pause(BEAT_SECONDS / 5)

    def _follow(self, peer: int, seen: dict[int, tuple[int | None, float]]) -> Loss | None:
        """Follow the chain that begins with ``peer``; None if it is not yet known who is alive.

        Parameters
        ----------
        seen
            By rank, the first beat that was read, and when. Only a later beat shows that the rank is alive,
            and that its sign is true.
        """
        visited, rank, is_known = {self._rank}, peer, True
        while True:
            visited.add(rank)
            sign, now = self.sign_of(rank), self._clock.now()
            beat = None if sign is None else sign.beat
            first, since = seen.setdefault(rank, (beat, now))
            if sign is None or beat == first:
                if now - since > SILENT_SECONDS:
                    return Loss(rank, _SILENT) if is_known else None
                is_known = False
            further = None if sign is None else sign.doing.waits_for
            if sign is None or further is None or further in visited:
                return Loss(rank, _stuck(sign.doing)) if sign is not None and is_known else None
            rank = further

    def silent_one(self, world_size: int) -> Loss | None:
        """Find a rank to blame after a failure of any rank: the published cause, or a silent rank.

        A sign that a lost rank gave last may arrive late, so a rank has twice :data:`SILENT_SECONDS` to show
        that it is alive.
        """
        begun = self._clock.now()
        others = [rank for rank in range(world_size) if rank != self._rank]
        seen = {rank: (self.sign_of(rank), begun) for rank in others}
        while self._clock.now() - begun <= 2 * SILENT_SECONDS:
            # At once, because the notes are gone when the process of rank 0 has ended.
            known = self.first()
            if known is not None:
                return known
            self._clock.pause(BEAT_SECONDS / 5)
            for rank, (before, since) in seen.items():
                sign, now = self.sign_of(rank), self._clock.now()
                if sign != before:
                    seen[rank] = sign, now
                elif sign is not None and now - since > SILENT_SECONDS:
                    return Loss(rank, _SILENT)
        return None


def _stuck(doing: Doing) -> str:
    waits = "" if doing.waits_for is None else f", which waits for rank {doing.waits_for}"
    return f"it is alive, but does not get beyond {doing.at}{waits}"


class PeerWatch:
    """Gives signs of life, and watches for failures of other ranks, as a duty of the liveness thread.

    Parameters
    ----------
    following
        The rank whose signs of life this rank watches; None for none.
    patience
        Seconds without a sign of life after which that rank is lost. May be changed.
    doing
        What this rank does at the moment.
    on_loss
        Called once with a loss.
    needs_store
        Whether a store that is gone is a loss of rank 0; otherwise the watch ends without one.
    """

    def __init__(
        self,
        notes: FailureNotes,
        following: int | None,
        patience: float,
        doing: Callable[[], Doing],
        on_loss: Callable[[Loss], None],
        clock: Clock | None = None,
        *,
        needs_store: bool = True,
    ):
        self.patience = patience
        self._notes, self._needs_store, self._following = notes, needs_store, following
        self._doing, self._on_loss = doing, on_loss
        self._clock = clock or HostClock()
        self._beat = 0
        self._seen: tuple[_Sign | None, float] = (None, self._clock.now())

    def look(self) -> bool:
        """Look once; returns whether to look again."""
        try:
            loss = self.loss()
        except ConnectionError as error:
            if not self._needs_store:
                return False
            loss = Loss(0, str(error))
        if loss is not None:
            self._on_loss(loss)
        return loss is None

    def end(self) -> None:
        """Announce the regular end of this rank; the others then expect no sign of life from it."""
        self._notes.sign_last()

    def loss(self) -> Loss | None:
        """Give a sign of life, and return the loss if there is one."""
        self._beat += 1
        self._notes.sign(self._beat, self._doing())
        known = self._notes.first()
        if known is not None or self._following is None:
            return known
        sign, now = self._notes.sign_of(self._following), self._clock.now()
        if sign is None or self._seen[0] is None or sign.beat != self._seen[0].beat:
            self._seen = sign, now
        silent = now - self._seen[1]
        if silent <= self.patience:
            return None
        loss = Loss(self._following, f"it has given no sign of life for {silent:.0f} s")
        self._notes.publish(loss)
        return loss
