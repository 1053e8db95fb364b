"""Ranks connect under torchrun, with process groups of the user, alone, and several times in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_files import found_by
from zbv_worker.transport.connect import connect
from zbv_worker.transport.rendezvous import lives_in_rank_0
from zbv_worker.transport.world import World

CPU = torch.device("cpu")
TIMEOUT = 60.0
RANKS = range(4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks saw, one connection after the other."""
    return found_by("connecting_rank", len(RANKS), tmp_path_factory.mktemp("connected"))


@pytest.mark.parametrize("time", ["first", "second", "guest", "guest again", "eager", "after"])
def test_every_connection_works_and_starts_without_notes(found: list[dict[str, Any]], time: str) -> None:
    for rank in RANKS:
        assert found[rank][time]["ranks"] == [0, 1, 2, 3]
        assert found[rank][time]["sum"] == 4
        assert found[rank][time]["note"] is None
        assert found[rank][time]["messages"] == [10 + (rank - 1) % 4, 20 + (rank - 1) % 4]


@pytest.mark.parametrize(
    ("time", "senders", "sums"),
    [
        ("first", [None, 0, 1, 2], [0, 1, 2, 3]),  # one pipeline of four
        ("second", [None, None, 0, 1], [1, 1, 5, 5]),  # replicas are neighbours
        ("guest", [None, 0, None, 2], [0, 1, 2, 3]),  # the mesh is (tp, pp): pipelines are neighbours
        ("guest again", [None, 0, None, 2], [2, 4, 2, 4]),  # (dp, pp)
        ("eager", [None, 0, None, 2], [0, 1, 2, 3]),
    ],
)
def test_channels_and_sums_follow_the_layout(
    found: list[dict[str, Any]], time: str, senders: list[int | None], sums: list[int]
) -> None:
    assert [found[rank][time]["from"] for rank in RANKS] == senders
    assert [found[rank][time]["copies"] for rank in RANKS] == sums


def test_groups_do_not_split_the_communicator_of_an_eager_default_group(found: list[dict[str, Any]]) -> None:
    assert [found[rank]["splits"] for rank in RANKS] == [["then"], *[["then", "cuda:0"]] * 3]


def test_the_users_groups_survive(found: list[dict[str, Any]]) -> None:
    assert [found[rank]["user's sum"] for rank in RANKS] == [6] * 4


@pytest.mark.usefixtures("no_environment")
def test_a_process_without_an_environment_is_a_world_of_one_rank() -> None:
    world = World.current()
    assert world == World(0, 1, 0)
    for _ in range(2):
        with connect(world, "gloo", CPU, TIMEOUT) as transport:
            assert transport.gather("alone", TIMEOUT) == ["alone"]
            assert transport.sum_over_ranks(torch.ones(1), TIMEOUT).item() == 1
            transport.barrier(TIMEOUT)
        assert not dist.is_initialized()


@pytest.mark.usefixtures("no_environment")
def test_a_process_that_goes_on_after_an_error_can_connect_again() -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), connect(World.current(), "gloo", CPU, TIMEOUT):
            raise ZeroDivisionError


@pytest.mark.usefixtures("no_environment")
def test_another_thread_reads_the_notes_through_its_own_connection() -> None:
    with connect(World.current(), "gloo", CPU, TIMEOUT) as transport:
        transport.post("note", "text")
        assert transport.control.other_notes().posted("note") == "text"  # type: ignore[attr-defined]


def test_the_environment_decides_where_the_store_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not lives_in_rank_0()
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert lives_in_rank_0()
