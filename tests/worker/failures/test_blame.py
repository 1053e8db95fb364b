"""Which rank is to blame: what ranks publish, and what others conclude."""

from __future__ import annotations

from typing import Any

import pytest
from support.manual_clock import ManualClock
from zbv_worker.failures.blame import SILENT_SECONDS, Doing, FailureNotes, Loss, PeerWatch


class Store:
    """Notes of all ranks; a live rank beats whenever its sign is read."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.alive: dict[int, Doing] = {}
        self.is_gone = False
        self._beat = 0

    def post(self, name: str, value: str) -> None:
        self._check()
        self.notes[name] = value

    def posted(self, name: str) -> str | None:
        self._check()
        for rank, doing in self.alive.items():
            if name == f"sign/{rank}":
                self._beat += 1
                FailureNotes(self, rank).sign(self._beat, doing)
        return self.notes.get(name)

    def _check(self) -> None:
        if self.is_gone:
            raise ConnectionError("the ranks' common store is gone")


@pytest.fixture
def store() -> Store:
    return Store()


def notes_of(store: Store, rank: int, clock: ManualClock | None = None) -> FailureNotes:
    return FailureNotes(store, rank, clock or ManualClock())


def test_the_first_published_cause_stays(store: Store) -> None:
    notes_of(store, 1).publish(Loss(1, "it failed", is_input_wrong=True))
    notes_of(store, 2).publish(Loss(3, "later"))
    assert notes_of(store, 0).first() == Loss(1, "it failed", is_input_wrong=True)
    assert notes_of(store, 0).cause(3) == Loss(1, "it failed", is_input_wrong=True)


def test_a_timeout_blames_the_last_rank_of_the_chain_that_waits(store: Store) -> None:
    store.alive = {3: Doing("step 2, 3F0", 2), 2: Doing("step 2, 2F0", 1), 1: Doing("step 2, 1F0")}
    loss = notes_of(store, 0).cause(3)
    assert str(loss) == "rank 1 lost: it is alive, but does not get beyond step 2, 1F0"


def test_ranks_that_wait_for_each_other_are_described(store: Store) -> None:
    store.alive = {1: Doing("step 2, 1B0", 0)}
    said = "it is alive, but does not get beyond step 2, 1B0, which waits for rank 0"
    assert notes_of(store, 0).cause(1) == Loss(1, said)


def test_a_killed_rank_is_silent(store: Store) -> None:
    clock = ManualClock()
    notes_of(store, 1).sign(7, Doing("step 2, 1F0"))
    loss = notes_of(store, 0, clock).cause(1)
    assert str(loss) == "rank 1 lost: it gives no sign of life; its process or host ended, or is stopped"
    assert SILENT_SECONDS <= clock.now() < 2 * SILENT_SECONDS


def test_a_killed_rank_is_blamed_whatever_it_waited_for_when_it_was_killed(store: Store) -> None:
    store.alive = {1: Doing("step 2, 1F0", 2), 3: Doing("step 2, 3F0", 2)}
    notes_of(store, 2).sign(7, Doing("step 2, 2F0", 3))
    assert str(notes_of(store, 0).cause(1)).startswith("rank 2 lost: it gives no sign of life")


def test_a_last_sign_that_arrives_late_does_not_hide_a_lost_rank(store: Store) -> None:
    class Late(ManualClock):
        def pause(self, seconds: float) -> None:
            if self.now() == begun:
                notes_of(store, 1).sign(8, Doing("step 2, 1F0"))
            super().pause(seconds)

    clock = Late()
    begun = clock.now()
    notes_of(store, 1).sign(7, Doing("step 2, 1F0"))
    loss: Any = notes_of(store, 0, clock).silent_one(2)
    assert loss.rank == 1


def test_after_a_wait_for_all_ranks_the_silent_one_is_to_blame(store: Store) -> None:
    notes_of(store, 2).sign(7, Doing("step 2, 2F0"))
    store.alive = {1: Doing("step 2, 1F0")}
    loss: Any = notes_of(store, 0).silent_one(3)
    assert loss.rank == 2
    store.alive[2] = Doing("step 2, 2F0")
    assert notes_of(store, 0).silent_one(3) is None


def test_a_published_reason_is_read_before_the_store_can_end_with_rank_0(store: Store) -> None:
    class EndsStore(ManualClock):
        def pause(self, seconds: float) -> None:
            raise ConnectionError("rank 0 has ended")

    loss = Loss(1, "no luck")
    notes_of(store, 1).publish(loss)
    assert notes_of(store, 0, EndsStore()).silent_one(2) == loss


def watch_of(store: Store, clock: ManualClock, found: list[Loss]) -> PeerWatch:
    doing = Doing("step 1, 0F0")
    return PeerWatch(notes_of(store, 0), 1, 10.0, lambda: doing, found.append, clock)


def test_a_silent_neighbour_is_lost_after_the_patience(store: Store) -> None:
    clock = ManualClock()
    watch = watch_of(store, clock, [])
    assert watch.loss() is None
    notes_of(store, 1).sign(1, Doing("x"))
    for _ in range(11):
        assert watch.loss() is None
        clock.pause(1)
    assert watch.loss() == Loss(1, "it has given no sign of life for 11 s")
    assert notes_of(store, 2).first() == Loss(1, "it has given no sign of life for 11 s")


def test_more_patience_counts_at_once(store: Store) -> None:
    clock = ManualClock()
    watch = watch_of(store, clock, [])
    notes_of(store, 1).sign(1, Doing("x"))
    watch.loss()
    watch.patience = 100.0
    clock.pause(50)
    assert watch.loss() is None


def test_a_rank_that_ended_its_run_is_not_missed(store: Store) -> None:
    clock = ManualClock()
    watch = watch_of(store, clock, [])
    notes_of(store, 1).sign_last()
    for _ in range(30):
        assert watch.loss() is None
        clock.pause(1)


def test_the_watch_reports_once_and_a_store_that_is_gone_is_a_loss(store: Store) -> None:
    found: list[Loss] = []
    watch = watch_of(store, ManualClock(), found)
    assert watch.look()
    store.is_gone = True
    assert not watch.look()
    assert found == [Loss(0, "the ranks' common store is gone")]
