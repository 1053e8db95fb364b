"""Ranks meet in a store: a timeout names absent ranks, and a rank that cannot start says why."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # missing in torch's stubs
from torch.distributed.distributed_c10d import Store
from zbv_worker.errors import InvalidRun
from zbv_worker.host.local_ranks import free_port
from zbv_worker.transport import rendezvous
from zbv_worker.transport.rendezvous import meet, named, ranks_on_this_host, refuse

PATIENT = 120.0


@pytest.fixture(autouse=True)
def _quick_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free_port()))):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 0.2)


def in_threads(*calls: object) -> list[BaseException | None]:
    """The exception of each call, or None."""
    raised: list[BaseException | None] = [None] * len(calls)
    stores: list[object] = []  # the store ends with rank 0's object

    def run(at: int) -> None:
        try:
            stores.append(calls[at]())  # type: ignore[operator]
        except Exception as error:
            raised[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT)
    return raised


def test_ranks_that_do_not_start_are_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up as soon as the two others have arrived."""
    store = HashStore()

    def now() -> float:
        return 100.0 if store.check(["meeting/here/0", "meeting/here/2"]) else 0.0

    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    raised = in_threads(lambda: meet(0, 4, 0.3, store), lambda: meet(2, 4, 0.3, store))
    for error in raised:
        assert isinstance(error, TimeoutError | ConnectionError), error
        assert "ranks 1, 3 of 4 did not start within 0.3 s" in str(error)


def test_a_missing_rank_0_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank 0 did not start: no answer at 127\.0\.0\.1"):
        meet(1, 2, 0.2)


def test_a_rank_that_cannot_start_ends_the_rendezvous_with_its_reason() -> None:
    raised = in_threads(
        lambda: meet(0, 3, PATIENT), lambda: meet(1, 3, PATIENT), lambda: refuse(2, 3, "no such model.")
    )
    assert raised[2] is None
    for error in raised[:2]:
        assert isinstance(error, ConnectionError), error
        assert str(error) == "rank 2 cannot start: no such model"


def test_an_environment_without_a_rendezvous_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(InvalidRun, match=r"MASTER_ADDR and MASTER_PORT: found '127\.0\.0\.1' and ''"):
        meet(1, 2, PATIENT)


def test_a_message_names_at_most_16_ranks() -> None:
    assert named(range(20)).endswith("14, 15 and 4 more")


def test_all_ranks_meet_and_count_the_ranks_on_their_host() -> None:
    stores: list[Store] = []
    assert in_threads(*(lambda r=r: stores.append(meet(r, 3, PATIENT)) for r in range(3))) == [None] * 3
    assert [ranks_on_this_host(store) for store in stores] == [3] * 3


def test_the_last_rank_may_arrive_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank announces itself before it is counted; a check in between finds all ranks present."""

    class Late:
        def add(self, key: str, amount: int) -> int:
            return 1

        def set(self, key: str, value: str) -> None:
            assert key != "meeting/refusal", value

        def check(self, keys: list[str]) -> bool:
            return keys != ["meeting/refusal"]

    store = Late()
    monkeypatch.setattr("zbv_worker.transport.rendezvous._connect", lambda *_, **__: store)
    assert meet(0, 2, -1.0) is store  # type: ignore[comparison-overlap]
