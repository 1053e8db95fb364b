"""The places of ranks in pipelines and replicas, and what a rank does before it meets the others."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zbv_worker.errors import InvalidRun
from zbv_worker.transport.world import Layout, World, create_early, default_backend


def test_a_product_runs_before_the_device_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the first product on a thread creates a handle of cuBLAS, which may wait for the device."""
    ran: list[str] = []
    device = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: ran.append("synchronize"))
    with torch.profiler.profile() as profile:
        create_early(device)
    names = [event.name for event in profile.events()]
    assert sum(name == "aten::mm" for name in names) == 3, "one product forward, two backward"
    assert ran == ["synchronize"]


def test_the_replicas_of_a_position_are_neighbours() -> None:
    layout = Layout.of_world(6, 2)
    assert (layout.pp_degree, layout.world_size) == (3, 6)
    assert layout.sets_of_copies() == [(0, 1), (2, 3), (4, 5)]
    for rank in range(6):
        assert layout.global_rank(layout.pp_rank(rank), layout.replica(rank)) == rank


@pytest.mark.parametrize(("world", "replicas"), [(5, 2), (4, 3), (2, 0)])
def test_a_world_that_does_not_divide_is_refused(world: int, replicas: int) -> None:
    with pytest.raises(InvalidRun, match=f"found {world} ranks and {replicas} replicas"):
        Layout.of_world(world, replicas)


NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[str, ...], torch.Tensor]:
    """Every order of dimensions, with ranks in any order."""
    orders = [some for n in range(1, 6) for some in permutations(NAMES, n) if "pp" in some]
    names = draw(st.sampled_from(orders))
    shape = draw(st.lists(st.integers(1, 3), min_size=len(names), max_size=len(names)))
    count = int(torch.tensor(shape).prod())
    return names, torch.tensor(draw(st.permutations(range(count)))).view(shape)


def coordinates(names: tuple[str, ...], ranks: torch.Tensor, rank: int) -> dict[str, int]:
    where = (ranks == rank).nonzero()[0].tolist()
    return dict(zip(names, where, strict=True))


@given(meshes())
def test_columns_vary_positions_and_copies_data(mesh: tuple[tuple[str, ...], torch.Tensor]) -> None:
    names, ranks = mesh
    layout = Layout.of_mesh(names, ranks, ranks.numel())
    assert layout.world_size == ranks.numel()
    for rank in range(ranks.numel()):
        mine = coordinates(names, ranks, rank)
        assert layout.pp_rank(rank) == mine["pp"]
        assert layout.global_rank(layout.pp_rank(rank), layout.column(rank)) == rank
        column = {layout.global_rank(at, layout.column(rank)) for at in range(layout.pp_degree)}
        data = {name for name in names if name.startswith("dp")}
        expected: dict[str, set[int]] = {"column": set(), "copies": set()}
        for other in range(ranks.numel()):
            theirs = coordinates(names, ranks, other)
            differing = {name for name in names if theirs[name] != mine[name]}
            if differing <= {"pp"}:
                expected["column"].add(other)
            if differing <= data:
                expected["copies"].add(other)
        assert column == expected["column"]
        assert set(layout.copies_of(rank)) == expected["copies"]
        assert layout.copies_of(rank)[layout.replica(rank)] == rank
    assert sorted(sum(layout.sets_of_copies(), ())) == list(range(ranks.numel()))


@given(st.integers(1, 6), st.integers(1, 4))
def test_a_mesh_of_pipelines_and_replicas_is_the_default_layout(degree: int, replicas: int) -> None:
    ranks = torch.arange(degree * replicas).view(degree, replicas)
    found, default = Layout.of_mesh(("pp", "dp"), ranks, ranks.numel()), Layout(degree, replicas)
    for rank in range(ranks.numel()):
        assert found.column(rank) == default.column(rank) == default.replica(rank)
        assert found.pp_rank(rank) == default.pp_rank(rank)
        assert found.copies_of(rank) == default.copies_of(rank)


@pytest.mark.parametrize("names", [None, (), ("dp", "tp")])
def test_a_mesh_without_a_pipeline_is_refused(names: tuple[str, ...] | None) -> None:
    with pytest.raises(InvalidRun, match=r"one must be named 'pp'"):
        Layout.of_mesh(names, torch.arange(4).view(2, 2), 4)


def test_a_part_of_a_mesh_is_refused() -> None:
    with pytest.raises(InvalidRun, match=r"found a mesh of the ranks \[0, 2\]; .* every one of the 4"):
        Layout.of_mesh(("pp",), torch.tensor([0, 2]), 4)


def test_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidRun, match="environment variable RANK: found None"):
        World.current()


@pytest.mark.parametrize(
    ("gpus", "has_nccl", "ranks", "expected", "said"),
    [
        (0, True, 2, "gloo", "found no GPU: computing on CPUs with gloo"),
        (2, True, 2, "nccl", "found 2 GPUs for 2 ranks: computing on GPUs with nccl"),
        (8, True, 4, "nccl", "found 8 GPUs for 4 ranks: computing on GPUs with nccl"),
        (1, True, 2, "gloo", "found 1 GPU for 2 ranks: computing on CPUs with gloo"),
        (2, False, 2, "gloo", "found no GPU: computing on CPUs with gloo"),
    ],
)
def test_nccl_is_the_default_if_every_rank_has_a_gpu(
    gpus: int,
    has_nccl: bool,
    ranks: int,
    expected: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert default_backend(ranks) == expected
    assert f"{said}; --backend changes this" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert default_backend(ranks) == expected
    assert capsys.readouterr().err == ""
