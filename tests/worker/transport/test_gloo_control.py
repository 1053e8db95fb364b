"""Ranks connect under torchrun, with process groups of the user, alone, and several times in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.rank_files import found_by
from torch.distributed.device_mesh import init_device_mesh
from zbv_worker.transport.channels import ChannelKey
from zbv_worker.transport.connect import connect
from zbv_worker.transport.connected import ConnectedTransport
from zbv_worker.transport.rendezvous import lives_in_rank_0
from zbv_worker.transport.world import Layout, World
from zbv_worker.values.structure import TensorSpec

SPEC = TensorSpec((1,), torch.float32)


def used(layout: Layout | None = None) -> dict[str, Any]:
    """Connect, use everything once, and close; returns what this rank saw."""
    world = World.current()
    transport = connect(world, "gloo", CPU, TIMEOUT, layout)
    found = {
        "ranks": transport.gather(world.rank, TIMEOUT),
        "note": transport.posted("note"),
        "sum": transport.sum_over_ranks(torch.ones(1), TIMEOUT).item(),
        "from": received(transport),
        "copies": over_copies(transport),
        "messages": exchanged(transport),
    }
    transport.post("note", "an old one")
    transport.barrier(TIMEOUT)
    transport.close()
    return found


def received(transport: ConnectedTransport) -> float | None:
    """The global rank from which this one receives, when every position sends to the next one."""
    last = transport.layout.pp_degree - 1
    keys = [ChannelKey(position, position + 1) for position in range(last)]
    transport.open(keys, TIMEOUT)
    here = transport.pp_rank
    if here < last:
        transport.sender(keys[here])(torch.tensor([float(transport.rank)]), "its rank")
    number = None
    if here > 0:
        number = transport.receiver(keys[here - 1])(SPEC).wait(TIMEOUT).item()
    transport.flush(TIMEOUT)
    return number


def exchanged(transport: ConnectedTransport) -> list[float]:
    """Two host tensors of the rank before, of which the second is awaited first."""
    control, size = transport.control, transport.world_size
    sent = [torch.tensor([10.0 * number + transport.rank]) for number in (1, 2)]
    placed = [torch.zeros(1), torch.zeros(1)]
    sends = [control.start_send(tensor, (transport.rank + 1) % size) for tensor in sent]
    receives = [control.start_receive(tensor, (transport.rank - 1) % size) for tensor in placed]
    for wait in [*reversed(receives), *sends]:
        wait(TIMEOUT)
    return [tensor.item() for tensor in placed]


def over_copies(transport: ConnectedTransport) -> float:
    """The sum of the global ranks of this rank's replicas."""
    total = torch.tensor([float(transport.rank)])
    transport.sum_over_replicas(total).wait(TIMEOUT)
    return total.item()


def of_an_eager_group(run: Callable[[Layout], Any], layout: Layout) -> tuple[Any, list[str]]:
    """Run something in a default group as ``init_process_group(device_id=...)`` makes it for NCCL.

    Returns what it returns, and the splits of the default group's communicator that torch asked for.
    """
    splits: list[str] = []
    communicator = SimpleNamespace(perform_nocolor_split=lambda device: splits.append(str(device)))
    default, device = dist.group.WORLD, torch.device("cuda", 0)
    assert default is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "bound_device_id", device)
        patch.setattr(dist.distributed_c10d, "_get_split_source", lambda group: communicator)
        result = run(layout)
        assert default.bound_device_id == device
        splits.append("then")
        dist.new_group([0], backend="gloo")  # as users make it
    return result, splits


def of_rank(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"first": used(), "second": used(Layout(2, 2))}
    rank = World.current().rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp"))
    layout = Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, 4)
    found["guest"] = used(layout)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    found["guest again"] = used(Layout.of_mesh(mesh.mesh_dim_names, mesh.mesh, 4))
    found["eager"], found["splits"] = of_an_eager_group(used, layout)
    mine = torch.tensor([rank])
    dist.all_reduce(mine)
    found["user's sum"] = mine.item()
    dist.destroy_process_group()
    found["after"] = used()
    return found


CPU = torch.device("cpu")
TIMEOUT = 60.0
RANKS = range(4)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks saw, one connection after the other."""
    return found_by("worker.transport.test_gloo_control", len(RANKS), tmp_path_factory.mktemp("connected"))


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
